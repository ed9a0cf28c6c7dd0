"""What goes into a save and what comes out of it: the ids as they may be written, and the published snapshot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kvferry.store import vlkv
from kvferry.store.errors import StoreMisuse
from kvferry.store.geometry import TokenIds


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A published snapshot: n_tokens from position 0 on. ``already_there`` when nothing had to be written.

    ``n_bytes`` is the file's size; of a version 3 segment, which holds positions ``start`` to n_tokens - 1.
    """

    name: str
    n_tokens: int
    n_bytes: int
    already_there: bool
    start: int = 0


def checked_ids(token_ids: ArrayLike, vocab_size: int) -> TokenIds:
    """The ids as a frozen copy. Raises StoreMisuse: a snapshot that every reader would refuse is not written."""
    ids = np.array(token_ids, np.int32)
    if ids.ndim != 1 or not 1 <= len(ids) <= vlkv.MAX_TOKENS:
        raise StoreMisuse(
            f"a snapshot has 1 to {vlkv.MAX_TOKENS} tokens in one row, not shape {ids.shape}", op="publish"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise StoreMisuse(f"a token id is outside the vocabulary of {vocab_size}", op="publish")
    ids.setflags(write=False)
    return ids
