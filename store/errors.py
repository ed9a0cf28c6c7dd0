"""Every way the store says no: who is at fault, what was attempted on which path, and what the caller should do.

SnapshotRejected: the file is bad. StoreUnavailable: the disk is bad. StoreFull: there is no room. StoreMisuse: the
caller is bad. None of them ever has to fail a turn: rows can always be recomputed, and a save can always be skipped.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

if TYPE_CHECKING:
    from kvferry.store.reader import Identity

Recovery = Literal["retry", "recompute", "skip_save", "refuse", "page_operator"]

# Why a snapshot is refused -> exit code of the command line. Reasons are stable: scripts and logs key on them.
EXIT_CODES: Final[dict[str, int]] = {
    "truncated_header": 10,
    "bad_magic": 11,
    "bad_version": 12,
    "zero_field": 13,
    "kv_dim_inconsistent": 14,
    "bad_fmt": 15,
    "reserved_not_zero": 16,
    "size_mismatch": 17,
    "token_hash_mismatch": 18,
    "token_out_of_vocab": 19,
    "geometry_mismatch:n_layers": 20,
    "geometry_mismatch:nkv": 21,
    "geometry_mismatch:hd": 22,
    "geometry_mismatch:kv_bs": 23,
    "geometry_mismatch:kv_dim": 24,
    "out_of_bounds:n_layers": 25,
    "out_of_bounds:nkv": 26,
    "out_of_bounds:hd": 27,
    "out_of_bounds:kv_bs": 28,
    "out_of_bounds:file_n_tokens": 29,
    "filename_hash_mismatch": 30,
    "bad_name": 31,
    "not_regular_file": 32,
    "untrusted_owner": 33,
    "token_prefix_mismatch": 34,
    "bad_scale": 35,
    "extension_malformed": 36,
    "fingerprint_mismatch": 37,
    "payload_mismatch": 38,
    "head_digest_mismatch": 50,
    "block_digest_mismatch": 51,
    "prefix_digest_mismatch": 52,
    "orphan_segment": 53,
    "key_mismatch": 54,
}


class StoreError(Exception):
    """Base of this room's errors.

    ``op`` is what was attempted, ``path`` on what, ``recovery`` what the caller should do; ``str()`` is one sentence
    for a person.
    """

    code: ClassVar[str] = "store_error"
    default_exit_code: ClassVar[int] = 1

    def __init__(self, sentence: str, *, op: str, path: str | Path, recovery: Recovery) -> None:
        super().__init__(sentence)
        self.op = op
        self.path = str(path)
        self.recovery: Recovery = recovery

    @property
    def exit_code(self) -> int:
        """Exit code of a command that ends with this error."""
        return self.default_exit_code


class SnapshotRejected(StoreError):
    """A snapshot file is not what it should be. ``reason`` is a key of EXIT_CODES.

    ``judged``: the file that was open; another one may have come to have its name since.
    """

    code = "snapshot_rejected"
    judged: Identity | None = None

    def __init__(self, reason: str, detail: str, *, path: str | Path = "", op: str = "read") -> None:
        where = f"snapshot {path}" if str(path) else "the snapshot"
        super().__init__(f"{where} is refused ({reason}): {detail}", op=op, path=path, recovery="recompute")
        self.reason = reason
        self.detail = detail

    @property
    def exit_code(self) -> int:
        """The refusal's own exit code."""
        return EXIT_CODES[self.reason]

    def at(self, path: str | Path) -> SnapshotRejected:
        """The same refusal, naming the file it is about."""
        return SnapshotRejected(self.reason, self.detail, path=path, op=self.op)


class StoreUnavailable(StoreError):
    """The disk, or the way to it, does not do what it should."""

    code = "store_unavailable"
    default_exit_code = 40

    def __init__(self, sentence: str, *, op: str, path: str | Path, recovery: Recovery = "retry") -> None:
        super().__init__(sentence, op=op, path=path, recovery=recovery)


class SnapshotGone(StoreUnavailable):
    """The snapshot is not there any more (evicted, or ESTALE from another client's deletion): a cache miss, not a
    fault."""

    code = "snapshot_gone"
    default_exit_code = 41

    def __init__(self, op: str, path: str | Path) -> None:
        super().__init__(
            f"there is no snapshot {path} (any more); its rows have to be recomputed",
            op=op,
            path=path,
            recovery="recompute",
        )


class StoreFull(StoreError):
    """There is no room for this snapshot, and nothing left that may be evicted for it.

    ``needed_bytes``: how many the disk must have free for it; 0: it is another limit than the disk's.
    """

    code = "store_full"
    default_exit_code = 42

    def __init__(self, sentence: str, *, op: str, path: str | Path, needed_bytes: int = 0) -> None:
        super().__init__(sentence, op=op, path=path, recovery="skip_save")
        self.needed_bytes = needed_bytes


class WriteBudgetSpent(StoreFull):
    """The bytes that may be written in an hour are written; the next hour has new ones. No fault of the disk."""

    code = "write_budget_spent"
    default_exit_code = 45


class NameTaken(StoreError):
    """The snapshot's name belongs to a file with other token ids (a hash collision) or to a refused one; the older
    file stays."""

    code = "name_taken"
    default_exit_code = 43

    def __init__(self, sentence: str, *, path: str | Path) -> None:
        super().__init__(sentence, op="publish", path=path, recovery="skip_save")


class StoreMisuse(StoreError):
    """The caller asked for something that cannot be; a bug in the caller or a bad setting, never the disk's fault."""

    code = "store_misuse"
    default_exit_code = 44

    def __init__(self, sentence: str, *, op: str, path: str | Path = "") -> None:
        super().__init__(sentence, op=op, path=path, recovery="refuse")


_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READING: Final = frozenset({"open", "read", "look at"})
_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE})


def from_os_error(error: OSError, op: str, path: str | Path) -> StoreError:
    """The store's error for what the operating system said."""
    said = error.strerror or type(error).__name__
    if error.errno in _NO_ROOM:
        return StoreFull(f"no room to {op} {path}: {said}", op=op, path=path)
    if error.errno in _GONE and op in _READING:
        return SnapshotGone(op, path)
    if error.errno in {errno.ENOTDIR, errno.EEXIST}:
        return StoreUnavailable(
            f"cannot {op} {path}: a part of this path is a file where a directory is needed;"
            " name another store directory",
            op=op,
            path=path,
            recovery="page_operator",
        )
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
        return StoreUnavailable(
            f"cannot {op} {path}: {said}; check who owns the store directory and how it is mounted",
            op=op,
            path=path,
            recovery="page_operator",
        )
    return StoreUnavailable(f"cannot {op} {path}: {said}", op=op, path=path)


@contextmanager
def os_errors_mapped(op: str, path: str | Path) -> Iterator[None]:
    """Turns an OSError of the block into the store's own; no operating system error leaves this room."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, op, path) from error
