#!/usr/bin/python3
"""Runs a program on the board's big cores: on_big_cores.py PROGRAM [ARGUMENT...].

Which those are is read from cpu_capacity (0 to 1024, filled in by the kernel from the device tree), never known by
number: boards number them differently. Where all cores are alike, or the kernel says nothing, all are used.
ON_BIG_CORES_SYSFS names another folder instead of /sys/devices/system/cpu, for tests.
"""

import os
import re
import sys
from pathlib import Path

# An RK3588's small cores have 530 of 1024, its big ones all have 1024; some chips' big clusters differ among themselves
# by a few percent. Three quarters tells the first case from the second.
BIG = 0.75


def big_cores(sysfs: Path, allowed: set[int]) -> set[int]:
    """The allowed cores that are big; all allowed ones when there is no difference to be seen."""
    capacities = {}
    for path in sysfs.glob("cpu[0-9]*/cpu_capacity"):
        found = re.fullmatch(r"cpu(\d+)", path.parent.name)
        if found and int(found[1]) in allowed:
            try:
                capacities[int(found[1])] = int(path.read_text())
            except (OSError, ValueError):  # offline, or a kernel that has no number for it
                continue
    if set(capacities) != allowed:
        return allowed
    largest = max(capacities.values())
    return {core for core, capacity in capacities.items() if capacity >= BIG * largest}


def main(program: list[str]) -> None:
    if not program:
        sys.exit("usage: on_big_cores.py PROGRAM [ARGUMENT...]")
    allowed = os.sched_getaffinity(0)
    chosen = big_cores(Path(os.environ.get("ON_BIG_CORES_SYSFS", "/sys/devices/system/cpu")), allowed)
    if chosen != allowed:
        os.sched_setaffinity(0, chosen)
        print(f"on the big cores {sorted(chosen)} of {sorted(allowed)}", file=sys.stderr, flush=True)
    os.execvp(program[0], program)  # noqa: S606 - becoming the program is the point


if __name__ == "__main__":
    main(sys.argv[1:])
