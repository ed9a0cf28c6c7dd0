"""Runs a kvferry command and ends when its parent does, however that ends.

`python -m kvferry.drills.child FD node run ...`: FD is the read end of a pipe whose write end only the parent holds.
The kernel closes it when the parent is gone, even by SIGKILL; then this process asks itself to stop, and a moment later
stops for good. (prctl's parent-death signal follows the parent's *thread*, not its process.)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Final

from kvferry.client.cli import main

ORPHAN_GRACE_S: Final = 10.0
"""A node that is told to stop saves its sessions, within a second on a laptop; nobody waits for this one any more."""


def watch_parent(pipe_fd: int) -> None:
    """Blocks until the parent is gone, then ends this process."""
    while os.read(pipe_fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=watch_parent, args=(int(sys.argv[1]),), name="parent-watch", daemon=True).start()
    main(sys.argv[2:])
