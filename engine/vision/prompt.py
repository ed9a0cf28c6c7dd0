"""Image tokens in a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.engine.config import VisionConfig
from kvferry.engine.errors import InvalidTokens
from kvferry.engine.vision.positions import Grid


def expand_image_tokens(token_ids: Sequence[int], grids: Sequence[Grid], vision: VisionConfig) -> list[int]:
    """A rendered prompt holds one image token for each image; the model reads as many as the image has.

    Raises InvalidTokens when there are not as many image tokens as images.
    """
    n_found = sum(token_id == vision.image_token_id for token_id in token_ids)
    if n_found != len(grids):
        raise InvalidTokens(f"the prompt has places for {n_found} images, and {len(grids)} are given")
    remaining = iter(grids)
    return [token for token_id in token_ids for token in _expanded(token_id, remaining, vision)]


def _expanded(token_id: int, grids: Iterator[Grid], vision: VisionConfig) -> list[int]:
    if token_id != vision.image_token_id:
        return [token_id]
    return [token_id] * next(grids).n_tokens(vision.merge_size)
