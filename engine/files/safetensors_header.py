"""The header of a safetensors file, checked whole before anything is believed.

The file is 8 bytes of header length, the header (JSON: name to dtype, shape and byte range), and the tensors' bytes.
The ranges must lie end to end, and the last one end with the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from kvferry.engine.files.gguf_header import HeaderDamaged

# A header takes some 130 bytes for each tensor; 18,867 tensors (a mixture of 128 experts in one file) take 2.4 MB. The
# format's own limit is 100 MB, but a header of that size could make several gigabytes of small objects.
MAX_HEADER_BYTES: Final = 1 << 24
MAX_TENSORS: Final = 1 << 16
MAX_NAME_CHARS: Final = 256
MAX_DIMS: Final = 8
_LENGTH_BYTES: Final = 8
_MAX_VALUES: Final = 10 * MAX_TENSORS  # of JSON values; an entry has 8 or 9

# Bytes of an element. All that the format has; which of them are weights is the reader's to say.
_ITEM_BYTES: Final[dict[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor: ``dtype`` as the file spells it, and its bytes [start, stop) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_safetensors_header(view: memoryview) -> list[SafetensorsEntry]:
    """The tensors of a whole file given as bytes, in the order of their ranges. Raises HeaderDamaged."""
    n_header = _header_bytes(view)
    first_byte = _LENGTH_BYTES + n_header
    described = _parse(bytes(view[_LENGTH_BYTES:first_byte]))
    described.pop("__metadata__", None)
    if len(described) > MAX_TENSORS:
        raise HeaderDamaged(f"is damaged: it claims {len(described)} tensors, more than the limit of {MAX_TENSORS}")
    entries = [_entry(name, facts, first_byte) for name, facts in described.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = first_byte
    for entry in entries:
        if entry.start != end:
            raise HeaderDamaged(f"is damaged: tensor {entry.name!r} does not begin where the one before it ends")
        end = entry.stop
    if end > len(view):
        raise HeaderDamaged(f"was cut short: it has {len(view)} bytes and should have {end}; fetch or copy it again")
    if end < len(view):
        raise HeaderDamaged(f"is damaged: {len(view) - end} bytes at its end belong to no tensor")
    return entries


def _header_bytes(view: memoryview) -> int:
    if len(view) < _LENGTH_BYTES:
        raise HeaderDamaged(f"is not a safetensors file: it has {len(view)} bytes")
    n_header = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if n_header > MAX_HEADER_BYTES:
        raise HeaderDamaged(
            f"is not a usable safetensors file: its header claims {n_header} bytes, more than {MAX_HEADER_BYTES}"
        )
    if n_header > len(view) - _LENGTH_BYTES:
        raise HeaderDamaged(f"was cut short: its header claims {n_header} bytes, and the file has {len(view)}")
    return n_header


def _parse(body: bytes) -> dict[str, Any]:
    if not body.startswith(b"{"):
        raise HeaderDamaged("is not a safetensors file: its header does not begin with '{'")
    if sum(body.count(mark) for mark in (b",", b"{", b"[")) > _MAX_VALUES:  # before objects are made of them
        raise HeaderDamaged(f"is damaged: its header holds more than {_MAX_VALUES} values")
    try:
        described = json.loads(body, object_pairs_hook=_no_name_twice)
    except (ValueError, RecursionError) as error:
        raise HeaderDamaged(f"is damaged: its header is not JSON ({error})") from error
    if not isinstance(described, dict):
        raise HeaderDamaged("is damaged: its header is not a JSON object")
    return described


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _entry(name: str, facts: Any, first_byte: int) -> SafetensorsEntry:
    if len(name) > MAX_NAME_CHARS:
        raise HeaderDamaged(f"is damaged: a tensor's name has {len(name)} characters, more than {MAX_NAME_CHARS}")
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderDamaged(f"is damaged: tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    item_bytes = _ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item_bytes is None:
        raise HeaderDamaged(f"is damaged: tensor {name!r} has the unknown type {str(dtype)[:40]!r}")
    if not _counts(shape, MAX_DIMS) or not _counts(offsets, 2) or len(offsets) != 2:
        raise HeaderDamaged(f"is damaged: tensor {name!r} has a shape or a range that is none")
    n_bytes = item_bytes
    for size in shape:
        n_bytes *= size
    if offsets[1] - offsets[0] != n_bytes:
        raise HeaderDamaged(
            f"is damaged: tensor {name!r} of shape {shape} and type {dtype} takes {n_bytes} bytes, "
            f"and its range has {offsets[1] - offsets[0]}"
        )
    return SafetensorsEntry(name, dtype, tuple(shape), first_byte + offsets[0], first_byte + offsets[1])


def _counts(value: Any, n_max: int) -> bool:
    """Whether this is a short list of plain, non-negative numbers of at most 63 bits."""
    return (
        isinstance(value, list)
        and len(value) <= n_max
        and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
    )
