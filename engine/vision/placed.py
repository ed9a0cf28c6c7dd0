"""Images in a token sequence: where they stand, and what that means for whose rows are whose. Pure.

All tokens of all images have one id, so ids alone do not say what the rows from an image on were computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.vision.positions import Grid


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image whose ``n_tokens`` tokens begin at index ``start``; ``content_hash``: SHA-256 of what the tower sees."""

    start: int
    n_tokens: int
    grid: Grid
    content_hash: bytes

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.start + self.n_tokens


Images = tuple[PlacedImage, ...]
"""Of one sequence, in order, not overlapping; one that begins beyond the sequence's end changes nothing."""


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32], images_a: Images = (), images_b: Images = ()) -> int:
    """How many leading tokens of two sequences, int32 [n] and [m], are equal, and stand for the same content.

    As many rows of one are rows of the other. An image that both have is shared as far as both have tokens of it.
    """
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    n_equal = int(differing[0]) if len(differing) else n
    return min(n_equal, first_difference(images_a, images_b, n_equal))


def first_difference(a: Sequence[PlacedImage], b: Sequence[PlacedImage], n: int) -> int:
    """Index of the first of n tokens at which an image begins that only one sequence has there; n without one."""
    for one, other in zip_longest(a, b):
        start = min(image.start for image in (one, other) if image is not None)
        if one != other or start >= n:
            return min(start, n)
    return n
