"""Disks that are slower than the one there is: the kernel limits what a process reads from a device.

By the blkio controller of cgroup version 1, or io.max of version 2; both need root. Only what really comes from the
device is slowed down, so the files have to be dropped from the page cache before.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FREE_SECONDS: Final = 0.2
_V1: Final = Path("/sys/fs/cgroup/blkio")
_V2: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Throttle:
    """A cgroup that limits reads of one disk."""

    group: Path
    rate_file: str
    rate_format: str

    def put(self, pid: int, bytes_per_s: int, unread: Path) -> None:
        """From now on the process, with all its threads, reads no faster than this.

        The kernel gives a group that was idle about a tenth of a second for nothing: somebody else takes that, from a
        file ``unread``, past the page cache.
        """
        procs = self.group / "cgroup.procs"
        (self.group / self.rate_file).write_text(self.rate_format.format(bytes_per_s))
        n_mib = int(_FREE_SECONDS * bytes_per_s) >> 20
        read = f"echo $$ > {procs} && exec dd if={unread} of=/dev/null bs=1M count={n_mib} iflag=direct status=none"
        subprocess.run(["sh", "-c", read], check=True)
        procs.write_text(str(pid))


@contextlib.contextmanager
def throttle_of(folder: Path) -> Iterator[Throttle | None]:
    """For the disk that a folder lies on; None where this process may not, or there is no such controller."""
    try:
        device = _disk_of(folder)
        if (_V1 / "blkio.throttle.read_bps_device").exists():
            made = Throttle(_V1 / f"kvferry-{os.getpid()}", "blkio.throttle.read_bps_device", f"{device} {{}}")
        else:
            (_V2 / "cgroup.subtree_control").write_text("+io")
            made = Throttle(_V2 / f"kvferry-{os.getpid()}", "io.max", f"{device} rbps={{}}")
        made.group.mkdir()
        (made.group / made.rate_file).write_text(made.rate_format.format(1 << 30))
    except OSError:
        yield None
        return
    try:
        yield made
    finally:
        made.group.rmdir()  # empty: its processes have ended


def _disk_of(folder: Path) -> str:
    """MAJOR:MINOR of the whole disk; the controllers take no partitions."""
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    disk = device.parent if (device / "partition").exists() else device
    return (disk / "dev").read_text().strip()


def forget(folder: Path) -> None:
    """Drops the folder's snapshots from the page cache."""
    for path in folder.rglob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
