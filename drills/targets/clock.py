"""A clock of its own for a process, which can be set while it runs: libfaketime, where the system has it.

Monotonic clocks stay as they are, as they do when somebody sets a real clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

HOUR_S: Final = 3600

_LIBRARIES: Final = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1")


def library() -> Path | None:
    """Of libfaketime, if it is installed."""
    return next((path for pattern in _LIBRARIES for path in Path("/").glob(pattern[1:])), None)


class ShiftedClock:
    """Made before the process starts, with `environment` for it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.shift(0)

    @property
    def environment(self) -> dict[str, str]:
        """What the process needs to look at this clock at every question for the time."""
        return {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def shift(self, seconds: int) -> None:
        """Off the right time by so much, at once."""
        temp = self._file.with_suffix(".new")
        temp.write_text(f"{seconds:+d}\n")
        temp.rename(self._file)
