"""The commands of this room: chat, nodes, route, sessions, status."""

from kvferry.client.commands.chat import chat
from kvferry.client.commands.fleet import nodes, status
from kvferry.client.commands.route import route
from kvferry.client.commands.sessions import sessions

__all__ = ["chat", "nodes", "route", "sessions", "status"]
