"""The commands of this room: chat, nodes, route, sessions, status, top."""

from kvferry.client.commands.chat import chat
from kvferry.client.commands.fleet import nodes, status
from kvferry.client.commands.route import route
from kvferry.client.commands.sessions import sessions
from kvferry.client.commands.top import top

__all__ = ["chat", "nodes", "route", "sessions", "status", "top"]
