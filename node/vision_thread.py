"""The thread that looks at images: the vision tower works beside the engine, so running turns go on meanwhile.

What an image looks like depends on its pixels alone, so it is worked out once: features are kept by content hash, the
least recently used go first.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import VisionConfig
from kvferry.engine.errors import EngineError, InvalidImage
from kvferry.engine.vision.placed import PlacedImage
from kvferry.engine.vision.positions import Grid
from kvferry.engine.vision.preprocess import prepare_pixels, unpack_pixels
from kvferry.engine.vision.tower import Features
from kvferry.node.errors import EngineFailed
from kvferry.node.messages import LookDone, LookRequest

log = logging.getLogger(__name__)


FeatureKey = tuple[str, bytes]
"""Who may know that the image was seen before, and its content hash."""


class Tower(Protocol):
    """A vision tower; see ``engine.vision.tower``."""

    @property
    def vision(self) -> VisionConfig:
        """Its shape."""

    def see(self, pixel_values: NDArray[np.float32], grids: list[Grid]) -> Features:
        """Features of images."""


class FeatureCache:
    """Features by namespace and content hash, at most ``max_bytes`` of them. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_key: OrderedDict[FeatureKey, Features] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: FeatureKey) -> Features | None:
        """The features, used just now."""
        found = self._by_key.get(key)
        if found is not None:
            self._by_key.move_to_end(key)
        return found

    def put(self, key: FeatureKey, features: Features) -> None:
        """Keep them; what is larger than the whole cache is not kept."""
        if n_bytes(features) > self._max_bytes:
            return
        self._by_key[key] = features
        self.n_bytes += n_bytes(features)
        while self.n_bytes > self._max_bytes:
            _, oldest = self._by_key.popitem(last=False)
            self.n_bytes -= n_bytes(oldest)


def n_bytes(features: Features) -> int:
    """Memory of an image's features."""
    return features.embeds.nbytes + features.deepstack.nbytes


class VisionThread:
    """``submit`` may be called from any thread; ``deliver`` is called on this one, once for every request."""

    def __init__(self, tower: Tower, cache_bytes: int, deliver: Callable[[LookDone], None]) -> None:
        self.n_seen = 0  # images that the tower worked on
        self._tower = tower
        self._cache = FeatureCache(cache_bytes)
        self._deliver = deliver
        # A turn brings one request, and turns are bounded.
        self._requests: queue.SimpleQueue[LookRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvferry-vision", daemon=True)

    @property
    def merge_size(self) -> int:
        """Of the model's vision tower."""
        return self._tower.vision.merge_size

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, request: LookRequest) -> None:
        """Queue a request."""
        self._requests.put(request)

    def close(self, timeout: float) -> bool:
        """End after the requests before; False when that took longer than `timeout` seconds."""
        self._requests.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            self._deliver(self._look(request))

    def _look(self, request: LookRequest) -> LookDone:
        features: dict[bytes, Features] = {}
        n_tokens, seconds = 0, 0.0
        try:
            for image in request.images:
                if request.abandoned:
                    break
                n_before, began = self.n_seen, time.monotonic()
                features[image.content_hash] = self._features(image, request)
                if self.n_seen > n_before:
                    n_tokens += image.end - image.start
                    seconds += time.monotonic() - began
        except EngineError as error:
            return LookDone(request=request, error=error)
        except Exception:  # a bug must cost this turn, not all that come after it
            log.exception("an image was not seen for an unforeseen reason")
            return LookDone(request=request, error=EngineFailed("the vision tower of this node failed"))
        return LookDone(request=request, features=features, n_tokens=n_tokens, seconds=seconds)

    def _features(self, image: PlacedImage, request: LookRequest) -> Features:
        """Raises InvalidImage."""
        key, pixels = (request.namespace, image.content_hash), request.pixels
        found = self._cache.get(key)
        if found is None:
            if image.content_hash not in pixels:
                raise InvalidImage("an image of the turn came without its pixels")
            vision = self._tower.vision
            plain = unpack_pixels(pixels[image.content_hash], image.grid, image.content_hash, vision)
            found = self._tower.see(prepare_pixels(plain, vision).pixel_values, [image.grid])
            self.n_seen += 1
            self._cache.put(key, found)
        return found
