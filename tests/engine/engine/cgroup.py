"""A control group with a memory limit, for tests of what happens under one."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    folder: Path
    peak_file: str

    def enter_command(self) -> list[str]:
        """A command that runs another one, given behind it, inside the group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def peak_bytes(self) -> int:
        return int((self.folder / self.peak_file).read_text())


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Skips the test where no group can be made: it takes root, and a memory controller."""
    name = f"kvferry-test-{uuid.uuid4().hex[:8]}"
    is_v1 = (_V1 / "memory.limit_in_bytes").exists()
    folder = (_V1 if is_v1 else _V2) / name
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_bytes))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    try:
        yield MemoryGroup(folder, "memory.max_usage_in_bytes" if is_v1 else "memory.peak")
    finally:
        for _ in range(50):
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def may_make_groups() -> bool:
    return os.geteuid() == 0
