"""Which processors the engine's threads run on, and how many threads there are: the big ones of a big.LITTLE board.
The rest of a process (calls, files) has the little ones, so that no step waits for a thread that was put aside.

Big cores are told by the capacity that the kernel states for each, never by their numbers, which boards give out
differently. Where all are alike, or the kernel states nothing, nothing is pinned.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CPU_FOLDER: Final = Path("/sys/devices/system/cpu")
# Small cores have about half of the largest capacity; big clusters differ among themselves by a few percent.
_BIG: Final = 0.75

# Where the kernel says which control group a process is in, and what groups are allowed.
GROUP_FILE: Final = Path("/proc/self/cgroup")
GROUP_FOLDER: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """``engine``: the processors for the engine's threads, of those ``allowed``. ``quota``: how many processors' time
    this process's control group may use, if that is limited."""

    engine: frozenset[int]
    allowed: frozenset[int]
    quota: float | None

    @property
    def pinned(self) -> frozenset[int] | None:
        """What threads are pinned to; None where there is nothing to choose."""
        return self.engine if self.engine != self.allowed else None

    @property
    def others(self) -> frozenset[int] | None:
        """For all threads but the engine's: the little ones; None where there is nothing to choose."""
        return self.allowed - self.engine or None

    @property
    def n_threads(self) -> int:
        """One for each of the processors, as long as the quota lasts: a thread too many has all of them stopped."""
        most = len(self.engine) if self.quota is None else min(len(self.engine), int(self.quota))
        return max(1, most)

    def __str__(self) -> str:
        if self.pinned is None:
            text = f"{_ranges(self.allowed)}, all alike"
        else:
            text = f"the big ones, {_ranges(self.engine)} of {_ranges(self.allowed)}"
        return text if self.quota is None else f"{text}, with the time of {self.quota:g}"


def choose_cores() -> CoreChoice:
    """Of the processors that this process may use."""
    allowed = os.sched_getaffinity(0)
    return CoreChoice(frozenset(big_cores(allowed)), frozenset(allowed), cpu_quota())


def pin_this_thread(cores: Iterable[int] | None) -> None:
    """Keep the calling thread to these processors. They may have been taken away meanwhile: then it runs anywhere."""
    if cores is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def pinned_to(cores: Iterable[int] | None) -> Iterator[None]:
    """Keep the calling thread, and the threads that it starts meanwhile, to these processors; None: as it is."""
    before = os.sched_getaffinity(0)
    pin_this_thread(cores)
    try:
        yield
    finally:
        pin_this_thread(before)


def capacities(folder: Path = CPU_FOLDER) -> dict[int, int]:
    """Capacity (at most 1024) by processor number, as the kernel states it; empty where it states none."""
    found = {}
    for path in folder.glob("cpu[0-9]*/cpu_capacity"):
        number = re.fullmatch(r"cpu(\d+)", path.parent.name)
        try:
            if number:
                found[int(number[1])] = int(path.read_text())
        except (OSError, ValueError):  # offline, or a kernel that has no number for it
            continue
    return found


def big_cores(allowed: set[int], folder: Path = CPU_FOLDER) -> set[int]:
    """The allowed processors that are big; all of them where there is no difference to be seen."""
    known = {core: capacity for core, capacity in capacities(folder).items() if core in allowed}
    if set(known) != allowed:
        return allowed
    largest = max(known.values(), default=0)
    return {core for core, capacity in known.items() if capacity >= _BIG * largest}


def cpu_quota(group_file: Path = GROUP_FILE, folder: Path = GROUP_FOLDER) -> float | None:
    """How many processors' time the control group of this process may use: the least that it or a group above allows.

    None where nothing is limited, or control groups cannot be read.
    """
    try:
        lines = group_file.read_text().splitlines()
    except OSError:
        return None
    return min((quota for line in lines for quota in _quotas(line, folder)), default=None)


def _quotas(line: str, folder: Path) -> Iterator[float]:
    """Of one line of the kernel's file, ID:CONTROLLERS:PATH. Version 2 names none, of version 1 cpu counts."""
    _, controllers, path = (*line.split(":", 2), "", "")[:3]
    if controllers and "cpu" not in controllers.split(","):
        return
    root = folder / controllers if controllers else folder
    group = root / path.lstrip("/")
    for place in (group, *group.parents):
        if not place.is_relative_to(root):
            return
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if controllers:
                limit = (place / "cpu.cfs_quota_us").read_text()
                period = (place / "cpu.cfs_period_us").read_text()
            else:
                limit, period = (place / "cpu.max").read_text().split()
            if int(limit) > 0:  # ValueError for "max"; version 1 says -1
                yield int(limit) / int(period)


def _ranges(cores: Iterable[int]) -> str:
    """Numbers such as 0-3,6."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
