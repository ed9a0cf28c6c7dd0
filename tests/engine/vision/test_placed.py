"""Whose rows are whose when pictures, whose tokens all have one id, stand among the tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.vision.placed import Images, PlacedImage, common_prefix
from kvferry.engine.vision.positions import Grid

IMAGE = 7
GRIDS = {n: Grid(1, 2, 2 * n) for n in range(1, 5)}

# Text is drawn from few ids, the image's among them: a model may say it like any other.
TEXT = st.lists(st.sampled_from([1, 2, IMAGE]), max_size=3)
PICTURES = st.tuples(st.integers(1, 3), st.sampled_from([b"a", b"b"]))
PROMPTS = st.lists(st.one_of(TEXT, PICTURES), max_size=6)


def laid_out(parts: list[list[int] | tuple[int, bytes]]) -> tuple[np.ndarray, Images, list[object]]:
    """Ids, images, and what really stands at each place."""
    ids: list[int] = []
    images: list[PlacedImage] = []
    content: list[object] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            content += part
            continue
        n, name = part
        images.append(PlacedImage(len(ids), n, GRIDS[n], name * 32))
        ids += [IMAGE] * n
        content += [(n, name, i) for i in range(n)]
    return np.array(ids, np.int32), tuple(images), content


@settings(deadline=None, max_examples=1000)
@given(one=PROMPTS, other=PROMPTS, cuts=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_as_many_rows_are_shared_as_places_have_the_same_content(
    one: list[list[int] | tuple[int, bytes]], other: list[list[int] | tuple[int, bytes]], cuts: tuple[int, int]
) -> None:
    """Also when only some of a sequence's rows exist, up to the middle of an image."""
    (ids_a, images_a, content_a), (ids_b, images_b, content_b) = laid_out(one), laid_out(other)
    pairs = zip(content_a[: cuts[0]], content_b[: cuts[1]], strict=False)
    n_same = 0
    for left, right in pairs:
        if left != right:
            break
        n_same += 1
    assert common_prefix(ids_a[: cuts[0]], ids_b[: cuts[1]], images_a, images_b) == n_same


def test_two_pictures_of_one_size_share_what_stands_before_them() -> None:
    ids = np.array([1, 2, IMAGE, IMAGE, 3], np.int32)
    cat, dog = (PlacedImage(2, 2, GRIDS[2], name * 32) for name in (b"c", b"d"))
    assert common_prefix(ids, ids, (cat,), (dog,)) == 2
    assert common_prefix(ids, ids, (cat,), (cat,)) == 5
    assert common_prefix(ids, ids, (cat,), ()) == 2
