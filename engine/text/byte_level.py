"""The byte alphabet of GPT-2's byte-level BPE: every byte is written as one printable character of a vocabulary entry.

Bytes that print keep their Latin-1 character; the other 68 take the characters from U+0100 on, in byte order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final


def _alphabet() -> dict[str, int]:
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF: Final[dict[str, int]] = _alphabet()


def entry_bytes(entry: str) -> bytes:
    """The bytes a vocabulary entry stands for; with a character outside the alphabet, itself in UTF-8."""
    try:
        return bytes(BYTE_OF[character] for character in entry)
    except KeyError:
        return entry.encode("utf-8", "replace")


def token_table(entries: Sequence[str | None], literal_ids: Iterable[int]) -> list[bytes]:
    """The bytes of every token. Literal tokens (special, added) stand for their own text, missing ones for nothing."""
    table = [b"" if entry is None else entry_bytes(entry) for entry in entries]
    literals = set(literal_ids)
    for token_id, entry in enumerate(entries):
        if token_id in literals and entry is not None:
            table[token_id] = entry.encode("utf-8", "replace")
    return table
