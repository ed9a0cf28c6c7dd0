"""The engine's worker threads: started once, asleep when there is nothing to do, never waited for by the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from kvferry.engine.cores import pin_this_thread
from kvferry.engine.errors import OutOfResources
from kvferry.engine.kernels.sync import SLOT_SPAN, announce_step, control_bytes, free_slot, prepare_control
from kvferry.engine.memory import aligned_empty

# More than any machine has processors; what is beyond is a slip of the finger.
MAX_THREADS: Final = 1024

# Runs thread ``thread`` of every step that is announced, until one has no rows.
ServeSteps = Callable[[int], None]


class WorkerThreads:
    """Threads 1 .. n_threads - 1 of every step; the caller itself is thread 0.

    A step is: the caller describes it in a ``free_slot``, calls ``announce``, and runs its own part, which ends when
    the step is done, with the workers' help or without. ``control_at``: the memory that all synchronise on.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads: Final = n_threads
        self._control = aligned_empty(control_bytes(n_threads))
        self._control[:] = 0
        self.control_at: Final = int(self._control.ctypes.data)
        prepare_control(self.control_at, n_threads)
        self._n_steps = 0
        self._threads: list[threading.Thread] = []

    @property
    def n_slots(self) -> int:
        return self._n_threads + 1

    def start(self, serve_steps: ServeSteps, cores: frozenset[int] | None) -> None:
        """Start the threads, pinned to ``cores`` if there are any to be pinned to.

        Raises OutOfResources when the system gives fewer; those that there are wait for steps.
        """

        def work(thread: int) -> None:
            pin_this_thread(cores)
            serve_steps(thread)

        for thread in range(1, self._n_threads):
            worker = threading.Thread(target=work, args=(thread,), name=f"kvferry-engine-{thread}", daemon=True)
            try:
                worker.start()
            except RuntimeError as error:
                raise OutOfResources(
                    f"the system gave {thread} of the engine's {self._n_threads} threads and refused the next; ask for "
                    "fewer"
                ) from error
            self._threads.append(worker)

    def free_slot(self) -> int:
        """A slot that no thread reads."""
        return int(free_slot(self.control_at, self._n_threads))

    def announce(self, slot: int) -> int:
        """Start the step that is described in a slot on all workers; returns its word for thread 0."""
        self._n_steps += 1
        word = self._n_steps * SLOT_SPAN + slot
        announce_step(self.control_at, self._n_threads, word)
        return word

    def join(self) -> None:
        """Wait for the workers to end. The step announced last must be the one without rows."""
        for worker in self._threads:
            worker.join()
        self._threads = []
