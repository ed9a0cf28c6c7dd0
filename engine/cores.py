"""Which processors are the big ones of a big.LITTLE board."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

CPU_FOLDER: Final = Path("/sys/devices/system/cpu")
# Small cores have about half of the largest capacity; big clusters differ among themselves by a few percent.
_BIG: Final = 0.75


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
