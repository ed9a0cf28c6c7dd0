"""Where image tokens stand, and how the tower's own positions are laid out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.config import ImageConfig, VisionConfig
from kvferry.engine.errors import InvalidTokens
from kvferry.engine.vision.positions import Grid, grids_of, image_positions, patch_places, position_weights
from kvferry.engine.vision.prompt import expand_image_tokens

VISION = VisionConfig(
    n_layers=2,
    hidden_size=64,
    n_heads=4,
    ffn_size=64,
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    grid_side=6,
    deepstack_layers=(0,),
    image_token_id=7,
    video_token_id=8,
    vision_start_token_id=9,
    vision_end_token_id=10,
    image=ImageConfig(min_pixels=1024, max_pixels=65536),
)


def test_a_worked_example() -> None:
    """Two tokens of text, an image of 2 x 3 tokens, one of text, an image of 1 x 1, one of text."""
    ids = np.array([1, 9, 7, 7, 7, 7, 7, 7, 10, 7, 2])
    positions, delta = image_positions(ids, [Grid(1, 4, 6), Grid(1, 2, 2)], VISION)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]
    assert delta == 7 + 1 - len(ids)


GRIDS = st.lists(st.tuples(st.just(1), st.integers(1, 4).map(lambda n: 2 * n), st.integers(1, 4).map(lambda n: 2 * n)))


@settings(deadline=None)
@given(grids=GRIDS, texts=st.data())
def test_text_goes_on_behind_the_longer_side_of_an_image(
    grids: list[tuple[int, int, int]], texts: st.DataObject
) -> None:
    shapes = [Grid(*grid) for grid in grids]
    ids: list[int] = []
    for _ in shapes:
        ids += [1] * texts.draw(st.integers(1, 5)) + [7]
    ids += [1] * texts.draw(st.integers(0, 5))
    expanded = np.array(expand_image_tokens(ids, shapes, VISION), np.int32)
    positions, delta = image_positions(expanded, shapes, VISION)
    is_text = expanded != 7
    assert (positions[:, is_text] == positions[0, is_text]).all(), "a text token has one position in all three"
    assert (np.diff(positions.max(axis=0)[is_text]) >= 1).all(), "and never falls back"
    n_places = sum(is_text) + sum(max(g.rows, g.cols) // 2 for g in shapes)
    assert delta == n_places - len(expanded)
    assert positions.shape == (3, len(expanded))


@pytest.mark.parametrize(
    ("ids", "grids", "reason"),
    [
        ([1, 7, 2], [], "belong to no image"),
        ([1, 2], [Grid(1, 2, 2)], "does not stand in the prompt"),
        ([7, 1, 7, 7, 7], [Grid(1, 4, 4)], "does not stand in the prompt"),
        ([7, 7], [Grid(1, 2, 2)], "belong to no image"),
    ],
)
def test_image_tokens_must_be_those_of_the_images(ids: list[int], grids: list[Grid], reason: str) -> None:
    with pytest.raises(InvalidTokens, match=reason):
        image_positions(np.array(ids), grids, VISION)


@pytest.mark.parametrize("grid", [[2, 2, 2], [1, 3, 2], [1, 2, 0], [1, 2]])
def test_a_grid_that_the_tower_cannot_take_is_refused(grid: list[int]) -> None:
    with pytest.raises(InvalidTokens):
        grids_of(np.array([grid]), VISION)


def test_a_prompt_with_another_number_of_places_than_images_is_refused() -> None:
    with pytest.raises(InvalidTokens, match="places for 1 images, and 2 are given"):
        expand_image_tokens([1, 7], [Grid(1, 2, 2)] * 2, VISION)


def test_the_four_patches_of_a_token_lie_together() -> None:
    row, col = patch_places(Grid(1, 4, 4), 2)
    assert list(zip(row.tolist(), col.tolist(), strict=True))[:8] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3),
    ]  # fmt: skip


def test_corners_of_the_image_take_the_corners_of_the_table() -> None:
    grid = Grid(1, 4, 10)
    indices, weights = position_weights(grid, VISION)
    row, col = patch_places(grid, 2)
    table = np.random.default_rng(0).standard_normal(36)
    values = np.sum(table[indices] * weights, axis=0)
    for y, x, corner in ((0, 0, 0), (0, 9, 5), (3, 0, 30), (3, 9, 35)):
        assert values[(row == y) & (col == x)] == pytest.approx(table[corner], abs=1e-6)
    assert np.allclose(weights.sum(axis=0), 1)
    assert position_weights(Grid(1, 2, 2), dataclasses.replace(VISION, grid_side=1))[0].max() == 0
