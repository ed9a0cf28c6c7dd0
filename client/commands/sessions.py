"""`kvferry sessions`: list, show, fork, delete; export and import are in transfer.py."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from kvferry.client.commands.options import connect, coordinator_option
from kvferry.client.commands.transfer import export_session, import_session
from kvferry.client.sdk import SessionInfo
from kvferry.terminal.completing import completes
from kvferry.terminal.output import json_option, print_json, print_table
from kvferry.terminal.words import say


@click.group()
def sessions() -> None:
    """List, show, fork, delete, export and import conversations."""


sessions.add_command(export_session)
sessions.add_command(import_session)


@sessions.command("list", epilog="Example: kvferry sessions list --limit 5 --json")
@coordinator_option
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many.")
@json_option
def list_sessions(coordinator: str, limit: int, as_json: bool) -> None:
    """List conversations, most recently used first."""
    with connect(coordinator) as client:
        found = client.list_sessions(limit=limit)
    if as_json:
        print_json(found)
    else:
        print_sessions(found)


@sessions.command(epilog="Example: kvferry sessions show SESSION")
@click.argument("session_id", shell_complete=completes("sessions"))
@coordinator_option
@json_option
def show(session_id: str, coordinator: str, as_json: bool) -> None:
    """Show a conversation with its answers."""
    with connect(coordinator) as client:
        details = client.session(session_id).details()
    if as_json:
        print_json(details)
        return
    head = details.session
    tenant = f", tenant {head.tenant}" if head.tenant else ""
    say(f"session {head.session_id}: {head.n_turns} turns, {head.n_tokens} tokens, model {head.model}{tenant}")
    for turn in details.turns:
        for message in turn.messages:
            say(f"\n[{message.role}] {message.content}")
            for image in message.images:
                size = f"{image.width} x {image.height} pixels, {image.n_tokens} tokens"
                say(f"[image {image.content_hash[:12]}, {size}, before character {image.at}]")
        nodes = ", ".join(dict.fromkeys(p.node_id for p in turn.placements)) or "no node yet"
        say(f"\n[assistant, {turn.n_answer_tokens} tokens, {nodes}, {turn.state.value}] {turn.answer}")


@sessions.command(epilog="Example: kvferry sessions fork SESSION")
@click.argument("session_id", shell_complete=completes("sessions"))
@coordinator_option
@click.option("--turns", type=click.IntRange(min=0), default=None, help="Keep the first N turns only.")
@click.option(
    "--tokens",
    type=click.IntRange(min=0),
    default=None,
    help="Keep the first N tokens: a turn's end, or inside an answer.",
)
@click.option("--name", default=None, help="Name of the new session.")
@json_option
def fork(
    session_id: str, coordinator: str, turns: int | None, tokens: int | None, name: str | None, as_json: bool
) -> None:
    """Start a new conversation from the first turns of another."""
    with connect(coordinator) as client:
        forked = client.session(session_id).fork(name, n_turns=turns, n_tokens=tokens)
    if as_json:
        print_json({"session_id": forked.id, "forked_from": session_id})
    else:
        say(forked.id)


@sessions.command(epilog="Example: kvferry sessions delete SESSION")
@click.argument("session_id", shell_complete=completes("sessions"))
@coordinator_option
@json_option
def delete(session_id: str, coordinator: str, as_json: bool) -> None:
    """Forget a conversation."""
    with connect(coordinator) as client:
        client.session(session_id).delete()
    if as_json:
        print_json({"deleted": session_id})
    else:
        say(f"deleted {session_id}")


def print_sessions(found: list[SessionInfo]) -> None:
    """As a table."""
    rows = [
        [
            session.session_id,
            str(session.n_turns),
            str(session.n_tokens),
            datetime.fromtimestamp(session.updated_at_ms / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M"),
            session.last_node_id or "-",
            "running" if session.open_turn_id else "",
        ]
        for session in found
    ]
    print_table(["session", "#turns", "#tokens", "used", "node", ""], rows, "No sessions yet.")
