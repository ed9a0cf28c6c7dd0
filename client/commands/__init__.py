"""The commands of this room: chat, nodes, sessions, status."""

from kvferry.client.commands.chat import chat
from kvferry.client.commands.fleet import nodes, status
from kvferry.client.commands.sessions import sessions

__all__ = ["chat", "nodes", "sessions", "status"]
