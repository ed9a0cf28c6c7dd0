"""Boards on one machine: each process gets a share of a core of its own, by the kernel's control groups.

Without it nodes of one machine are one pool of cores: whoever is busy is fast while the others idle, which no fleet of
boards is. Needs a writable ``cpu`` controller (root, usually), of version 1 or 2.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

PERIOD_US: Final = 10_000
"""A hundred times a second each process gets its share anew: short beside a step of the engine."""

V1: Final = Path("/sys/fs/cgroup/cpu")
V2: Final = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def cpu_shares(cores_of: Mapping[int, float]) -> Iterator[bool]:
    """pid → cores it may use, from now on and until the block ends; yields whether that could be done."""
    root = V1 if (V1 / "cpu.cfs_quota_us").exists() else V2
    made: list[Path] = []
    try:
        try:
            for pid, cores in cores_of.items():
                made.append(limited(root / f"kvferry-bench-{pid}", cores))
                (made[-1] / "cgroup.procs").write_text(str(pid))
            done = True
        except OSError:
            done = False
        yield done
    finally:
        for pid in cores_of:
            with contextlib.suppress(OSError):  # gone already
                (root / "cgroup.procs").write_text(str(pid))
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def limited(folder: Path, cores: float) -> Path:
    """A new group with this limit. Raises OSError where there is no such thing."""
    folder.mkdir()
    quota_us = int(cores * PERIOD_US)
    if folder.parent == V1:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
    elif "cpu" in (folder / "cgroup.controllers").read_text().split():
        (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    else:
        folder.rmdir()
        raise OSError("the cpu controller is not delegated here")
    return folder


def n_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
