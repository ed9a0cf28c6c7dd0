"""Packed weights as one file that can be mapped: written once, the same bytes on every node (docs/models.md).

A 2 MiB head (magic, version, JSON), the region exactly as the kernels read it, a digest (xxh3-64) of every piece of it,
and the SHA-256 of head and digests. Everything but the digests follows from the source, so a file is held against what
it should be, and nothing that it says about itself is believed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.engine.errors import ModelInvalid
from kvferry.engine.files.digest import Progress, no_progress
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.publish import published
from kvferry.engine.files.regular import fault_of
from kvferry.engine.kernels.layout import WEIGHTS_Q4, WEIGHTS_Q4_WIDE, WEIGHTS_Q5, WEIGHTS_Q6, WEIGHTS_Q8
from kvferry.engine.kernels.linear import GROUP_ROWS
from kvferry.engine.memory import HUGE_PAGE, ask_for_huge_pages
from kvferry.engine.packing import pack_pieces
from kvferry.engine.weight_plan import PIECE_BYTES, Piece, WeightPlan

_U8 = NDArray[np.uint8]

MAGIC: Final = b"kvfpack\0"
# Raised whenever the same source would be packed into other bytes: files of an older version are made anew.
VERSION: Final = 1
SUFFIX: Final = ".kvfpack"
DATA_AT: Final = HUGE_PAGE  # so that mapped weights can lie on huge pages
_PREFIX: Final = struct.Struct("<8sIIQ")  # magic, version, bytes of JSON, bytes of the file
_JSON_BYTES_MAX: Final = DATA_AT - _PREFIX.size
_DIGEST: Final = np.dtype("<u8")
_SEAL_BYTES: Final = 32
_KIND_NAMES: Final = {
    None: "f32",
    WEIGHTS_Q4: "q4",
    WEIGHTS_Q8: "q8",
    WEIGHTS_Q4_WIDE: "q4_wide",
    WEIGHTS_Q5: "q5",
    WEIGHTS_Q6: "q6",
}
# Written bytes that may wait in memory for the disk: a large model must not fill it with them.
_UNSYNCED_BYTES_MAX: Final = 256 << 20
_READERS: Final = 4
_READ_BYTES: Final = 8 << 20  # pieces that one reader takes at a time


class PackUnusable(ModelInvalid):
    """A packed file that is not what it should be; the sentence says how. Pack the model again."""


@dataclass(frozen=True)
class PackSpec:
    """What a packed file of a source must be. ``source_sha256``: ``ModelFile.weights_sha256``."""

    plan: WeightPlan
    source_sha256: str

    @cached_property
    def head(self) -> bytes:
        """Magic, version, sizes and JSON."""
        plan = self.plan
        body = {
            "config": plan.config.as_dict(),
            "group_rows": GROUP_ROWS,
            "parts": [[p.name, kind_name(p.kind), p.offset, p.n_bytes, len(p.tensors), *p.shape] for p in plan.parts],
            "piece_bytes": PIECE_BYTES,
            "recipe": plan.recipe,
            "source_sha256": self.source_sha256,
        }
        text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        if len(text) > _JSON_BYTES_MAX:
            raise ModelInvalid(f"the model has {len(plan.parts)} parts, more than a packed file's head can list")
        return _PREFIX.pack(MAGIC, VERSION, len(text), self.n_file_bytes) + text

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self.plan.pieces())

    @property
    def digests_at(self) -> int:
        return DATA_AT + self.plan.n_bytes

    @property
    def n_file_bytes(self) -> int:
        return self.digests_at + len(self.pieces) * _DIGEST.itemsize + _SEAL_BYTES

    @property
    def file_name(self) -> str:
        """By what it must hold: another source, recipe, layout or version has another name."""
        return hashlib.sha256(self.head).hexdigest()[:32] + SUFFIX


def read_head(path: Path) -> dict[str, Any] | None:
    """What a file says that it holds; None for what is no packed file. For a look, not to be believed."""
    try:
        with path.open("rb") as file:
            magic, _, n_json_bytes, _ = _PREFIX.unpack(file.read(_PREFIX.size))
            if magic != MAGIC or n_json_bytes > _JSON_BYTES_MAX:
                return None
            body = json.loads(file.read(n_json_bytes))
    except (OSError, ValueError, struct.error, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def kind_name(kind: int | None) -> str:
    """What a kind of packed weights is called in the head of a file."""
    return _KIND_NAMES.get(kind, f"kind {kind}")


def write_pack(path: Path, file: ModelFile, spec: PackSpec, progress: Progress = no_progress) -> None:
    """Pack a model into a file, piece by piece; it appears under its name whole and durable. Raises OSError,
    ModelInvalid."""
    with published(path) as out:
        # Takes the room now: a full disk is an error here, not a signal while a map is written.
        os.posix_fallocate(out.fileno(), 0, spec.n_file_bytes)
        sink = _FileSink(out.fileno(), spec)
        pack_pieces(file, spec.plan, sink, progress)
        file.check_unchanged()  # or what was packed is not what the source's digest says
        digests = sink.digests.tobytes()
        _write(out.fileno(), spec.head, 0)
        _write(out.fileno(), digests + _seal(spec.head, digests), spec.digests_at)


class _FileSink:
    """Writes pieces where they belong, in any order, and notes their digests."""

    def __init__(self, descriptor: int, spec: PackSpec) -> None:
        self._descriptor = descriptor
        self._index = {piece.offset: index for index, piece in enumerate(spec.pieces)}
        self._n_unsynced = 0
        self.digests: NDArray[Any] = np.zeros(len(spec.pieces), _DIGEST)

    def room(self, piece: Piece) -> _U8:
        return np.empty(piece.n_bytes, np.uint8)

    def filled(self, piece: Piece, packed: _U8) -> None:
        self.digests[self._index[piece.offset]] = xxhash.xxh3_64_intdigest(packed.data)
        _write(self._descriptor, packed.data, DATA_AT + piece.offset)
        self._n_unsynced += piece.n_bytes
        if self._n_unsynced >= _UNSYNCED_BYTES_MAX:
            self._n_unsynced = 0
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class PackFile:
    """An open packed file whose head, size and seal are right. Close it when its bytes have been read or mapped."""

    def __init__(self, path: Path, spec: PackSpec) -> None:
        """Raises PackUnusable, FileNotFoundError."""
        self.path: Final = path
        self.spec: Final = spec
        fault = fault_of(path)
        if fault is not None and path.exists():
            raise PackUnusable(f"{path} {fault}")
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(path) from error
        except OSError as error:
            raise PackUnusable(f"{path} cannot be read ({error.strerror})") from error
        try:
            self._digests = self._checked_digests()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def read_into(self, region: _U8, n_threads: int = _READERS) -> None:
        """Read all weights into memory, uint8 [bytes of the plan], and check each piece. Raises PackUnusable."""
        runs = self._runs()

        def read(run: Sequence[int]) -> None:
            first, last = self.spec.pieces[run[0]], self.spec.pieces[run[-1]]
            self._read(region[first.offset : last.offset + last.n_bytes], DATA_AT + first.offset)
            self.check(run, region)

        with ThreadPoolExecutor(min(n_threads, len(runs)), "kvferry-read") as pool:
            for _ in pool.map(read, runs):
                pass

    def map(self) -> _U8:
        """The region as a read-only map of the file, shared with every process that maps it."""
        mapping = mmap.mmap(self._descriptor, self.spec.digests_at, mmap.MAP_SHARED, mmap.PROT_READ)
        ask_for_huge_pages(mapping, 0, len(mapping))
        return np.frombuffer(mapping, np.uint8)[DATA_AT:]

    def check(self, indices: Sequence[int], region: _U8) -> None:
        """Compare pieces of the region with their digests. Raises PackUnusable for the first that differs."""
        for index in indices:
            piece = self.spec.pieces[index]
            self.check_piece(index, region[piece.offset : piece.offset + piece.n_bytes])

    def verify(self, progress: Progress = no_progress) -> None:
        """Read the file once and check every piece. Raises PackUnusable."""
        room = np.empty(max(piece.n_bytes for piece in self.spec.pieces), np.uint8)
        for index, piece in enumerate(self.spec.pieces):
            self._read(room[: piece.n_bytes], DATA_AT + piece.offset)
            self.check_piece(index, room[: piece.n_bytes])
            progress(piece.offset + piece.n_bytes, self.spec.plan.n_bytes)

    def check_piece(self, index: int, packed: _U8) -> None:
        """Raises PackUnusable when these are not the bytes of that piece."""
        if xxhash.xxh3_64_intdigest(packed.data) != int(self._digests[index]):
            piece = self.spec.pieces[index]
            raise PackUnusable(
                f"{self.path} is damaged: {piece.n_bytes} bytes from {DATA_AT + piece.offset} on ({piece.part.name}) "
                "are not what was written"
            )

    def _runs(self) -> list[range]:
        """Neighbouring pieces, some megabytes together."""
        borders, n_bytes = [0], 0
        for index, piece in enumerate(self.spec.pieces):
            n_bytes += piece.n_bytes
            if n_bytes >= _READ_BYTES:
                borders.append(index + 1)
                n_bytes = 0
        if borders[-1] != len(self.spec.pieces):
            borders.append(len(self.spec.pieces))
        return [range(start, stop) for start, stop in pairwise(borders)]

    def _checked_digests(self) -> NDArray[Any]:
        spec = self.spec
        n_bytes = os.fstat(self._descriptor).st_size
        if n_bytes != spec.n_file_bytes:
            raise PackUnusable(f"{self.path} has {n_bytes} bytes where {spec.n_file_bytes} are expected")
        head = np.empty(len(spec.head), np.uint8)
        self._read(head, 0)
        if head.tobytes() != spec.head:
            raise PackUnusable(f"{self.path} {_difference(head.tobytes())}")
        tail = np.empty(n_bytes - spec.digests_at, np.uint8)
        self._read(tail, spec.digests_at)
        digests = tail[:-_SEAL_BYTES]
        if tail[-_SEAL_BYTES:].tobytes() != _seal(spec.head, digests.tobytes()):
            raise PackUnusable(f"{self.path} is damaged: its list of digests is not what was written")
        return digests.view(_DIGEST)

    def _read(self, target: _U8, offset: int) -> None:
        view, n_done = target.data, 0
        while n_done < len(view):
            try:
                n = os.preadv(self._descriptor, [view[n_done:]], offset + n_done)
            except OSError as error:
                raise PackUnusable(
                    f"{self.path} cannot be read at byte {offset + n_done} ({error.strerror})"
                ) from error
            if n == 0:
                raise PackUnusable(f"{self.path} ends at byte {offset + n_done}, before its weights do")
            n_done += n


def _difference(head: bytes) -> str:
    """What is wrong with a head, to end a sentence that begins with the file."""
    magic, version, _, _ = _PREFIX.unpack_from(head)
    if magic != MAGIC:
        return "is no file of packed weights"
    if version != VERSION:
        return f"has version {version} of the format, and this is version {VERSION}"
    return "holds the weights of another model, or packed otherwise"


def _seal(head: bytes, digests: bytes) -> bytes:
    return hashlib.sha256(head + digests).digest()


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(descriptor, view, offset)
        view, offset = view[n:], offset + n
