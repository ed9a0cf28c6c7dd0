"""The engine's worker threads: started once, woken for each step, asleep when there is nothing to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import OutOfResources
from kvferry.engine.kernels.layout import CACHE_LINE
from kvferry.engine.kernels.sync import CONTROL_BYTES, STEP_GENERATION, announce_step

# More than any machine has processors; what is beyond is a slip of the finger.
MAX_THREADS: Final = 1024

# Runs thread ``thread`` of every step after step ``seen`` until none comes for a while; returns the last one's number.
ServeSteps = Callable[[int, int], int]


class WorkerThreads:
    """Threads 1 .. n_threads - 1 of every step; the caller itself is thread 0.

    A step is: the caller writes its description, calls ``announce``, and runs its own part, which ends when all threads
    have done theirs. ``control`` is the memory that the jitted code synchronises on.
    """

    def __init__(self, n_threads: int, serve_steps: ServeSteps, control: NDArray[np.uint8]) -> None:
        self._serve_steps = serve_steps
        self._control_at: Final = control.ctypes.data
        self._generation = control[STEP_GENERATION : STEP_GENERATION + 8].view(np.int64)
        self._lock = threading.Lock()
        self._asleep: set[int] = set()
        self._stopping = False
        self._wake = [threading.Semaphore(0) for _ in range(n_threads)]
        self._threads = [
            threading.Thread(target=self._work, args=(thread,), name=f"kvferry-engine-{thread}", daemon=True)
            for thread in range(1, n_threads)
        ]
        self._start()

    def _start(self) -> None:
        for i, worker in enumerate(self._threads):
            try:
                worker.start()
            except RuntimeError as error:
                n_asked = len(self._threads) + 1
                self._threads = self._threads[:i]
                self.stop()
                raise OutOfResources(
                    f"the system gave {i + 1} of the engine's {n_asked} threads and refused the next; ask for fewer"
                ) from error

    def announce(self) -> None:
        """Start a step on all workers."""
        if not self._threads:
            return
        announce_step(self._control_at)
        with self._lock:
            sleepers, self._asleep = self._asleep, set()
        for thread in sleepers:
            self._wake[thread].release()

    def stop(self) -> None:
        """End the workers. The step's record must say "no rows", so that none of them computes anything."""
        self._stopping = True
        self.announce()
        for worker in self._threads:
            worker.join()
        self._threads = []

    def _work(self, thread: int) -> None:
        seen = 0
        while not self._stopping:
            seen = self._serve_steps(thread, seen)
            with self._lock:
                nothing_new = int(self._generation[0]) == seen
                if nothing_new:
                    self._asleep.add(thread)
            if nothing_new and not self._stopping:
                self._wake[thread].acquire()


def new_control() -> NDArray[np.uint8]:
    """Zeroed memory for the jitted code to synchronise on, on cache lines of its own."""
    raw = np.zeros(CONTROL_BYTES + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + CONTROL_BYTES]
