"""Images are seen once, beside the engine, and what is wrong with one concerns nobody else."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvferry.engine.config import ImageConfig, VisionConfig
from kvferry.engine.errors import InvalidImage
from kvferry.engine.vision.placed import PlacedImage
from kvferry.engine.vision.positions import Grid
from kvferry.engine.vision.preprocess import content_hash, pack_pixels
from kvferry.engine.vision.tower import Features
from kvferry.node.errors import EngineFailed
from kvferry.node.messages import LookDone, LookRequest
from kvferry.node.vision_thread import FeatureCache, VisionThread

VISION = VisionConfig(
    n_layers=1, hidden_size=32, n_heads=4, ffn_size=32, patch_size=16, temporal_patch_size=2, merge_size=2,
    grid_side=4, deepstack_layers=(), image_token_id=7, video_token_id=8, vision_start_token_id=9,
    vision_end_token_id=10, image=ImageConfig(min_pixels=1024, max_pixels=65536),
)  # fmt: skip
HIDDEN = 8


class SlowTower:
    """Sees the mean of an image, and works only while `may_go` is set."""

    vision = VISION

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.may_go.set()
        self.n_seen = 0
        self.bug: Exception | None = None

    def see(self, pixel_values: np.ndarray, grids: list[Grid]) -> Features:
        self.may_go.wait(10)
        self.n_seen += 1
        if self.bug is not None:
            raise self.bug
        n = sum(grid.n_tokens(VISION.merge_size) for grid in grids)
        return Features(np.full((n, HIDDEN), pixel_values.mean(), np.float32), np.empty((n, 0, HIDDEN), np.float32))


def image_of(shade: int) -> tuple[PlacedImage, bytes]:
    pixels = np.full((32, 64, 3), shade, np.uint8)
    return PlacedImage(3, 2, Grid(1, 2, 4), content_hash(pixels)), pack_pixels(pixels)


def request(*shades: int) -> LookRequest:
    images = [image_of(shade) for shade in shades]
    return LookRequest(tuple(i for i, _ in images), {i.content_hash: data for i, data in images})


@pytest.fixture
def tower() -> SlowTower:
    return SlowTower()


@pytest.fixture
def look(tower: SlowTower) -> Iterator[Callable[[LookRequest], LookDone]]:
    """Have a request answered by a thread with room for three images of two tokens."""
    done: queue.Queue[LookDone] = queue.Queue()
    thread = VisionThread(tower, 3 * 2 * HIDDEN * 4, done.put)
    thread.start()

    def ask(wanted: LookRequest) -> LookDone:
        thread.submit(wanted)
        answer = done.get(timeout=10)
        assert answer.request is wanted
        return answer

    yield ask
    tower.may_go.set()
    assert thread.close(10)


def test_an_image_that_was_seen_is_not_looked_at_again(tower: SlowTower, look) -> None:
    first = look(request(10, 20))
    again = look(request(20, 30))
    assert tower.n_seen == 3
    name = image_of(20)[0].content_hash
    assert first.features[name] is again.features[name]


def test_who_may_not_know_that_an_image_was_seen_waits_as_long_as_the_first_one(tower: SlowTower, look) -> None:
    seen = [look(dataclasses.replace(request(10), namespace=tenant)) for tenant in ("a", "b", "a")]
    assert tower.n_seen == 2
    assert all(done.error is None for done in seen)


def test_the_least_recently_used_image_is_forgotten_first(tower: SlowTower, look) -> None:
    for shades in ((1, 2, 3), (1,), (4,)):  # three have room: 2 goes
        look(request(*shades))
    assert tower.n_seen == 4
    look(request(1, 3, 4))
    assert tower.n_seen == 4
    look(request(2))
    assert tower.n_seen == 5


def test_what_is_larger_than_the_cache_is_seen_and_not_kept() -> None:
    cache = FeatureCache(100)
    small = Features(np.zeros((2, 8), np.float32), np.zeros((2, 0, 8), np.float32))
    large = Features(np.zeros((4, 8), np.float32), np.zeros((4, 0, 8), np.float32))
    cache.put(("", b"small"), small)
    cache.put(("", b"large"), large)
    assert (cache.get(("", b"small")), cache.get(("", b"large")), cache.n_bytes) == (small, None, 64)


def test_a_wrong_image_or_a_bug_costs_its_own_turn_only(tower: SlowTower, look) -> None:
    wrong = request(1)
    wrong.pixels = {wrong.images[0].content_hash: image_of(2)[1]}
    assert isinstance(look(wrong).error, InvalidImage)
    tower.bug = RuntimeError("a bug")
    assert isinstance(look(request(1)).error, EngineFailed)
    tower.bug = None
    assert look(request(1)).error is None


def test_nobody_looks_for_a_turn_that_is_gone(tower: SlowTower, look) -> None:
    abandoned = request(1, 2)
    abandoned.abandoned = True
    look(abandoned)
    assert tower.n_seen == 0


def test_what_the_tower_worked_on_is_told_and_what_it_remembered_is_not(
    look: Callable[[LookRequest], LookDone],
) -> None:
    first = look(request(10, 20))
    assert first.n_tokens == 4
    assert first.seconds > 0
    again = look(request(20, 30))
    assert again.n_tokens == 2
    assert (look(request(30)).n_tokens, look(request(30)).seconds) == (0, 0.0)
