"""The words in which a scenario is written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

COORDINATOR: Final = "coordinator"
STORE: Final = "store"
"""Parts of a cluster beside its nodes, which have their ids."""


class Disturbance(StrEnum):
    """What can be done to a part of a cluster. Each is undone by its target, however the drill ends."""

    KILL = "kill"  # SIGKILL; undone by starting it again
    FREEZE = "freeze"  # alive, connected and silent
    CUT = "cut"  # the cable is pulled: nothing arrives in either direction, and nobody is told
    CUT_OUTGOING = "cut-outgoing"  # it hears the others, they do not hear it
    SLOW_LINK = "slow-link"
    POWER_CUT = "power-cut"  # silent and gone at once: no connection is closed; undone by switching it on
    CLOCK_FORWARD = "clock-forward"  # an hour
    CLOCK_BACK = "clock-back"
    STORE_HUNG = "store-hung"  # calls do not return
    STORE_FULL = "store-full"
    STORE_ROTTEN = "store-rotten"  # a bit of every snapshot that is there is flipped


class Where(StrEnum):
    """Which part is struck, resolved when the moment has come."""

    SERVING = "the node that serves the first conversation"
    SERVING_AND_ANOTHER = "the node that serves the first conversation, and another one"
    COORDINATOR = "the coordinator"
    EVERYTHING = "every node and the coordinator"
    STORE = "the store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Strikes when the first conversation has `after_tokens` tokens of answer `turn` (the first is 1), wherever the
    others are by then; healed `hold_s` later, or when answer `until_turn` has its first token, if that is sooner."""

    what: Disturbance
    where: Where
    turn: int
    after_tokens: int
    hold_s: float
    until_turn: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What must hold for the hypothesis to hold, beside the tokens themselves. None: not looked at.

    `detection_s`: from the first injection until a client, or the coordinator's list of nodes, shows it.
    `longest_pause_s`: between two tokens of an answer, or from a question to its first token.
    `recovery_s`: from the last healing until the cluster is whole again.
    """

    longest_pause_s: float
    detection_s: float | None = None
    recovery_s: float = 60.0
    failovers_at_least: int = 0
    failovers_at_most: int | None = None
    refused_files_at_least: int = 0
    failed_saves_at_least: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One drill. `duration_s` bounds the disturbed conversations, `needs_nodes` is what it makes sense with."""

    name: str
    hypothesis: str
    proves: str
    injections: tuple[Injection, ...]
    limits: Limits
    n_conversations: int = 1
    n_turns: int = 3
    needs_nodes: int = 2
    duration_s: float = 120.0

    @property
    def disturbances(self) -> frozenset[Disturbance]:
        """Everything that its target must be able to do."""
        return frozenset(injection.what for injection in self.injections)
