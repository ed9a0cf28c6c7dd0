"""Who asks what and when: traces that are read from a file, and kinds of traffic that are drawn from a seed.

A trace is JSON, one session a line:

    {"start_s": 3.5, "system": 2, "system_tokens": 900, "turns": [[prompt_tokens, answer_tokens, think_s], ...]}

``system``: sessions with the same number begin with the same ``system_tokens`` tokens. ``think_s``: from the end of an
answer to the next question, so a slow fleet is asked later, as people do.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class TurnPlan:
    prompt_tokens: int
    answer_tokens: int
    think_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class SessionPlan:
    start_s: float
    system: int
    system_tokens: int
    turns: tuple[TurnPlan, ...]


MAX_TOKENS: Final = 10_000_000
"""Of a session; the simulator makes them all."""

MAX_SECONDS: Final = 1_000_000_000


class BadTrace(ValueError):
    """A file that is no trace; says which line is no session."""

    code = "bad_trace"
    exit_code = 2


def read_trace(path: Path) -> list[SessionPlan]:
    """Raises BadTrace."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise BadTrace(f"{path} cannot be read as a trace: {e}") from e
    plans = [session_of(line, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not plans:
        raise BadTrace(f"{path} has no session in it: a trace has one a line")
    return plans


def session_of(line: str, number: int) -> SessionPlan:
    try:
        fields = json.loads(line)
        turns = tuple(TurnPlan(int(p), int(a), float(t)) for p, a, t in fields["turns"])
        plan = SessionPlan(float(fields["start_s"]), int(fields["system"]), int(fields["system_tokens"]), turns)
    except (ValueError, KeyError, TypeError, OverflowError) as e:
        raise BadTrace(f"line {number} of the trace is no session ({e}): see kvferry simulate --help") from e
    if not turns or any(t.prompt_tokens < 1 or t.answer_tokens < 1 for t in turns):
        raise BadTrace(f"line {number} of the trace: every turn needs at least one token of prompt and of answer")
    if plan.system_tokens + sum(t.prompt_tokens + t.answer_tokens for t in turns) > MAX_TOKENS:
        raise BadTrace(f"line {number} of the trace: a session may have {MAX_TOKENS:,} tokens")
    if plan.system_tokens < 0 or not all(0 <= s <= MAX_SECONDS for s in (plan.start_s, *(t.think_s for t in turns))):
        raise BadTrace(
            f"line {number} of the trace: tokens and seconds are at least 0, seconds at most {MAX_SECONDS:,}"
        )
    return plan


def written(sessions: Iterable[SessionPlan]) -> Iterator[str]:
    """Lines that ``read_trace`` reads."""
    for s in sessions:
        turns = [[t.prompt_tokens, t.answer_tokens, t.think_s] for t in s.turns]
        yield json.dumps({"start_s": s.start_s, "system": s.system, "system_tokens": s.system_tokens, "turns": turns})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of traffic; numbers are medians of log-normal draws where a spread makes sense."""

    n_systems: int
    system_tokens: int
    n_turns: int
    prompt_tokens: int
    answer_tokens: int
    think_s: float
    # One system prompt gets this share of the sessions; the others the rest, evenly.
    hot_share: float = 0.0
    # Sessions come in groups of this size at the same time.
    burst: int = 1


KINDS: Final[dict[str, Kind]] = {
    "chat": Kind(n_systems=6, system_tokens=700, n_turns=7, prompt_tokens=60, answer_tokens=120, think_s=30.0),
    "documents": Kind(n_systems=3, system_tokens=200, n_turns=4, prompt_tokens=1_200, answer_tokens=150, think_s=60.0),
    "agents": Kind(n_systems=2, system_tokens=2_000, n_turns=12, prompt_tokens=250, answer_tokens=60, think_s=1.0),
    "hot": Kind(
        n_systems=8, system_tokens=1_200, n_turns=5, prompt_tokens=80, answer_tokens=100, think_s=20.0, hot_share=0.8
    ),
    "bursts": Kind(
        n_systems=4, system_tokens=500, n_turns=4, prompt_tokens=150, answer_tokens=100, think_s=15.0, burst=6
    ),
}


def drawn(kind: Kind, n_sessions: int, sessions_per_s: float, rng: random.Random) -> list[SessionPlan]:
    """Sessions that arrive at this rate on average."""

    def around(median: float, sigma: float = 0.6) -> int:
        return max(1, round(median * rng.lognormvariate(0.0, sigma)))

    def system() -> int:
        if kind.hot_share and rng.random() < kind.hot_share:
            return 0
        return rng.randrange(kind.n_systems)

    sessions: list[SessionPlan] = []
    start_s = 0.0
    while len(sessions) < n_sessions:
        start_s += rng.expovariate(sessions_per_s / kind.burst)
        for _ in range(min(kind.burst, n_sessions - len(sessions))):
            turns = tuple(
                TurnPlan(
                    around(kind.prompt_tokens), around(kind.answer_tokens), kind.think_s * rng.lognormvariate(0.0, 0.8)
                )
                for _ in range(around(kind.n_turns, 0.4))
            )
            sessions.append(SessionPlan(start_s + rng.uniform(0, 0.5), system(), kind.system_tokens, turns))
    return sessions
