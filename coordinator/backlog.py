"""What a node still has to do before the turns given to it show their first token. Pure; time is an argument.

Three stations, each turn passes them in this order:

    reading      rows from the store, one turn after the other
    looking      the vision tower at pictures, one turn after the other, beside the engine
    prefilling   all prompts side by side, in equal shares of each step's rows (``engine/jobs.py: plan_rows``)

Beside turns that decode, a step takes only as many prompt rows as keep it short (``engine/pacing.py``): however many
decode, all prompts together get on ``drag`` times slower than alone. A prompt that is done decodes from then on. So a
newcomer waits for only as much of the others' prefills as its own is long, short ones are not stuck behind long ones;
but it is slowed by each that ends before it, and slows all that end after it.

Prefill is counted in seconds of an engine that has nothing else to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final


@dataclasses.dataclass(slots=True)
class Awaited:
    """A placement without a token so far, with what is left of it in seconds."""

    restore_s: float
    look_s: float
    prefill_s: float
    prefilled_alone: bool = True
    restored_alone: bool = True
    # Of the engine, since all of it should have been done.
    late_s: float = 0.0

    @property
    def expected_s(self) -> float:
        """What is left of the prefill: who is late may well be as late again."""
        return self.prefill_s if self.prefill_s > 0 else self.late_s


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """What is left of everybody's work at one moment, in seconds; of the prefills one by one."""

    reading_s: float = 0.0
    looking_s: float = 0.0
    prefilling_s: tuple[float, ...] = ()


NOTHING_AHEAD: Final = Ahead()


class Backlog:
    """One boot's placements. ``now_s`` never goes back."""

    def __init__(self) -> None:
        # By how much prompts get on slower beside decodes; whoever learns it sets it.
        self.drag = 1.0
        self._awaited: list[Awaited] = []
        self._decoding: list[Awaited] = []
        self._at_s = 0.0

    def __len__(self) -> int:
        """Those that wait for their first token."""
        return len(self._awaited)

    def add(self, restore_s: float, look_s: float, prefill_s: float, now_s: float) -> Awaited:
        """A turn was given to the node; keep the handle."""
        self._advance(now_s)
        new = Awaited(restore_s, look_s, prefill_s)
        for other in self._awaited:
            other.prefilled_alone = new.prefilled_alone = False
            if restore_s and other.restore_s:
                other.restored_alone = new.restored_alone = False
        self._awaited.append(new)
        return new

    def begins_to_decode(self, handle: Awaited, now_s: float) -> None:
        """It has its first token."""
        self.remove(handle, now_s)
        self._decoding.append(handle)

    def remove(self, handle: Awaited, now_s: float) -> None:
        """It is over. No effect the second time."""
        self._advance(now_s)
        self._awaited = [a for a in self._awaited if a is not handle]
        self._decoding = [a for a in self._decoding if a is not handle]

    def ahead(self, now_s: float) -> Ahead:
        """Of all that wait for their first token."""
        self._advance(now_s)
        return Ahead(
            sum(a.restore_s for a in self._awaited),
            sum(a.look_s for a in self._awaited),
            tuple(a.expected_s for a in self._awaited),
        )

    def seconds_left(self, handle: Awaited, now_s: float) -> float:
        """Until one of those that wait has its first token; 0 when it should have it by now."""
        ahead = self.ahead(now_s)
        if not any(a is handle for a in self._awaited):
            return 0.0
        number = next(n for n, a in enumerate(self._awaited) if a is handle)
        end_s = prefill_ends(ahead.prefilling_s, self.drag, beside_decodes=bool(self._decoding))[number]
        return handle.restore_s + handle.look_s + end_s

    def _advance(self, now_s: float) -> None:
        elapsed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        reading_s = looking_s = elapsed_s
        working: list[tuple[Awaited, float]] = []  # and for how long
        for a in self._awaited:
            free_s = elapsed_s
            if a.restore_s > 0:
                used_s = min(a.restore_s, reading_s)
                a.restore_s -= used_s
                reading_s -= used_s
                free_s = reading_s
            used_s = min(a.look_s, looking_s, free_s)
            a.look_s -= used_s
            looking_s -= used_s
            free_s -= used_s
            if a.restore_s <= 0 and a.look_s <= 0:
                working.append((a, free_s))
        self._prefill(working, elapsed_s)

    def _prefill(self, working: Sequence[tuple[Awaited, float]], elapsed_s: float) -> None:
        """Let these get on for as long as each could."""
        decodes = bool(self._decoding)
        left = prefills_after(elapsed_s, [a.expected_s for a, _ in working], self.drag, beside_decodes=decodes)
        for (a, free_s), left_s in zip(working, left, strict=True):
            share_s = free_s / len(working) / (self.drag if decodes else 1.0)
            if a.prefill_s <= 0:
                a.late_s += share_s
            elif free_s < elapsed_s:
                a.prefill_s = max(0.0, a.prefill_s - share_s)
            else:
                a.prefill_s = left_s


def prefill_ends(prefills_s: Sequence[float], drag: float, *, beside_decodes: bool) -> list[float]:
    """In how many seconds each of these prefills is done, if all go on side by side from now on."""
    ends = [0.0] * len(prefills_s)
    end_s = done_s = 0.0
    pace = drag if beside_decodes else 1.0
    n_left = len(prefills_s)
    for number in sorted(range(len(prefills_s)), key=prefills_s.__getitem__):
        end_s += (prefills_s[number] - done_s) * n_left * pace
        ends[number], done_s = end_s, prefills_s[number]
        n_left -= 1
        pace = drag  # it decodes now
    return ends


def prefills_after(
    seconds: float, prefills_s: Sequence[float], drag: float, *, beside_decodes: bool
) -> tuple[float, ...]:
    """What is left of each of these prefills after so many seconds side by side."""
    done_s = 0.0
    pace = drag if beside_decodes else 1.0
    n_left = len(prefills_s)
    for prefill_s in sorted(prefills_s):
        step_s = (prefill_s - done_s) * n_left * pace
        if step_s > seconds:
            done_s += seconds / n_left / pace
            break
        done_s = prefill_s  # exactly: what is done leaves nothing over
        seconds -= step_s
        n_left -= 1
        pace = drag
    return tuple(max(0.0, prefill_s - done_s) for prefill_s in prefills_s)
