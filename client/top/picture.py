"""What is shown, as values: pure, with time as an argument."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from kvferry.client.sdk import ClusterStatus, Finished, NodeLost, Placed, Token, TurnEvent

RATE_WINDOW_S: Final = 5.0
"""Over which a stream's rate is taken: long enough for a slow board's tokens, short enough to see it change."""
PAUSE_S: Final = 1.0
"""A gap between two tokens that a reader notices."""
LINGER_S: Final = 3.0
"""A turn that is over stays for so long, else short ones would never be seen."""


class Phase(StrEnum):
    """Where a turn is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    MOVING = "moving"
    OVER = "over"


@dataclass(slots=True)
class Stream:
    """One turn that is followed. Times in monotonic seconds."""

    session_id: str
    turn_id: str
    began_s: float
    node_id: str = ""
    phase: Phase = Phase.WAITING
    n_tokens: int = 0
    n_prompt: int = 0
    n_reused: int = 0
    n_pauses: int = 0
    longest_pause_s: float = 0.0
    n_moves: int = 0
    ended_s: float | None = None
    _token_times: deque[float] = field(default_factory=lambda: deque(maxlen=512), repr=False)

    def push(self, event: TurnEvent, now_s: float) -> None:
        """One event, as it comes."""
        match event:
            case Placed():
                self.node_id, self.phase = event.node_id, Phase.PREFILL
                if event.prefix is not None:
                    self.n_prompt = event.prefix.n_tokens
                    self.n_reused = event.prefix.n_resident + event.prefix.n_restored
            case Token():
                self._token(now_s)
            case NodeLost():
                self.phase = Phase.MOVING
                self.n_moves += 1
            case Finished():
                self.phase, self.ended_s = Phase.OVER, now_s

    def _token(self, now_s: float) -> None:
        if self._token_times and (gap := now_s - self._token_times[-1]) > PAUSE_S:
            self.n_pauses += 1
            self.longest_pause_s = max(self.longest_pause_s, gap)
        self.phase = Phase.DECODE
        self.n_tokens += 1
        self._token_times.append(now_s)

    def rate(self, now_s: float) -> float:
        """Tokens per second lately; 0 while there are none."""
        if self.phase is not Phase.DECODE:
            return 0.0
        recent = [at for at in self._token_times if at > now_s - RATE_WINDOW_S]
        return len(recent) / max(now_s - recent[0], 0.5) if recent else 0.0

    def waits_s(self, now_s: float) -> float:
        """Since something was last heard, while it is not over."""
        last = self._token_times[-1] if self._token_times else self.began_s
        return 0.0 if self.ended_s is not None else now_s - last

    def facts(self, now_s: float) -> dict[str, Any]:
        """For a program."""
        return {
            "session_id": self.session_id,
            "turn_id": self.turn_id,
            "node_id": self.node_id,
            "phase": self.phase.value,
            "n_tokens": self.n_tokens,
            "tokens_per_second": round(self.rate(now_s), 2),
            "n_prompt_tokens": self.n_prompt,
            "n_reused_tokens": self.n_reused,
            "n_pauses": self.n_pauses,
            "longest_pause_seconds": round(self.longest_pause_s, 3),
            "n_moves": self.n_moves,
            "seconds": round(now_s - self.began_s, 3),
        }


@dataclass(frozen=True, slots=True)
class Picture:
    """One refresh. ``trouble``: why the coordinator is not heard, for ``silent_s``; ``status`` is then the last one."""

    coordinator: str
    now_s: float
    status: ClusterStatus | None
    streams: tuple[Stream, ...]
    trouble: str = ""
    silent_s: float = 0.0

    def facts(self) -> dict[str, Any]:
        """For a program."""
        status = None if self.status is None else dataclasses.asdict(self.status)
        return {
            "coordinator": self.coordinator,
            "reachable": not self.trouble,
            "trouble": self.trouble,
            "silent_seconds": round(self.silent_s, 3),
            "status": status,
            "streams": [stream.facts(self.now_s) for stream in self.streams],
        }
