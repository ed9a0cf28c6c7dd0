"""A session in a file, for another cluster. All numbers are little-endian.

    8 bytes     KVFERRYS
    u32         version, 1
    u32         bytes of the session, at most 32 MiB
    ...         kvferry.v1.ExportedSession
    per row file, at most 65,536:
      u8, ...   bytes of the model's folder in the store, and it
      u8, ...   bytes of the file's name, and it
      u64, ...  bytes of the file (VLKV), and it
    u8          0: there are no more
    32 bytes    SHA-256 of all before

A reader takes nothing from a file before the digest is right, and never asks for memory by what the file says.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from kvferry.client.errors import InvalidImport
from kvferry.proto.channel import MAX_MESSAGE_BYTES
from kvferry.terminal.output_file import PRIVATE_MODE, output_file

MAGIC: Final = b"KVFERRYS"
VERSION: Final = 1
MAX_ROW_FILES: Final = 65_536
DIGEST_BYTES: Final = 32
CHUNK_BYTES: Final = 1 << 20
_HEAD: Final = struct.Struct("<8sII")
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RowFile:
    """One file of a store within a session's file: ``n_bytes`` from ``offset`` on."""

    folder: str
    name: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class SessionFile:
    """What a file holds. ``session``: serialised ExportedSession."""

    path: Path
    session: bytes
    rows: tuple[RowFile, ...]

    def chunks(self, row_file: RowFile) -> Iterator[bytes]:
        """The bytes of one of them. Raises InvalidImport when the file has changed."""
        with _opened(self.path) as file:
            file.seek(row_file.offset)
            yield from _chunks(file, row_file.n_bytes)


def write_session_file(path: Path, session: bytes, rows: Iterable[Path]) -> int:
    """Under its name when it is whole, or into a device or pipe as it comes; returns the number of row files.

    A row file that is gone meanwhile is left out: it can be computed. Raises OSError.
    """
    digest, n_files = hashlib.sha256(), 0
    with output_file(path, PRIVATE_MODE) as file:

        def put(data: bytes) -> None:
            digest.update(data)
            file.write(data)

        put(_HEAD.pack(MAGIC, VERSION, len(session)) + session)
        for row_path in rows:
            try:
                row_file = row_path.open("rb")
            except FileNotFoundError:
                continue
            with row_file:
                n_bytes = os.fstat(row_file.fileno()).st_size
                for text in (row_path.parent.name, row_path.name):
                    put(bytes([len(text.encode())]) + text.encode())
                put(_U64.pack(n_bytes))
                for chunk in _chunks(row_file, n_bytes):
                    put(chunk)
            n_files += 1
        put(b"\0")
        file.write(digest.digest())
    return n_files


def read_session_file(path: Path) -> SessionFile:
    """Raises InvalidImport for what is no such file, a cut one, a damaged one, or one of a newer version."""
    with _opened(path) as file:
        left = os.fstat(file.fileno()).st_size - DIGEST_BYTES
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or head[:8] != MAGIC:
            raise InvalidImport(f"{path} is no session that was exported.")
        _, version, n_session = _HEAD.unpack(head)
        if version != VERSION:
            raise InvalidImport(f"{path} has version {version}, and this program reads version {VERSION}.")
        if n_session > min(MAX_MESSAGE_BYTES, left):
            raise InvalidImport(f"{path} is cut or damaged: its session has {n_session:,} bytes.")
        session = _exactly(file, n_session)
        rows: list[RowFile] = []
        while folder := _text(file):
            if len(rows) == MAX_ROW_FILES:
                raise InvalidImport(f"{path} has more than {MAX_ROW_FILES:,} files of rows.")
            name = _text(file)
            (n_bytes,) = _U64.unpack(_exactly(file, _U64.size))
            rows.append(RowFile(folder, name, file.tell(), n_bytes))
            if n_bytes > left - file.tell():
                raise InvalidImport(f"{path} is cut or damaged: a file of rows in it has {n_bytes:,} bytes.")
            file.seek(n_bytes, os.SEEK_CUR)
        n_bytes = file.tell()
        digest = _exactly(file, DIGEST_BYTES)
        if file.read(1):
            raise InvalidImport(f"{path} is damaged: there is more after its end.")
        file.seek(0)
        found = hashlib.sha256()
        for chunk in _chunks(file, n_bytes):
            found.update(chunk)
        if found.digest() != digest:
            raise InvalidImport(f"{path} is damaged: its bytes are not those that were written.")
    return SessionFile(path, session, tuple(rows))


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidImport(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error


def _text(file: BinaryIO) -> str:
    (n_bytes,) = _exactly(file, 1)
    try:
        return _exactly(file, n_bytes).decode("ascii")
    except UnicodeDecodeError as error:
        raise InvalidImport(f"{file.name} is damaged: a name in it is none.") from error


def _exactly(file: BinaryIO, n_bytes: int) -> bytes:
    data = file.read(n_bytes)
    if len(data) < n_bytes:
        raise InvalidImport(f"{file.name} is cut: {n_bytes - len(data):,} bytes are missing.")
    return data


def _chunks(file: BinaryIO, n_bytes: int) -> Iterator[bytes]:
    while n_bytes:
        data = _exactly(file, min(n_bytes, CHUNK_BYTES))
        n_bytes -= len(data)
        yield data
