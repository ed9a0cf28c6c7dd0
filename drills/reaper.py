"""Undoes what a drill did when the drill is gone, by whatever signal: `python -m kvferry.drills.reaper RUN`.

Its standard input is a pipe whose other end only the drill holds; the kernel closes it when the drill ends.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from kvferry.drills.journal import clean_up_after


def main(folder: Path) -> None:
    """Waits for the drill's end, then for its lock, then undoes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    clean_up_after(folder, lambda _line: None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
