"""How the demo's result is shown: a timeline and a verdict for people, one JSON object for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.client.sdk import ConnectionLost, Finished, NodeLost, Placed, TurnEvent
from kvferry.drills.conversation import TurnLog
from kvferry.drills.demo import DemoResult
from kvferry.drills.judge import Fault, Verdict

_FAULTS = (("lost", Fault.LOST), ("duplicated", Fault.DUPLICATED), ("differing", Fault.DIFFERING))


def print_report(result: DemoResult, console: Console) -> None:
    """The timeline of the disturbed conversation, its answers, and the verdict."""
    console.print(_timeline(result))
    for number, log in enumerate(result.disturbed, start=1):
        console.print(Text(f"answer {number}: ", "bold") + _answer_text(result, number, log))
    console.print()
    print_verdict(result.verdict, console)


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Tokens lost, duplicated, differing; and each finding."""
    for finding in verdict.findings[:20]:
        console.print(f"  {finding.sentence}", style="red", markup=False)
    if len(verdict.findings) > 20:
        console.print(f"  and {len(verdict.findings) - 20} more", style="red")
    counts = ", ".join(f"{word} {verdict.count(fault)}" for word, fault in _FAULTS)
    compared = f"{verdict.n_tokens_compared} tokens in {verdict.n_turns} turns compared with the undisturbed run"
    style = "bold green" if verdict.is_good else "bold red"
    word = "kept" if verdict.is_good else "BROKEN"
    console.print(f"{compared}: {word}", style=style, highlight=False)
    console.print(f"tokens {counts}", style=style, highlight=False, soft_wrap=True)  # one line, whatever the width


def as_json(result: DemoResult) -> dict[str, Any]:
    """The same for programs."""
    return {
        "seed": result.seed,
        "kill": dataclasses.asdict(result.kill),
        "seconds": result.seconds,
        "turns": [_turn_json(log) for log in result.disturbed],
        "control": [_turn_json(log) for log in result.control],
        "verdict": {
            "good": result.verdict.is_good,
            "n_turns": result.verdict.n_turns,
            "n_tokens_compared": result.verdict.n_tokens_compared,
            **{fault.value: result.verdict.count(fault) for fault in Fault},
            "findings": [dataclasses.asdict(finding) for finding in result.verdict.findings],
        },
    }


def _turn_json(log: TurnLog) -> dict[str, Any]:
    record = log.record
    return {
        "token_ids": [token.token_id for token in record.received],
        "text": record.text,
        "finish_reason": record.finish_reason,
        "placements": [dataclasses.asdict(placed) for placed in log.placements],
        "longest_gap_seconds": round(log.longest_gap_s, 3),
    }


def _timeline(result: DemoResult) -> Table:
    table = Table(title="what the client saw", title_justify="left", header_style="bold", title_style="bold")
    for column, justify in (("turn", "right"), ("at", "right"), ("event", "left"), ("rows of the prompt", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for number, log in enumerate(result.disturbed, start=1):
        if number == 3:
            table.add_row("", "", Text("all processes stopped and started again", "yellow"), "")
        for at, event in log.events:
            row = _row(result, number, log, event)
            if row is not None:
                table.add_row(str(number), f"{at:.2f} s", *row)
        table.add_section()
    return table


def _row(result: DemoResult, number: int, log: TurnLog, event: TurnEvent) -> tuple[Text, str] | None:
    match event:
        case Placed():
            verb = "serves" if event.first_index == 0 else f"goes on from token {event.first_index}"
            return Text(f"{event.node_id} {verb}"), _rows_text(event)
        case NodeLost():
            struck = number == 2 and event.node_id == result.kill.node_id
            how = f"SIGKILL after token {result.kill.after_token}; " if struck else ""
            return Text(f"{event.node_id} lost: {how}{event.cause} after {event.n_tokens} tokens", "red"), ""
        case ConnectionLost():
            return Text(f"coordinator lost after {event.n_tokens} tokens", "red"), ""
        case Finished():
            pause = f", pause seen {log.longest_gap_s:.2f} s" if event.n_placements > 1 else ""
            text = f"{event.n_answer_tokens} tokens, first after {event.first_token_seconds:.2f} s{pause}"
            return Text(f"finished ({event.reason.value}): {text}"), ""
        case _:
            return None


def _rows_text(placed: Placed) -> str:
    if placed.prefix is None:
        return ""
    prefix = placed.prefix
    return (
        f"{prefix.n_tokens}: {prefix.n_resident} resident, {prefix.n_restored} restored, {prefix.n_computed} computed"
    )


def _answer_text(result: DemoResult, number: int, log: TurnLog) -> Text:
    """With a mark where the node was killed."""
    record = log.record
    if number != 2:
        return Text(record.text.strip())
    at = result.kill.after_token
    before = "".join(token.text for token in record.received[:at])
    after = "".join(token.text for token in record.received[at:]) + record.tail_text
    return Text(before.lstrip()) + Text(" ⚡ ", "bold red") + Text(after.rstrip())
