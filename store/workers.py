"""A list of units that two threads work off: one copies and verifies while the other waits for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Unit = TypeVar("Unit")

# What the workers do with a unit. Each thread has one of its own, with buffers of its own.
Worker = Callable[[Unit], None]


class _Queue(Generic[Unit]):
    """Units for whoever asks next, in order, until somebody fails."""

    def __init__(self, units: Iterator[Unit]) -> None:
        self.failure: BaseException | None = None
        self._units = units
        self._lock = threading.Lock()
        self._closed = False

    def __iter__(self) -> Iterator[Unit]:
        return self

    def __next__(self) -> Unit:
        with self._lock:
            if self._closed:
                raise StopIteration
            return next(self._units)

    def close(self) -> None:
        """Nothing is given out any more."""
        self._closed = True

    def help(self, new_worker: Callable[[], Worker[Unit]]) -> None:
        """The helper's whole life. What goes wrong is raised by the thread that asked for it."""
        try:
            worker = new_worker()
            for unit in self:
                worker(unit)
        except BaseException as error:  # noqa: BLE001 -- as above
            self.failure = error
            self.close()


def work_off(units: Iterator[Unit], new_worker: Callable[[], Worker[Unit]], *, parallel: bool) -> None:
    """Gives every unit to a worker, in order; with ``parallel``, to one of two threads once the first unit is done.

    The first is done alone so that whoever takes the rows has its memory when two come. Raises what a worker raises;
    units that have not begun by then are left.
    """
    worker = new_worker()
    for unit in units:
        worker(unit)
        break
    queue = _Queue(units)
    helper = threading.Thread(target=queue.help, args=(new_worker,), name="kvferry-restore", daemon=True)
    if parallel:
        helper.start()  # a daemon, for the disk may hang
    try:
        for unit in queue:
            worker(unit)
    except BaseException:
        queue.close()
        raise
    finally:
        if parallel:
            helper.join()
    if queue.failure is not None:
        raise queue.failure
