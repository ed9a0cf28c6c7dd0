"""How a turn is shown: the answer on stdout as it comes, all else on stderr; or every event as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Literal, Protocol

import click

from kvferry.client.sdk import (
    ConnectionLost,
    Finished,
    FinishReason,
    NodeLost,
    Placed,
    PrefixReport,
    Started,
    Token,
    ToolCall,
    TurnEvent,
)
from kvferry.terminal.words import say

_ENDINGS = {
    FinishReason.LENGTH: ", cut at the token limit",
    FinishReason.STOP_STRING: ", ended by a stop string",
    FinishReason.CANCELLED: ", stopped",
    FinishReason.DEADLINE: ", out of time",
    FinishReason.ERROR: ", failed",
}


class TurnView(Protocol):
    """Where the events of turns go."""

    def show(self, event: TurnEvent) -> None:
        """One event of a turn."""

    def note(self, text: str) -> None:
        """A remark to the person."""


class JsonView:
    """One JSON object a line: {"event": "token", ...}."""

    def show(self, event: TurnEvent) -> None:
        """To stdout; a token's bytes, which may be a part of a character, as numbers."""
        kind = "".join("_" + c.lower() if c.isupper() else c for c in type(event).__name__).removeprefix("_")
        click.echo(json.dumps({"event": kind} | dataclasses.asdict(event), default=list))

    def note(self, text: str) -> None:
        """Not for programs: to stderr."""
        say(text, err=True)


class TextView:
    """For people. Remarks and thinking are dimmed, on stderr, and never mix with the answer on stdout."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._in_line: Literal["", "content", "thinking"] = ""
        self._is_away = False
        self._placed: Placed | None = None

    def show(self, event: TurnEvent) -> None:
        """One event of a turn."""
        if not isinstance(event, ConnectionLost):
            self._is_away = False
        match event:
            case Started():
                self._placed = None
            case Token():
                self._show_parts(event.reasoning, event.content, event.tool_calls)
            case Placed():
                self._show_placed(event)
            case NodeLost():
                self.note(
                    f"{event.node_id} is lost ({event.cause}) after {event.n_tokens} tokens; looking for another node"
                )
            case ConnectionLost() if not self._is_away:
                self._is_away = True
                self.note(f"{event.cause}; asking again from token {event.n_tokens} on, for {self._patience_s:g} s")
            case Finished():
                self._show_parts(event.tail_reasoning, event.tail_content, event.tail_calls)
                for text in event.answer.malformed_calls if event.answer else ():
                    self.note(f"what should have been a call is none: {text.strip()}")
                self.note(self._summary(event))

    def note(self, text: str) -> None:
        """A remark on a line of its own."""
        self._end_line()
        say(f"[{text}]", dim=True, err=True)

    def _show_parts(self, reasoning: str, content: str, calls: Sequence[ToolCall]) -> None:
        if reasoning:
            if self._in_line == "content":
                self._end_line()
            say(reasoning, nl=False, dim=True, err=True)
            self._in_line = "" if reasoning.endswith("\n") else "thinking"
        if content:
            if self._in_line == "thinking":
                self._end_line()
            say(content, nl=False)
            self._in_line = "" if content.endswith("\n") else "content"
        for call in calls:
            self._end_line()
            say(call_text(call))

    def _end_line(self) -> None:
        if self._in_line:
            say(err=self._in_line == "thinking")
            self._in_line = ""

    def _show_placed(self, placed: Placed) -> None:
        self._placed = placed
        if placed.first_index > 0 and placed.prefix is not None:
            self.note(f"{placed.node_id} goes on from token {placed.first_index}: {reuse_text(placed.prefix)}")

    def _summary(self, finished: Finished) -> str:
        where = self._placed.node_id if self._placed else "no node"
        reuse = f"; {reuse_text(self._placed.prefix)}" if self._placed and self._placed.prefix else ""
        pause = f", longest pause {finished.longest_pause_seconds:.1f} s" if finished.longest_pause_seconds else ""
        return (
            f"{where}{reuse}; {finished.n_answer_tokens} tokens in {finished.total_seconds:.1f} s, "
            f"first after {finished.first_token_seconds:.2f} s{pause}{_ENDINGS.get(finished.reason, '')}"
        )


def call_text(call: ToolCall) -> str:
    """As a program would write it: weather(city="Rome", days=2)."""
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def reuse_text(prefix: PrefixReport) -> str:
    """Where the rows came from."""
    refused = f", {len(prefix.refused_snapshots)} snapshots refused" if prefix.refused_snapshots else ""
    return (
        f"{prefix.n_tokens} tokens: {prefix.n_resident} in memory, {prefix.n_restored} restored, "
        f"{prefix.n_computed} computed{refused}"
    )
