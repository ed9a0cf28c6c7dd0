"""Where tokens and patches stand: M-RoPE positions of a prompt with images, and the tower's own geometry.

After Qwen3-VL: a text token's time, row and column are all its place in the prompt, counted so that an image takes up
as many places as the longer side of its merged grid; an image token's row and column count from the image's first
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import VisionConfig
from kvferry.engine.errors import InvalidTokens

_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grid:
    """An image's patches: frames, rows and columns; rows and columns are multiples of the merge size."""

    frames: int
    rows: int
    cols: int

    @property
    def n_patches(self) -> int:
        return self.frames * self.rows * self.cols

    def n_tokens(self, merge_size: int) -> int:
        return self.n_patches // merge_size**2


def grids_of(image_grid_thw: NDArray[np.integer], vision: VisionConfig) -> list[Grid]:
    """Grids out of int [n, 3] (frames, rows, cols). Raises InvalidTokens for one that the tower cannot take."""
    if image_grid_thw.ndim != 2 or image_grid_thw.shape[1] != 3:
        raise InvalidTokens(f"image_grid_thw has shape {list(image_grid_thw.shape)}, expected [images, 3]")
    grids = [Grid(*(int(size) for size in row)) for row in image_grid_thw]
    for grid in grids:
        if (
            grid.frames != 1
            or min(grid.rows, grid.cols) < 1
            or grid.rows % vision.merge_size
            or grid.cols % vision.merge_size
        ):
            raise InvalidTokens(
                f"an image of {grid.frames} x {grid.rows} x {grid.cols} patches: there must be one frame, and rows and "
                f"columns in multiples of {vision.merge_size}"
            )
    return grids


def image_positions(token_ids: NDArray[np.integer], grids: Sequence[Grid], vision: VisionConfig) -> tuple[_I32, int]:
    """Positions of a whole prompt: int32 [3, n_tokens] (time, row, column), and the rope delta.

    A later token stands at its index + the rope delta, in all three. The image tokens must be exactly those of the
    grids, in order; each image's together. Raises InvalidTokens.
    """
    starts = find_images(token_ids, grids, vision)
    return placed_positions(len(token_ids), starts, grids, vision.merge_size)


def find_images(token_ids: NDArray[np.integer], grids: Sequence[Grid], vision: VisionConfig) -> list[int]:
    """Index of each image's first token. Raises InvalidTokens: the image tokens must be exactly those of the grids."""
    is_image = np.asarray(token_ids) == vision.image_token_id
    starts, index = [], 0
    for grid in grids:
        start = index + int(np.argmax(is_image[index:])) if is_image[index:].any() else len(token_ids)
        stop = start + grid.n_tokens(vision.merge_size)
        if stop > len(token_ids) or not is_image[start:stop].all():
            rows, cols = grid.rows // vision.merge_size, grid.cols // vision.merge_size
            raise InvalidTokens(f"an image of {rows} x {cols} tokens does not stand in the prompt as one run of them")
        starts.append(start)
        index = stop
    if is_image[index:].any():
        raise InvalidTokens("the prompt has image tokens that belong to no image")
    return starts


def placed_positions(n_tokens: int, starts: Sequence[int], grids: Sequence[Grid], merge_size: int) -> tuple[_I32, int]:
    """As ``image_positions``, for images that are known to begin at these indices, in order, before n_tokens."""
    positions = np.empty((3, n_tokens), np.int64)
    index = next_place = 0
    for start, grid in zip(starts, grids, strict=True):
        rows, cols = grid.rows // merge_size, grid.cols // merge_size
        stop = start + rows * cols
        positions[:, index:start] = next_place + np.arange(start - index)
        next_place += start - index
        row, col = np.divmod(np.arange(rows * cols), cols)
        positions[:, start:stop] = next_place + np.stack([np.zeros_like(row), row, col])
        next_place += max(rows, cols)
        index = stop
    positions[:, index:] = next_place + np.arange(n_tokens - index)
    next_place += n_tokens - index
    return positions.astype(np.int32), next_place - n_tokens


def patch_places(grid: Grid, merge_size: int) -> tuple[_I64, _I64]:
    """Row and column of each patch of one frame, int64 [rows * cols] each, in the order the tower reads them.

    That is by merge blocks: the ``merge_size`` squared patches that become one token lie together.
    """
    rows = np.arange(grid.rows).reshape(-1, 1, merge_size, 1)
    cols = np.arange(grid.cols).reshape(1, -1, 1, merge_size)
    shape = (grid.rows // merge_size, grid.cols // merge_size, merge_size, merge_size)
    return np.broadcast_to(rows, shape).reshape(-1).copy(), np.broadcast_to(cols, shape).reshape(-1).copy()


def position_weights(grid: Grid, vision: VisionConfig) -> tuple[_I64, NDArray[np.float32]]:
    """How each patch's position embedding is interpolated: table rows int64 [4, n] and their weights float32 [4, n].

    Bilinear over the learned square grid with its corners on the image's corners; patches in the tower's order.
    """
    row, col = patch_places(grid, vision.merge_size)
    side = vision.grid_side
    y, x = np.linspace(0, side - 1, grid.rows, dtype=np.float32), np.linspace(0, side - 1, grid.cols, dtype=np.float32)
    top, left = y.astype(np.int64), x.astype(np.int64)
    bottom, right = np.minimum(top + 1, side - 1), np.minimum(left + 1, side - 1)
    down, across = (y - top)[row], (x - left)[col]
    one = np.float32(1)
    indices = np.stack(
        [
            top[row] * side + left[col],
            top[row] * side + right[col],
            bottom[row] * side + left[col],
            bottom[row] * side + right[col],
        ]
    )
    weights = np.stack([(one - down) * (one - across), (one - down) * across, down * (one - across), down * across])
    return indices, weights.astype(np.float32)
