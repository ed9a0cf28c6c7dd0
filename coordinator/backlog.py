"""What a node still has to do before the turns given to it show their first token. Pure; time is an argument.

A node reads rows from the store one turn after the other, and prefills all admitted turns side by side, each getting
an equal share until it is done (``engine/scheduler.py: plan_rows``). So a newcomer waits for all reads before its own,
but only for as much of the others' prefills as its own is long: short ones are not stuck behind long ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(slots=True)
class Awaited:
    """A placement without a token so far, with what is left of it in seconds."""

    restore_s: float
    prefill_s: float
    prefilled_alone: bool = True
    restored_alone: bool = True


class Backlog:
    """One boot's placements that wait for their first token. ``now_s`` never goes back."""

    def __init__(self) -> None:
        self._awaited: list[Awaited] = []
        self._at_s = 0.0

    def __len__(self) -> int:
        return len(self._awaited)

    def add(self, restore_s: float, prefill_s: float, now_s: float) -> Awaited:
        """A turn was given to the node; keep the handle for ``remove``."""
        self._advance(now_s)
        new = Awaited(restore_s, prefill_s)
        for other in self._awaited:
            other.prefilled_alone = new.prefilled_alone = False
            if restore_s and other.restore_s:
                other.restored_alone = new.restored_alone = False
        self._awaited.append(new)
        return new

    def remove(self, handle: Awaited, now_s: float) -> None:
        """It has its first token, or is over. No effect the second time."""
        self._advance(now_s)
        self._awaited = [a for a in self._awaited if a is not handle]

    def ahead(self, now_s: float) -> tuple[float, tuple[float, ...]]:
        """Seconds of reading, and each turn's seconds of prefill, that are left."""
        self._advance(now_s)
        return sum(a.restore_s for a in self._awaited), tuple(a.prefill_s for a in self._awaited)

    def _advance(self, now_s: float) -> None:
        elapsed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        reading_s = elapsed_s
        for a in self._awaited:  # one after the other
            used_s = min(a.restore_s, reading_s)
            a.restore_s -= used_s
            reading_s -= used_s
        working = sorted((a for a in self._awaited if a.prefill_s > 0 and a.restore_s <= 0), key=lambda a: a.prefill_s)
        for rank, a in enumerate(working):  # equal shares; what a short one leaves goes to the others
            share_s = min(a.prefill_s, elapsed_s / (len(working) - rank))
            a.prefill_s -= share_s
            elapsed_s -= share_s


def wait_behind(ahead: Sequence[float], own_s: float) -> float:
    """How long turns with these seconds of prefill left delay one of ``own_s`` seconds, in equal shares."""
    return sum(min(other_s, own_s) for other_s in ahead)
