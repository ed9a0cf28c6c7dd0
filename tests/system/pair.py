"""Two nodes of a tiny model, and eight sessions at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvferry.client.sdk import Client, Placed, Sampling, Session, Token, TurnEvent
from kvferry.drills.conversation import TurnLog, TurnRequest, hold_turn

from .rig import ANSWER_TOKENS, Control, options
from .tripped import Tripped


def tripped_pair(model: Path, directory: Path, **changes: Any) -> Tripped:
    """Two small nodes that take many turns at once and save often."""
    arguments = ("--max-running", "32", "--publish-every-tokens", "32", "--publish-min-tokens", "1")
    defaults = {"n_nodes": 2, "kv_memory": "64MiB", "context": 1024, "node_arguments": arguments}
    return Tripped(options(str(model), directory, **(defaults | changes)))


def whole_questions(control: Control, n: int) -> list[TurnRequest]:
    """Questions with answers of full length, alternately greedy and drawn with a seed."""
    found: dict[int, list[TurnRequest]] = {0: [], 1: []}
    for number in range(20 * n):
        sampling = Sampling(temperature=0.8, seed=number) if number % 2 else Sampling()
        turn = TurnRequest(f"Story {number:03d}.", ANSWER_TOKENS, sampling)
        if len(found[number % 2]) < n // 2 and len(control.answer(turn).received) == ANSWER_TOKENS:
            found[number % 2].append(turn)
        if len(found[0]) == len(found[1]) == n // 2:
            return [*found[0], *found[1]]
    raise AssertionError("too few answers have full length")


class Choir:
    """Several sessions that are asked at once, each in a thread of its own."""

    def __init__(self, client: Client, turns: Sequence[TurnRequest], sessions: Sequence[Session] = ()) -> None:
        self.turns = list(turns)
        self.sessions = list(sessions) or [client.create_session() for _ in turns]
        self._pool = ThreadPoolExecutor(len(self.turns))
        self._arrived = [0] * len(self.turns)
        self._placed: list[str] = [""] * len(self.turns)
        self._heard = threading.Condition()
        self._logs = [
            self._pool.submit(hold_turn, session, turn, self._listener(i))
            for i, (session, turn) in enumerate(zip(self.sessions, self.turns, strict=True))
        ]

    def wait_for_tokens(self, n: int, n_sessions: int = 0, timeout_s: float = 60.0) -> None:
        """Until so many sessions, 0: all of them, have the first n tokens of their answers."""
        needed = n_sessions or len(self._arrived)
        with self._heard:
            assert self._heard.wait_for(lambda: sum(a >= n for a in self._arrived) >= needed, timeout_s), self._arrived

    def wait_until_placed(self, node_id: str, timeout_s: float = 60.0) -> None:
        """Until that node answers all of them."""
        with self._heard:
            assert self._heard.wait_for(lambda: set(self._placed) == {node_id}, timeout_s), self._placed

    @property
    def arrived(self) -> list[int]:
        """Tokens that each session has."""
        return list(self._arrived)

    def end(self) -> list[TurnLog]:
        """Every session's whole turn."""
        logs = [log.result(120) for log in self._logs]
        self._pool.shutdown()
        return logs

    def assert_undisturbed(self, control: Control, logs: Sequence[TurnLog]) -> None:
        """Nothing lost, doubled, reordered or different, neither for the reader nor in what is kept."""
        for turn, session, log in zip(self.turns, self.sessions, logs, strict=True):
            assert len(log.record.received) == ANSWER_TOKENS
            control.assert_same([turn], [log.record], session)

    def _listener(self, number: int) -> Callable[[TurnLog, TurnEvent], None]:
        def hear(_log: TurnLog, event: TurnEvent) -> None:
            with self._heard:
                if isinstance(event, Token):
                    self._arrived[number] = event.sequence + 1
                if isinstance(event, Placed):
                    self._placed[number] = event.node_id
                self._heard.notify_all()

        return hear
