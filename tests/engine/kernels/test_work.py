"""Work shared among threads of which some are late: each portion is put in place once, and nobody waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.kernels.sync import (
    SLOT_SPAN,
    announce_step,
    await_step,
    control_bytes,
    enter_step,
    free_slot,
    leave_step,
    prepare_control,
)
from kvferry.engine.kernels.work import (
    CLOCK_BYTES,
    LONGEST_RUN,
    MOST_PORTIONS,
    PHASE_BYTES,
    RETRIED_ROWS,
    Phase,
    claim,
    finish,
    next_portion,
    portion_size,
    run_size,
)
from kvferry.engine.memory import aligned_empty


def zeroed(n_bytes: int) -> NDArray[np.uint8]:
    memory = aligned_empty(n_bytes)
    memory[:] = 0
    return memory


class Work:
    """Phases of ``n_portions`` portions each, and a clock for each thread."""

    def __init__(self, n_portions: int, n_threads: int = 2, n_phases: int = 1, *, retried: bool = True) -> None:
        self.lines, self.clocks = zeroed(n_phases * PHASE_BYTES), zeroed(n_threads * CLOCK_BYTES)
        self.n_portions, self.retried = n_portions, retried

    def phase(self, thread: int, number: int = 0) -> Phase:
        line = self.lines.ctypes.data + number * PHASE_BYTES
        return Phase(line, self.n_portions, self.retried, self.clocks.ctypes.data + thread * CLOCK_BYTES, 0)


def test_each_portion_goes_to_one_thread():
    work = Work(4)
    assert [next_portion(work.phase(thread)) for thread in (0, 1, 1, 0)] == [0, 1, 2, 3]


def test_a_portion_that_does_not_come_back_is_computed_again_and_put_in_place_once():
    work = Work(2)
    late, quick = work.phase(0), work.phase(1)
    assert next_portion(late) == 0
    assert next_portion(quick) == 1
    assert claim(quick, 1)
    finish(quick)
    assert next_portion(quick) == 0
    assert claim(quick, 0)
    finish(quick)
    assert next_portion(quick) == -1
    assert not claim(late, 0)
    assert next_portion(late) == -1


def test_a_portion_of_a_phase_that_is_not_retried_is_waited_for():
    work = Work(2, retried=False)
    late, quick = work.phase(0), work.phase(1)
    assert next_portion(late) == 0
    assert next_portion(quick) == 1
    finish(quick)
    waiting = threading.Thread(target=lambda: ended.append(next_portion(quick)))
    ended: list[int] = []
    waiting.start()
    time.sleep(0.05)
    assert not ended
    finish(late)
    waiting.join()
    assert ended == [-1]


@pytest.mark.parametrize("seed", range(5))
def test_threads_that_fall_asleep_at_any_point_neither_lose_nor_repeat_a_portion(seed: int):
    n_threads, n_phases, n_portions = 4, 30, 70  # more portions than a word has bits
    work = Work(n_portions, n_threads, n_phases)
    put = np.zeros((n_phases, n_portions), np.int64)
    early: list[str] = []

    def run(thread: int) -> None:
        random = Random(seed * 100 + thread)
        for number in range(n_phases):
            phase = work.phase(thread, number)
            portion = next_portion(phase)
            while portion >= 0:
                if number and not put[number - 1].all():
                    early.append(f"phase {number} began before the one before it was done")
                if random.random() < 0.01:
                    time.sleep(random.random() * 0.02)
                if claim(phase, portion):
                    put[number, portion] += 1
                    finish(phase)
                portion = next_portion(phase)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not early
    assert (put == 1).all()


def test_a_portion_is_not_computed_again_while_it_takes_no_longer_than_the_longest_one_of_its_kind():
    seconds, n_phases = 0.005, 15
    work = Work(2, n_phases=n_phases + 1)
    for number in range(n_phases):
        alone = work.phase(0, number)
        for portion in range(2):
            assert next_portion(alone) == portion
            time.sleep(seconds * (1 - portion))  # the last one is a short one
            assert claim(alone, portion)
            finish(alone)
        assert next_portion(alone) == -1
    quick, slow = work.phase(0, n_phases), work.phase(1, n_phases)
    assert next_portion(slow) == 0
    assert next_portion(quick) == 1
    assert claim(quick, 1)
    finish(quick)
    began_at = time.perf_counter()
    assert next_portion(quick) == 0
    assert time.perf_counter() - began_at >= seconds


@pytest.mark.parametrize("size_of", [portion_size, run_size])
@pytest.mark.parametrize("n_rows", [1, 2, 16, 600])
@pytest.mark.parametrize("n_units", [1, 3, 18, 320, 321, 5000])
def test_portions_cover_all_units_and_can_be_claimed(n_units: int, n_rows: int, size_of: Callable[..., int]):
    size = size_of(n_units, n_rows, 2)
    n_portions = -(-n_units // size)
    assert (n_portions - 1) * size < n_units <= n_portions * size
    assert n_portions <= MOST_PORTIONS


@pytest.mark.parametrize("n_rows", [2, RETRIED_ROWS])
def test_threads_read_the_weights_of_a_few_rows_in_runs(n_rows: int):
    assert run_size(192, n_rows, 2) == LONGEST_RUN
    assert run_size(48, n_rows, 2) == 6  # four runs for each thread
    assert run_size(48, n_rows, 1) == run_size(48, RETRIED_ROWS + 1, 2) == 1


def test_a_slot_is_not_used_anew_while_a_thread_is_in_it():
    n_threads = 3
    control = zeroed(control_bytes(n_threads))
    at = control.ctypes.data
    prepare_control(at, n_threads)
    words = []
    for step in range(1, 3):
        slot = free_slot(at, n_threads)
        words.append(step * SLOT_SPAN + slot)
        announce_step(at, n_threads, words[-1])
        assert enter_step(at, step, words[-1])  # thread 1 stays in the first step, thread 2 in the second
    held = {word % SLOT_SPAN for word in words}
    announced = 3 * SLOT_SPAN + free_slot(at, n_threads)
    assert announced % SLOT_SPAN not in held
    announce_step(at, n_threads, announced)
    assert free_slot(at, n_threads) not in {*held, announced % SLOT_SPAN}
    leave_step(at, 1)
    assert free_slot(at, n_threads) not in {words[1] % SLOT_SPAN, announced % SLOT_SPAN}
    assert not enter_step(at, 1, words[0])


def test_a_thread_that_sleeps_is_woken_by_the_next_step():
    control = zeroed(control_bytes(2))
    at = control.ctypes.data
    prepare_control(at, 2)
    seen: list[int] = []

    def work() -> None:
        step = 0
        while len(seen) < 20:
            step = int(await_step(at, 1, step))
            seen.append(step)

    worker = threading.Thread(target=work)
    worker.start()
    for step in range(1, 21):
        time.sleep(0.002)  # long enough to fall asleep, or to be about to
        announce_step(at, 2, step * SLOT_SPAN)
        while len(seen) < step:
            time.sleep(0.0001)
    worker.join()
    assert seen == [step * SLOT_SPAN for step in range(1, 21)]
