"""The file that a person names for a result: whole or not there; devices, pipes and links stay what they are."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

PRIVATE_MODE: Final = 0o640
"""Of what holds conversations or rows of them: no access for the world."""

_TEMP_PREFIX: Final = ".tmp-"
_STDOUT: Final = 1
_STDERR: Final = 2


@contextmanager
def output_file(path: Path, mode: int) -> Iterator[BinaryIO]:
    """A file to write into, which gets its name, durably, when the block ends without an error.

    What is there and is no regular file (a device, a pipe) is written into as it is: replaced, it would be gone for all
    who use it. So is a file that is this process's own output, after what it holds. A symbolic link stays, and its
    target is written. ``mode``: of the regular file, whatever the umask is. Raises OSError.
    """
    descriptor = _open_stream(path)
    if descriptor is not None:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    descriptor, name = tempfile.mkstemp(prefix=_TEMP_PREFIX, dir=target.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.chmod(mode)
        _sync(temporary)  # by its name: a library may have put another file there
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # not every file system can
        _sync(target.parent)


def staged_path(file: BinaryIO) -> Path | None:
    """Of what ``output_file`` gave: the path at which a library may write the file by itself. None for a stream."""
    return Path(file.name) if isinstance(file.name, str) else None


def is_stream(path: Path) -> bool:
    """Whether ``output_file`` writes into what is there as it is: a device, a pipe, this process's own output."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    is_file_or_folder = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return not is_file_or_folder or _own_output(status) is not None


def is_stdout(path: Path) -> bool:
    """Whether the file is this process's standard output: then what else is to be said goes to standard error."""
    try:
        return os.path.samestat(path.stat(), os.fstat(_STDOUT))
    except (OSError, ValueError):
        return False


def _open_stream(path: Path) -> int | None:
    """A descriptor of what must not be replaced; None where a file may be put."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if (own := _own_output(status)) is not None:
        return os.dup(own)  # opened by its name it would begin at the file's start, and sockets refuse
    if stat.S_ISREG(status.st_mode):
        return None
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)


def _own_output(status: os.stat_result) -> int | None:
    """The descriptor by which this process writes to it already."""
    for descriptor in (_STDOUT, _STDERR):
        with suppress(OSError):  # closed by who started us
            if os.path.samestat(status, os.fstat(descriptor)):
                return descriptor
    return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
