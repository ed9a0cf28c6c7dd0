"""Which refused snapshots a request would have used: those that bear the name of one of its prefixes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvferry.store.vlkv import FNV_BASIS, FNV_PRIME, file_name


def refused_prefixes(token_ids: NDArray[np.int32], refused: Mapping[str, str]) -> list[str]:
    """ "name: reason" of the refused snapshots (reason by name) that are named after a prefix of token_ids, int32 [n].

    A name holds the FNV-1a hash of all its tokens, so one pass over the tokens gives the names of all prefixes.
    """
    if not refused:
        return []
    found = []
    value = FNV_BASIS
    for token in token_ids.astype("<i4").tolist():
        for byte in int(token).to_bytes(4, "little", signed=True):
            value = ((value ^ byte) * FNV_PRIME) & (2**64 - 1)
        reason = refused.get(file_name(value))
        if reason is not None:
            found.append(f"{file_name(value)}: {reason}")
    return found
