"""The logits of the last tokens of recent prompts: whoever asks the same again needs no forward pass. Engine thread
only; no clock, no I/O.

Logits are as much a function of the tokens and images before them as rows are, so they may be shared like rows. The
whole prompt has to be equal: a prompt that goes on has to be computed from its first new token anyway.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.vision.placed import Images

MAX_BYTES: Final = 8 << 20
"""Some 40 prompts with a vocabulary of 49,152, a dozen with one of 151,936."""

SHARE_OF_ROWS: Final = 12
"""Logits are saved with at least this many times their bytes in rows: they spare one step of one row, which is worth
8 % more bytes, and not a file that is half logits (0.2 to 0.6 MB, the rows of 4 to 50 tokens)."""


def are_worth_saving(logits: NDArray[np.float32], n_row_bytes: int) -> bool:
    """Whether logits, float32 [vocab], should go into the file that so many bytes of new rows are saved in."""
    return logits.nbytes * SHARE_OF_ROWS <= n_row_bytes


@dataclass(slots=True)
class PromptEnds:
    """Logits by prompt, the least recently used forgotten first."""

    max_bytes: int = MAX_BYTES
    _logits: OrderedDict[bytes, NDArray[np.float32]] = field(default_factory=OrderedDict)
    _n_bytes: int = 0

    def remember(
        self, token_ids: NDArray[np.int32], images: Images, logits: NDArray[np.float32], namespace: str = ""
    ) -> NDArray[np.float32]:
        """Logits, float32 [vocab], of the last of these tokens, int32 [n]; returns the copy of them that is kept."""
        key = _key(token_ids, images, namespace)
        kept = self._logits.pop(key, None)
        if kept is None:
            kept = np.array(logits)
            self._n_bytes += kept.nbytes
        self._logits[key] = kept
        while self._n_bytes > self.max_bytes:
            _, forgotten = self._logits.popitem(last=False)
            self._n_bytes -= forgotten.nbytes
        return kept

    def find(self, token_ids: NDArray[np.int32], images: Images, namespace: str = "") -> NDArray[np.float32] | None:
        """The logits of exactly this prompt, asked for by whoever may know that it was asked before."""
        key = _key(token_ids, images, namespace)
        if key in self._logits:
            self._logits.move_to_end(key)
        return self._logits.get(key)


def _key(token_ids: NDArray[np.int32], images: Images, namespace: str) -> bytes:
    """A digest: two prompts that shared it would be answered alike, and nobody can make such two."""
    parts = [
        namespace.encode(),
        token_ids.astype("<i4").tobytes(),
        *(f"{image.start} {image.n_tokens} {image.grid}".encode() for image in images),
        *(image.content_hash for image in images),
    ]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
