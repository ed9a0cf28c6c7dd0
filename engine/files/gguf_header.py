"""The header of a GGUF file (versions 2 and 3), read with every count and range checked before it is used.

The format's own Python reader believes the counts it finds: a cut or damaged file ends in a traceback, an endless loop
or no memory. It also makes an array object of every vocabulary entry, which takes seconds. So the header is walked
here; the tables of block sizes and type names come from the ``gguf`` package, and the tests compare the two readers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)

# Published files have some 30 to 100 entries, at most a few thousand tensors, vocabularies of 152,000 with as many
# merges (4 MB, 460,000 items in all) and templates of 20 KB. An item takes up to 60 bytes in memory, however short it
# is in the file.
MAX_ENTRIES: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_METADATA_BYTES: Final = 1 << 24
MAX_STRING_BYTES: Final = 1 << 22
MAX_ARRAY_ITEMS: Final = 1 << 20  # of all arrays together
MAX_NAME_BYTES: Final = 256
MAX_DIMS: Final = 4
MAX_ALIGNMENT: Final = 1 << 16

_SCALARS: Final[dict[int, struct.Struct]] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}


class HeaderDamaged(Exception):
    """What is wrong with the header, in words that fit after the file's name."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header describes it. ``dims`` counts from the fastest-varying one, as the file does."""

    name: str
    dims: tuple[int, ...]
    kind: str
    offset: int  # bytes from the start of the file
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key, and the tensors in file order; each range lies inside the file and overlaps no other."""

    version: int
    metadata: dict[str, Any]
    tensors: list[TensorEntry]


def read_header(view: memoryview) -> Header:
    """Walk the header of a whole file given as bytes.

    Raises HeaderDamaged for whatever is not a complete little-endian GGUF file.
    """
    if len(view) < 4 or bytes(view[:4]) != _MAGIC:
        raise HeaderDamaged("is not a GGUF file: it does not begin with the letters GGUF")
    cursor = _Cursor(view, 4)
    version = int(cursor.scalar(GGUFValueType.UINT32, "the version"))
    if version not in _VERSIONS:
        hint = "it is big-endian" if version & 0xFFFF == 0 else f"its version is {version}"
        raise HeaderDamaged(f"cannot be read: {hint}, and only little-endian versions 2 and 3 are supported")
    n_tensors = cursor.count("tensors", MAX_TENSORS, min_item_bytes=24)
    n_entries = cursor.count("metadata entries", MAX_ENTRIES, min_item_bytes=13)
    metadata: dict[str, Any] = {}
    for _ in range(n_entries):
        key = cursor.string("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise HeaderDamaged(f"is damaged: metadata key {key!r} appears twice")
        metadata[key] = cursor.value(f"metadata entry {key!r}")
        if cursor.offset > MAX_METADATA_BYTES:
            raise HeaderDamaged(f"is damaged: its metadata takes more than the limit of {MAX_METADATA_BYTES} bytes")
    raw = [_tensor_entry(cursor) for _ in range(n_tensors)]
    start = _align(cursor.offset, _alignment(metadata))
    tensors = [TensorEntry(e.name, e.dims, e.kind, start + e.offset, e.n_bytes) for e in raw]
    _check_ranges(tensors, len(view), _alignment(metadata))
    return Header(version, metadata, tensors)


class _Cursor:
    """A position in the file that never reads past its end."""

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view
        self._n_items_left = MAX_ARRAY_ITEMS
        self.offset = offset

    def _take(self, n_bytes: int, what: str) -> int:
        start = self.offset
        if n_bytes > len(self._view) - start:
            raise HeaderDamaged(f"was cut short: it ends inside its header, at {what} (byte {start})")
        self.offset = start + n_bytes
        return start

    def scalar(self, kind: int, what: str) -> Any:
        packer = _SCALARS[kind]
        return packer.unpack_from(self._view, self._take(packer.size, what))[0]

    def count(self, what: str, limit: int, min_item_bytes: int) -> int:
        """A count of items that follow; refused when they could not fit into the rest of the file."""
        n_items = int(self.scalar(GGUFValueType.UINT64, f"the number of {what}"))
        if n_items > limit:
            raise HeaderDamaged(f"is damaged: it claims {n_items} {what}, more than the limit of {limit}")
        if n_items * min_item_bytes > len(self._view) - self.offset:
            raise HeaderDamaged(f"was cut short: it claims {n_items} {what} and ends before they could fit")
        return n_items

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        n_bytes = int(self.scalar(GGUFValueType.UINT64, what))
        if n_bytes > limit:
            raise HeaderDamaged(f"is damaged: {what} claims {n_bytes} bytes, more than the limit of {limit}")
        start = self._take(n_bytes, what)
        try:
            return str(self._view[start : start + n_bytes], "utf-8")
        except UnicodeDecodeError as error:
            raise HeaderDamaged(f"is damaged: {what} is not UTF-8") from error

    def _strings(self, n_items: int, what: str) -> list[str]:
        """``string`` as often, in a third of the time: vocabularies have hundreds of thousands."""
        view, size, at, unpack = self._view, len(self._view), self.offset, _SCALARS[GGUFValueType.UINT64].unpack_from
        found: list[str] = []
        try:
            for _ in range(n_items):
                start = at + 8
                end = start + unpack(view, at)[0]
                if end > size or end - start > MAX_STRING_BYTES:
                    break
                found.append(str(view[start:end], "utf-8"))
                at = end
        except (struct.error, UnicodeDecodeError):
            pass  # said by the slow way
        self.offset = at
        return found if len(found) == n_items else [*found, self.string(what)]

    def value(self, what: str) -> Any:
        kind = int(self.scalar(GGUFValueType.UINT32, what))
        if kind == GGUFValueType.ARRAY:
            return self._array(what)
        return self._single(kind, what)

    def _single(self, kind: int, what: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.scalar(kind, what)
        raise HeaderDamaged(f"is damaged: {what} has the unknown value type {kind}")

    def _array(self, what: str) -> list[Any]:
        kind = int(self.scalar(GGUFValueType.UINT32, what))
        packer = _SCALARS.get(kind)
        if packer is None and kind != GGUFValueType.STRING:
            raise HeaderDamaged(f"is damaged: {what} is an array of the unknown or nested value type {kind}")
        n_items = self.count(f"items in {what}", self._n_items_left, min_item_bytes=packer.size if packer else 8)
        self._n_items_left -= n_items
        if packer is None:
            return self._strings(n_items, what)
        start = self._take(n_items * packer.size, what)
        return list(struct.unpack_from(f"<{n_items}{packer.format[-1]}", self._view, start))


def _tensor_entry(cursor: _Cursor) -> TensorEntry:
    """One tensor's description; its offset is still relative to the start of the data."""
    name = cursor.string("a tensor's name", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    n_dims = int(cursor.scalar(GGUFValueType.UINT32, what))
    if not 1 <= n_dims <= MAX_DIMS:
        raise HeaderDamaged(f"is damaged: {what} has {n_dims} dimensions")
    dims = tuple(int(cursor.scalar(GGUFValueType.UINT64, what)) for _ in range(n_dims))
    raw_kind = int(cursor.scalar(GGUFValueType.UINT32, what))
    try:
        kind = GGMLQuantizationType(raw_kind)
        block_items, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise HeaderDamaged(f"is damaged: {what} has the unknown type {raw_kind}") from error
    n_items = 1
    for dim in dims:
        n_items *= dim
    if n_items == 0 or dims[0] % block_items:
        raise HeaderDamaged(
            f"is damaged: {what} of shape {dims} is no whole number of {kind.name} blocks of {block_items}"
        )
    offset = int(cursor.scalar(GGUFValueType.UINT64, what))
    return TensorEntry(name, dims, kind.name.lower(), offset, n_items // block_items * block_bytes)


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise HeaderDamaged(f"is damaged: general.alignment is {alignment!r}, which is no usable power of two")
    return alignment


def _align(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment


def _check_ranges(tensors: list[TensorEntry], file_bytes: int, alignment: int) -> None:
    """Names are unique; every range is aligned, inside the file, and overlaps no other."""
    if len({entry.name for entry in tensors}) != len(tensors):
        raise HeaderDamaged("is damaged: two tensors have the same name")
    end_of_last = 0
    for entry in sorted(tensors, key=lambda entry: entry.offset):
        end = entry.offset + entry.n_bytes
        if end > file_bytes:
            raise HeaderDamaged(
                f"was cut short: it has {file_bytes} bytes, and tensor {entry.name!r} would end at byte {end}; "
                "fetch or copy it again"
            )
        if entry.offset % alignment:
            raise HeaderDamaged(f"is damaged: tensor {entry.name!r} does not begin at a multiple of {alignment} bytes")
        if entry.offset < end_of_last:
            raise HeaderDamaged(f"is damaged: tensor {entry.name!r} overlaps another")
        end_of_last = end
