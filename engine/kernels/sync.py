"""How threads meet at a step's beginning and wait for each other, if they must, without holding a core for long.

A step is announced by one word: its number and the slot that describes it. Workers enter it, and may still be in it
when the next ones are announced: a slot is used anew only when nobody is in it any more, and there are more slots than
threads, so that whoever announces never waits (``free_slot``).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from kvferry.engine.kernels.intrinsics import atomic_exchange, atomic_load, load_int, spin_hint
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import CACHE_LINE

# A step's word is its number, counted from 1, times this, plus its slot.
SLOT_SPAN: Final = 2048

# The control area: the announced step's word, then two cache lines for each thread: the word of the step that it is in
# (0: none); whether it sleeps (1), a C semaphore to wake it by, and room for the system's clock.
_THREAD_BYTES: Final = 2 * CACHE_LINE
_ASLEEP: Final = CACHE_LINE
_SEMAPHORE: Final = CACHE_LINE + 8
_TIME: Final = CACHE_LINE + 48

# How long to spin before sleeping: for a portion that another thread is about to finish, and for the next step, which
# in a decode comes as soon as a token is drawn; waking a thread takes some tenths of that.
_SPIN_NANOSECONDS: Final = 20_000
_STEP_SPIN_NANOSECONDS: Final = 250_000
_SLEEP_MICROSECONDS: Final = 50

_usleep: Final[Any] = types.ExternalFunction("usleep", types.int32(types.uint32))
_clock_gettime: Final[Any] = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_sem_init: Final[Any] = types.ExternalFunction("sem_init", types.int32(types.int64, types.int32, types.uint32))
_sem_wait: Final[Any] = types.ExternalFunction("sem_wait", types.int32(types.int64))
_sem_post: Final[Any] = types.ExternalFunction("sem_post", types.int32(types.int64))
_MONOTONIC: Final = np.int32(1)


def control_bytes(n_threads: int) -> int:
    """Size of the control area."""
    return CACHE_LINE + n_threads * _THREAD_BYTES


@kernel
def pause(waited: int) -> None:
    """Wait a little more, after so many nanoseconds, for a thread whose core may have been taken: spin, later sleep.

    Nobody yields: the scheduler takes that for the end of a time slice, which a busy neighbour then has.
    """
    if waited < _SPIN_NANOSECONDS:
        spin_hint()
    else:
        _usleep(np.uint32(_SLEEP_MICROSECONDS))


@kernel
def nanoseconds(scratch: int) -> int:
    """Of a clock that only goes forward. ``scratch``: room for two integers."""
    _clock_gettime(_MONOTONIC, scratch)
    return load_int(scratch) * 1_000_000_000 + load_int(scratch + 8)


@kernel
def _of_thread(control: int, thread: int) -> int:
    return control + CACHE_LINE + thread * _THREAD_BYTES


@kernel
def prepare_control(control: int, n_threads: int) -> None:
    """Make a zeroed control area ready."""
    for thread in range(n_threads):
        _sem_init(_of_thread(control, thread) + _SEMAPHORE, np.int32(0), np.uint32(0))


@kernel
def free_slot(control: int, n_threads: int) -> int:
    """A slot that no thread reads: neither the announced one nor one that a worker is in. There are n_threads + 1."""
    announced = atomic_load(control)
    for slot in range(n_threads + 1):
        is_free = announced == 0 or announced % SLOT_SPAN != slot
        for thread in range(1, n_threads):
            step = atomic_load(_of_thread(control, thread))
            if step != 0 and step % SLOT_SPAN == slot:
                is_free = False
        if is_free:
            return slot
    return -1  # never: each worker is in one slot at most


@kernel
def announce_step(control: int, n_threads: int, step: int) -> None:
    """Let the workers start, waking those that sleep: everything written before is visible to them."""
    atomic_exchange(control, step)
    for thread in range(1, n_threads):
        at = _of_thread(control, thread)
        if atomic_load(at + _ASLEEP) == 1 and atomic_exchange(at + _ASLEEP, 0) == 1:
            _sem_post(at + _SEMAPHORE)


@kernel
def await_step(control: int, thread: int, seen: int) -> int:
    """Wait until another step than ``seen`` is announced; returns its word. Spins for a while, then sleeps."""
    at = _of_thread(control, thread)
    started_at = nanoseconds(at + _TIME)
    while atomic_load(control) == seen:
        if nanoseconds(at + _TIME) - started_at < _STEP_SPIN_NANOSECONDS:
            spin_hint()
            continue
        atomic_exchange(at + _ASLEEP, 1)
        if atomic_load(control) == seen:  # announced in between, and there may be nobody to wake us
            _sem_wait(at + _SEMAPHORE)
        atomic_exchange(at + _ASLEEP, 0)
        started_at = nanoseconds(at + _TIME)
    return atomic_load(control)


@kernel
def enter_step(control: int, thread: int, step: int) -> bool:
    """Hold the step's slot; False when the step is not the announced one any more, so that its slot may be in use."""
    atomic_exchange(_of_thread(control, thread), step)
    return is_announced(control, step)


@kernel
def is_announced(control: int, step: int) -> bool:
    """Whether the step is the latest: not yet done, that is, or done just now."""
    return atomic_load(control) == step


@kernel
def leave_step(control: int, thread: int) -> None:
    atomic_exchange(_of_thread(control, thread), 0)
