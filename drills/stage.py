"""The conversations of a drill: several at once, each in a thread of its own, and all that their clients see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from typing import Final

from kvferry.client.errors import ClientError
from kvferry.client.sdk import Client, ConnectionLost, Finished, NodeLost, Placed, Sampling, Token, TurnEvent
from kvferry.drills.conversation import TurnLog, TurnRequest, hold_turn
from kvferry.drills.errors import DrillImpossible
from kvferry.drills.judge import AnswerRecord

TEXT_CHARACTERS: Final = 700
"""Of the text that is asked about: a prompt of some 200 tokens, worth saving and quickly computed."""

UNDISTURBED_S: Final = 600.0
"""For one conversation: three long answers of a slow board."""


def requests_of(number: int, n_turns: int, answer_tokens: int) -> list[TurnRequest]:
    """What conversation `number` says. Greedy with a penalty, so that answers are long, or drawn with a seed."""
    text = files("kvferry.drills").joinpath("texts/ferry.txt").read_text(encoding="utf-8")[:TEXT_CHARACTERS]
    sampling = (
        Sampling(repetition_penalty=1.1)
        if number % 2 == 0
        else Sampling(temperature=0.7, top_p=0.95, repetition_penalty=1.1, seed=number)
    )
    questions = [
        f"Here is a text.\n\n{text}\n\nTell the whole story at length, as traveller {number + 1} would.",
        "Now tell what happened before that, in many words.",
        "And what happened in the years that followed? Take your time.",
    ]
    return [TurnRequest(question, answer_tokens, sampling) for question in questions[:n_turns]]


@dataclass(frozen=True, slots=True)
class Heard:
    """An event of a turn (None: it was asked), and when, by time.monotonic."""

    at: float
    turn: int
    event: TurnEvent | None


@dataclass
class Conversation:
    """One of them, as its client sees it. Turns count from 1; written by its own thread only."""

    number: int
    requests: list[TurnRequest]
    heard: list[Heard] = field(default_factory=list)
    logs: dict[int, TurnLog] = field(default_factory=dict)
    turn: int = 0
    n_tokens: int = 0
    node_id: str = ""
    error: str = ""
    token_ids: tuple[int, ...] = ()

    @property
    def records(self) -> list[AnswerRecord]:
        """Of the turns that were begun, for the judge."""
        return [self.logs[turn].record for turn in sorted(self.logs)]

    @property
    def waits(self) -> list[tuple[float, float]]:
        """Every (from, to) in which its person waited for a token: the question to the first one, and between two."""
        spans: list[tuple[float, float]] = []
        for turn in range(1, self.turn + 1):
            times = [
                heard.at
                for heard in self.heard
                if heard.turn == turn and (heard.event is None or isinstance(heard.event, Token))
            ]
            spans += pairwise(times)
        return spans

    def events(self, kind: type[NodeLost | Placed | ConnectionLost]) -> list[tuple[float, TurnEvent]]:
        """All events of a kind, with their times."""
        return [(heard.at, heard.event) for heard in self.heard if isinstance(heard.event, kind)]


class Stage:
    """Begins all conversations when it is made; see `wait` and `end`."""

    def __init__(self, client: Client, plans: Sequence[list[TurnRequest]], tenant: str) -> None:
        self.conversations = [Conversation(number, plan) for number, plan in enumerate(plans)]
        self._heard = threading.Condition()
        self._client = client
        self._threads = [
            threading.Thread(target=self._hold, args=(conversation, tenant), name="conversation", daemon=True)
            for conversation in self.conversations
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        """Whether every conversation has ended, well or not."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def serving(self) -> str:
        """The node that has the first conversation's turn."""
        return self.conversations[0].node_id

    def has_come_to(self, turn: int, n_tokens: int) -> bool:
        """Whether the first conversation has so many tokens of that answer, or is beyond; or all have ended."""
        first = self.conversations[0]
        return self.is_over or (first.turn, first.n_tokens) >= (turn, n_tokens)

    def wait(self, seconds: float) -> None:
        """Until something is heard, or this long."""
        with self._heard:
            self._heard.wait(seconds)

    def check_answering(self, turn: int, at: float) -> None:
        """Raises DrillImpossible when the first conversation's answer was over by then: nothing was disturbed."""
        first = self.conversations[0]
        ends = [heard.at for heard in list(first.heard) if heard.turn == turn and isinstance(heard.event, Finished)]
        if first.turn < turn or (ends and ends[0] <= at):
            said = first.error or "the machine is too fast, or the strike too slow"
            raise DrillImpossible(f"Answer {turn} was over before it could be disturbed: {said}.")

    def check_undisturbed(self) -> None:
        """Raises DrillImpossible when something broke before anything was done: what came later would prove nothing."""
        for conversation in self.conversations:
            for _, event in [*conversation.events(NodeLost), *conversation.events(ConnectionLost)]:
                what = event.node_id if isinstance(event, NodeLost) else "the coordinator"
                cause = event.cause if isinstance(event, NodeLost | ConnectionLost) else ""
                raise DrillImpossible(
                    f"{what} was lost before anything was disturbed ({cause}); is the machine overloaded?"
                )

    def end(self, until: float) -> bool:
        """Whether all conversations have ended by then."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return self.is_over

    def _hold(self, conversation: Conversation, tenant: str) -> None:
        try:
            session = self._client.create_session(tenant=tenant)
            for turn, request in enumerate(conversation.requests, start=1):
                self._note(conversation, turn, None)
                conversation.logs[turn] = hold_turn(session, request, self._listener(conversation, turn))
            conversation.token_ids = session.details().token_ids
        except ClientError as error:
            conversation.error = str(error)
        except (CancelledError, RuntimeError) as error:  # the drill was interrupted: the client is closed under us
            conversation.error = f"given up ({str(error) or type(error).__name__})"
        with self._heard:
            self._heard.notify_all()

    def _listener(self, conversation: Conversation, turn: int) -> Callable[[TurnLog, TurnEvent], None]:
        def hear(log: TurnLog, event: TurnEvent) -> None:
            conversation.logs[turn] = log
            self._note(conversation, turn, event)

        return hear

    def _note(self, conversation: Conversation, turn: int, event: TurnEvent | None) -> None:
        with self._heard:
            conversation.heard.append(Heard(time.monotonic(), turn, event))
            if event is None:
                conversation.turn, conversation.n_tokens = turn, 0
            elif isinstance(event, Token):
                conversation.n_tokens = event.sequence + 1
            elif isinstance(event, Placed):
                conversation.node_id = event.node_id
            self._heard.notify_all()


def hold_undisturbed(client: Client, plan: list[TurnRequest], tenant: str, number: int) -> Conversation:
    """The truth. A tenant of its own: none of its rows may help the disturbed conversation, nor the other way."""
    stage = Stage(client, [plan], tenant)
    if not stage.end(time.monotonic() + UNDISTURBED_S):
        raise DrillImpossible(f"A conversation that nobody disturbs did not end within {UNDISTURBED_S:.0f} s.")
    conversation = stage.conversations[0]
    conversation.number = number
    if conversation.error:
        raise DrillImpossible(f"A conversation fails without any disturbance: {conversation.error}")
    return conversation
