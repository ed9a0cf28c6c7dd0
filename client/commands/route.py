"""`kvferry route --explain SESSION`: why each turn went where it went, and how right the router was."""

from __future__ import annotations

import click

from kvferry.client.commands.options import connect, coordinator_option
from kvferry.client.errors import UnknownTurn
from kvferry.client.sdk import Candidate, Placed
from kvferry.terminal.completing import completes
from kvferry.terminal.output import json_option, print_json, print_table
from kvferry.terminal.words import say


@click.command(epilog="Example: kvferry route --explain SESSION")
@click.option(
    "--explain",
    "session_id",
    required=True,
    shell_complete=completes("sessions"),
    metavar="SESSION",
    help="The conversation to explain.",
)
@click.option("--turn", "turn_id", default=None, metavar="TURN", help="One turn only. [default: all]")
@coordinator_option
@json_option
def route(session_id: str, turn_id: str | None, coordinator: str, as_json: bool) -> None:
    """Show, for each placement, what every node was predicted to need for the first token, and what it took."""
    with connect(coordinator) as client:
        turns = client.session(session_id).details().turns
    shown = [turn for turn in turns if turn_id in {None, turn.turn_id}]
    if turn_id is not None and not shown:
        raise UnknownTurn(f"session {session_id} has no turn {turn_id}")
    if as_json:
        print_json([{"turn_id": turn.turn_id, "placements": turn.placements} for turn in shown])
        return
    if not shown:
        say("No turns yet.")
    for turn in shown:
        say(f"turn {turn.turn_id}, {turn.n_prompt_tokens} tokens of prompt")
        for placed in turn.placements:
            print_placement(placed)


def print_placement(placed: Placed) -> None:
    """One decision: the outcome, then all candidates."""
    hidden = max(0, placed.n_candidates - len(placed.candidates))
    say(
        f"  from token {placed.first_index} on {placed.node_id}: first token predicted in "
        f"{seconds_text(placed.predicted_seconds)}, {actual_text(placed)}"
    )
    columns = [
        "",
        "node",
        "#first token",
        "#queue",
        "#restore",
        "#look",
        "#prefill",
        "#others",
        "#memory",
        "#store",
        "why",
    ]
    print_table(columns, [row_of(candidate) for candidate in placed.candidates], "  No candidates were kept.")
    if hidden:
        say(f"  and {hidden} nodes that were further away")


def actual_text(placed: Placed) -> str:
    """What came of the prediction."""
    actual, predicted = placed.first_token_seconds, placed.predicted_seconds
    if not actual:
        return "none came"
    return f"came in {seconds_text(actual)} ({(predicted - actual) / actual:+.0%})"


def row_of(candidate: Candidate) -> list[str]:
    """As the table shows it."""
    able = candidate.n_computed > 0
    parts = [
        seconds_text(value) if able else "-"
        for value in (
            candidate.predicted_seconds,
            candidate.queue_seconds,
            candidate.restore_seconds,
            candidate.look_seconds,
            candidate.prefill_seconds,
            candidate.others_seconds,
        )
    ]
    rows = [str(candidate.n_resident), str(candidate.n_stored)]
    return ["*" if candidate.chosen else "", candidate.node_id, *parts, *rows, candidate.reason]


def seconds_text(seconds: float) -> str:
    """28 ms, 1.4 s."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
