"""A sequence with images, as the engine takes it chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import VisionConfig
from kvferry.engine.engine import Sight
from kvferry.engine.vision.placed import Images, PlacedImage
from kvferry.engine.vision.positions import Grid, find_images, placed_positions
from kvferry.engine.vision.tower import Features


class SeenPrompt:
    """What the tokens of a sequence with these images need beside their ids, also those after the last image.

    ``features`` by content hash: of every image that rows are still computed of; rows that are there need none.
    """

    def __init__(self, images: Images, features: Mapping[bytes, Features], merge_size: int) -> None:
        self.images = images
        self._features: Mapping[bytes, Features] = features
        end = images[-1].end if images else 0
        starts, grids = [image.start for image in images], [image.grid for image in images]
        self._positions, self.rope_delta = placed_positions(end, starts, grids, merge_size)

    @classmethod
    def of_prompt(
        cls, token_ids: NDArray[np.integer], grids: Sequence[Grid], features: Features, vision: VisionConfig
    ) -> Self:
        """Images found by their tokens, their features one after the other. Raises InvalidTokens."""
        sizes = [grid.n_tokens(vision.merge_size) for grid in grids]
        starts = find_images(token_ids, grids, vision)
        names = [number.to_bytes(4, "little") for number in range(len(grids))]
        images = tuple(map(PlacedImage, starts, sizes, grids, names))
        borders = pairwise(np.cumsum([0, *sizes]).tolist())
        each = [Features(features.embeds[i:j], features.deepstack[i:j]) for i, j in borders]
        return cls(images, dict(zip(names, each, strict=True)), vision.merge_size)

    def sight(self, start: int, stop: int) -> Sight:
        """Of the sequence's tokens [start, stop)."""
        n_placed = self._positions.shape[1]
        later = np.arange(max(start, n_placed), max(stop, n_placed), dtype=np.int32) + np.int32(self.rope_delta)
        positions = np.concatenate([self._positions[:, start:stop], np.tile(later, (3, 1))], axis=1)
        parts = list(self._parts(start, stop))
        if not parts:
            return Sight(positions, _NO_ROWS, _NO_EMBEDS, _NO_DEEPSTACK)
        rows, embeds, deepstack = zip(*parts, strict=True)
        return Sight(positions, np.concatenate(rows), np.concatenate(embeds), np.concatenate(deepstack))

    def forget_features(self) -> None:
        """All rows of images are there: their features need no memory any more."""
        self._features = {}

    def _parts(
        self, start: int, stop: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]]:
        """Of each image in [start, stop): its rows, counted from ``start``, and its features there."""
        for image in self.images:
            first, end = max(start, image.start), min(stop, image.end)
            if first < end:
                features = self._features[image.content_hash]
                within = slice(first - image.start, end - image.start)
                yield np.arange(first - start, end - start), features.embeds[within], features.deepstack[within]


_NO_ROWS = np.empty(0, np.int64)
_NO_EMBEDS = np.empty((0, 0), np.float32)
_NO_DEEPSTACK = np.empty((0, 0, 0), np.float32)
