"""Where a store is, as people write it, and how its files are sealed: the same for node, coordinator and commands.

/mnt/kvferry                      a folder: local, or a network mount
s3://BUCKET/PREFIX                an S3-compatible object store (extra ``s3``); AWS_ACCESS_KEY_ID,
                                  AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL say whose and where
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.store.errors import StoreMisuse
from kvferry.store.fs import FileSystem, PosixFileSystem
from kvferry.store.seals import KEY_BYTES_MIN, EncryptedSeal, KeyedSeal, PlainSeal, Seal

_S3: Final = "s3"
_KEY_BYTES_MOST: Final = 4096


@dataclass(frozen=True, slots=True)
class StorePlace:
    """``where``: see above. ``key_file``: the fleet's key, with which files are signed, or ``encrypted`` as well."""

    where: str
    key_file: Path | None = None
    encrypted: bool = False

    @property
    def folder(self) -> Path | None:
        """The folder; None for an object store. Raises StoreMisuse for the address of anything else."""
        scheme, mark, _ = self.where.partition("://")
        if mark and scheme.isalnum():
            if scheme == _S3:
                return None
            raise StoreMisuse(
                f"the store {self.where!r} is neither a folder nor s3://BUCKET/PREFIX; "
                "for a server that speaks S3, put its address into AWS_ENDPOINT_URL",
                op="open store",
            )
        return Path(self.where)

    def open(self) -> tuple[FileSystem, Path, Seal]:
        """The file system, the root in it, and the seal. Does no I/O but reading the key. Raises StoreMisuse."""
        if self.folder is not None:
            return PosixFileSystem(), self.folder, self.seal()
        from kvferry.store.backend.s3 import open_s3

        return open_s3(self.where, **_insecure_endpoint()), Path(), self.seal()

    def seal(self) -> Seal:
        """Raises StoreMisuse for a key that cannot be used."""
        if self.key_file is None:
            if self.encrypted:
                raise StoreMisuse("an encrypted store needs a key: name a --store-key-file", op="open store")
            return PlainSeal()
        key = _read_key(self.key_file)
        return EncryptedSeal(key) if self.encrypted else KeyedSeal(key)


def _read_key(path: Path) -> bytes:
    """The file's bytes without white space around them. Never part of a message."""
    try:
        with path.open("rb") as file:
            status, key = os.fstat(file.fileno()), file.read(_KEY_BYTES_MOST + 1).strip()
    except OSError as error:
        raise StoreMisuse(
            f"the store key {path} cannot be read: {error.strerror}", op="open store", path=path
        ) from None
    if status.st_mode & 0o077:
        raise StoreMisuse(
            f"the store key {path} can be read by others than its owner: chmod 600 it", op="open store", path=path
        )
    if len(key) > _KEY_BYTES_MOST:
        raise StoreMisuse(f"the store key {path} is longer than {_KEY_BYTES_MOST} bytes", op="open store", path=path)
    if len(key) < KEY_BYTES_MIN:
        raise StoreMisuse(
            f"the store key {path} holds {len(key)} bytes without white space around them, not {KEY_BYTES_MIN} or more",
            op="open store",
            path=path,
        )
    return key


def _insecure_endpoint() -> dict[str, object]:
    """obstore refuses an http:// endpoint unless told; a server on one's own network often has no certificate."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return {"client_options": {"allow_http": True}} if endpoint.startswith("http://") else {}
