"""Holds a conversation through the SDK and keeps all that a client can see of it, with the time at which it saw it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from kvferry.client.errors import BrokenSequence
from kvferry.client.sdk import GREEDY, Finished, Placed, Sampling, Session, Token, TurnEvent
from kvferry.drills.judge import AnswerRecord, ReceivedToken


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What is said, and how the answer is drawn."""

    text: str
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    images: tuple[bytes, ...] = ()


@dataclass
class TurnLog:
    """One turn as a client saw it. Times are seconds since the turn was asked for."""

    request: TurnRequest
    events: list[tuple[float, TurnEvent]] = field(default_factory=list)
    broken: BrokenSequence | None = None

    @property
    def record(self) -> AnswerRecord:
        """For the judge; a token that broke the sequence is in it as well."""
        received = [
            ReceivedToken(event.sequence, event.token_id, event.text)
            for _, event in self.events
            if isinstance(event, Token)
        ]
        if self.broken is not None:
            received.append(ReceivedToken(self.broken.received, -1, ""))
        finished = self.finished
        return AnswerRecord(
            tuple(received),
            finished.tail_text if finished else "",
            finished.reason.value if finished else "",
        )

    @property
    def finished(self) -> Finished | None:
        """The last event, when the turn ended."""
        last = self.events[-1][1] if self.events else None
        return last if isinstance(last, Finished) else None

    @property
    def placements(self) -> list[Placed]:
        """Nodes that served, in order."""
        return [event for _, event in self.events if isinstance(event, Placed)]

    @property
    def longest_gap_s(self) -> float:
        """Between two tokens, as the client saw it."""
        times = [at for at, event in self.events if isinstance(event, Token)]
        return max((b - a for a, b in pairwise(times)), default=0.0)


def hold_turn(
    session: Session,
    request: TurnRequest,
    on_event: Callable[[TurnLog, TurnEvent], None] | None = None,
    turn_id: str | None = None,
) -> TurnLog:
    """Runs one turn to its end; `on_event` is where a drill strikes. A broken sequence ends the turn and is kept."""
    log = TurnLog(request)
    start = time.monotonic()
    turn = session.generate(
        request.text,
        images=request.images,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        stop=request.stop,
        turn_id=turn_id,
    )
    with turn:
        try:
            for event in turn:
                log.events.append((time.monotonic() - start, event))
                if on_event is not None:
                    on_event(log, event)
        except BrokenSequence as error:
            log.broken = error
    return log
