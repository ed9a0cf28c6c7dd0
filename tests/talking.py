"""Conversations that go on while something is done to the cluster, each judged against an undisturbed one."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from kvferry.client.sdk import Client, Session
from kvferry.drills.conversation import TurnLog, TurnRequest, hold_turn
from kvferry.drills.judge import AnswerRecord


class Truth(Protocol):
    """What the answers are when nothing is done to the cluster."""

    def assert_same(self, turns: Sequence[TurnRequest], records: Sequence[AnswerRecord], session: Session) -> None:
        """No token is lost, doubled or another."""


@dataclass
class Held:
    """A conversation that came to its end."""

    session: Session
    turns: Sequence[TurnRequest]
    logs: list[TurnLog] = field(default_factory=list)


class Load:
    """``n_talkers`` people talk at once, from `with` to its end; each conversation that began is held to its end."""

    def __init__(self, address: str, conversations: Sequence[Sequence[TurnRequest]], n_talkers: int) -> None:
        self._client = Client(address, tls_dir=os.environ.get("KVFERRY_TLS_DIR"))
        self._conversations = conversations
        self._enough = threading.Event()
        self._talkers = [threading.Thread(target=self._talk, args=(i,), name=f"talker-{i}") for i in range(n_talkers)]
        self.held: list[Held] = []
        self.failures: list[BaseException] = []

    def __enter__(self) -> Self:
        for talker in self._talkers:
            talker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._enough.set()
        for talker in self._talkers:
            talker.join()
        if kind is not None:
            self._client.close()

    @property
    def n_moved(self) -> int:
        """Turns that more than one node had."""
        return sum(len({placed.node_id for placed in log.placements}) > 1 for held in self.held for log in held.logs)

    def judge(self, truth: Truth) -> None:
        """No stream failed, and each answer is the truth."""
        assert not self.failures, self.failures
        for held in self.held:
            truth.assert_same(held.turns, [log.record for log in held.logs], held.session)
        self._client.close()

    def _talk(self, number: int) -> None:
        try:
            while not self._enough.is_set():
                held = Held(self._client.create_session(), self._conversations[number % len(self._conversations)])
                for turn in held.turns:
                    held.logs.append(hold_turn(held.session, turn))
                self.held.append(held)
        except BaseException as error:  # noqa: BLE001 - told by `judge`
            self.failures.append(error)
