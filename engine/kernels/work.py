"""How the threads of a step share the work of its phases, so that none waits for one that is not running.

A phase is a number of portions, which threads take from a counter. It is over when all portions are *done*, not when
all threads have come by: one whose core was taken away finds nothing left to take when it is back, and catches up.

A portion that such a thread holds is computed once more by whoever has waited long enough for it. So portions are
computed aside, in the thread's own memory, and put in their place by the thread that claims them first; the other one's
result is dropped. A thread that comes back late may have computed from memory that holds something else by then: it has
no claim any more, so nobody sees what it made of it. It must only not stumble. Addresses and counts that it reads are
those of its step's slot, which is not used anew while the thread is in it (sync.py).

Where many rows make the copy expensive, the phase is not ``retried``: a portion belongs to the thread that took it,
which writes to its place at once, and the others wait.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from kvferry.engine.kernels.intrinsics import atomic_add, atomic_load, atomic_or, load_int, store_int
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import CACHE_LINE
from kvferry.engine.kernels.sync import nanoseconds, pause

# Steps of up to this many rows are computed aside; at more the next phase would read the results from further away.
RETRIED_ROWS: Final = 16
# Of such steps, if they have several rows, a thread's share of a layer's weights is cut into so many portions, each of
# at most so many units.
_RUNS: Final = 4
LONGEST_RUN: Final = 8
# A phase's cache line: portions taken, portions done, a number that the phase before left, and a bit for each claim.
PHASE_BYTES: Final = CACHE_LINE
_DONE: Final = 8
_NOTE: Final = 16
_CLAIMS: Final = 24
MOST_PORTIONS: Final = 64 * (PHASE_BYTES - _CLAIMS) // 8

# A thread's clock: room for the system's answer, when the latest portion was taken, and what a portion of each kind of
# phase takes this thread.
_TAKEN_AT: Final = 16
_PACES: Final = 24
CLOCK_BYTES: Final = 4 * CACHE_LINE
N_KINDS: Final = 12  # phases of a layer, each of which takes as long in the next one
_LEAST_PATIENCE: Final = 20_000  # nanoseconds
_FORGETTING: Final = 5  # each portion takes a 2**5-th off what is remembered of a longer one


class Phase(NamedTuple):
    """A phase as one thread sees it. ``kind``: phases with equal work have the same."""

    line: int
    n_portions: int
    retried: bool
    clock: int
    kind: int


class Run(NamedTuple):
    """What one thread knows of a step: the records (records.py), where its slot's lines and its own memory are."""

    model: Any
    workspace: Any
    step: Any
    phases: int
    scratch: int
    n_threads: int


@kernel
def line_of(run: Run, number: int) -> int:
    """Address of a phase's line."""
    return run.phases + number * PHASE_BYTES


@kernel
def open_phase(run: Run, number: int, n_portions: int, n_rows: int) -> Phase:
    """All threads must call it with the same numbers, late ones as well: with what the step's slot says.

    ``n_rows``: that a portion reads and writes; 0 for work too small to be worth computing aside.
    """
    retried = run.n_threads > 1 and 0 < n_rows <= RETRIED_ROWS and n_portions <= MOST_PORTIONS
    clock = run.scratch + run.workspace.scratch_clock
    return Phase(line_of(run, number), n_portions, retried, clock, number % N_KINDS)


@kernel
def portion_size(n_units: int, n_rows: int, n_threads: int) -> int:
    """How many units a portion has: a long run when there is one row, so that weights are read in long streams; as few
    as possible when there are many, so that no thread waits long for another at the end."""
    n_portions = n_threads if n_rows == 1 else MOST_PORTIONS
    return (n_units + n_portions - 1) // n_portions


@kernel
def run_size(n_units: int, n_rows: int, n_threads: int) -> int:
    """How many units of weights a portion has. Of a few rows it is a run, of a length that leaves each thread several:
    a unit asks memory for the one behind it, which must not be what another thread has just begun."""
    least = portion_size(n_units, n_rows, n_threads)
    if n_threads == 1 or n_rows == 1 or n_rows > RETRIED_ROWS:
        return least
    n_portions = _RUNS * n_threads
    return max(least, min((n_units + n_portions - 1) // n_portions, LONGEST_RUN))


@kernel
def note(line: int, value: int) -> None:
    """Leave a number for a phase, from the phase before it. It stays as long as the step's slot."""
    store_int(line + _NOTE, value)


@kernel
def noted(line: int) -> int:
    return load_int(line + _NOTE)


@kernel
def next_portion(phase: Phase) -> int:
    """The next portion to compute; -1 when the phase is over, and everything written in it is visible.

    What it returned before has been computed by now, and claimed and finished if it was for this thread to do so.
    """
    line, n = phase.line, phase.n_portions
    if phase.retried:
        _learn_pace(phase)
    if atomic_load(line) < n:
        taken = atomic_add(line, 1)
        if taken < n:
            return taken
    if atomic_load(line + _DONE) >= n:
        if phase.retried:
            store_int(phase.clock + _TAKEN_AT, np.int64(0))
        return -1
    return _await_or_retry(phase)


@kernel
def claim(phase: Phase, portion: int) -> bool:
    """Whether this thread is to put the portion in its place; it must be quick about it, and then ``finish``."""
    if not phase.retried:
        return True
    bit = np.int64(1) << (portion % 64)
    return atomic_or(phase.line + _CLAIMS + portion // 64 * 8, bit) & bit == 0


@kernel
def finish(phase: Phase) -> None:
    """Say that a portion is in its place."""
    atomic_add(phase.line + _DONE, 1)


@kernel
def _await_or_retry(phase: Phase) -> int:
    """Nothing is left to take, but something is not done yet."""
    store_int(phase.clock + _TAKEN_AT, np.int64(0))
    pace = load_int(phase.clock + _PACES + 8 * phase.kind)
    patience = max(_LEAST_PATIENCE, pace + pace // 2)
    started_at = nanoseconds(phase.clock)
    while atomic_load(phase.line + _DONE) < phase.n_portions:
        waited = nanoseconds(phase.clock) - started_at
        if phase.retried and waited > patience:
            portion = _unclaimed(phase)
            if portion >= 0:
                return portion
        pause(waited)
    return -1


@kernel
def _unclaimed(phase: Phase) -> int:
    for portion in range(phase.n_portions):
        claims = atomic_load(phase.line + _CLAIMS + portion // 64 * 8)
        if (claims >> (portion % 64)) & 1 == 0:
            return portion
    return -1


@kernel
def _learn_pace(phase: Phase) -> None:
    """Remember how long a portion takes: the longest one of late, since a phase's portions may be of unequal length and
    another's is no late one for being longer than our last. One during which the core was taken away must not make us
    wait as long for others: it no more than doubles what is remembered, and a phase of average ones forgets it."""
    now = nanoseconds(phase.clock)
    taken_at = load_int(phase.clock + _TAKEN_AT)
    if taken_at != 0:
        at = phase.clock + _PACES + 8 * phase.kind
        pace = load_int(at)
        store_int(at, max(min(now - taken_at, max(2 * pace, _LEAST_PATIENCE)), pace - (pace >> _FORGETTING)))
    store_int(phase.clock + _TAKEN_AT, now)
