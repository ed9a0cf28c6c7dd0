"""Score a text: logits and K/V rows of every token, to hold the engine against another implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig, VisionConfig
from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.errors import ContextExceeded, InvalidTokens, UnsupportedArchitecture
from kvferry.engine.files.open_model import open_model
from kvferry.engine.kv_cache import KvGeometry, KvKind, KvSequence
from kvferry.engine.packing import Quant
from kvferry.engine.reference import Images, ReferenceModel
from kvferry.engine.vision.positions import grids_of, image_positions
from kvferry.engine.vision.preprocess import prepare_image
from kvferry.engine.vision.prompt import expand_image_tokens
from kvferry.engine.vision.sight import SeenPrompt
from kvferry.engine.vision.tower import Features
from kvferry.engine.weights import WeightsMode

_F32 = NDArray[np.float32]

DEFAULT_CHUNK: Final = 512
# A node keeps room for many sequences; a score needs one, and one block for the engine's own first token.
_SPARE_BLOCKS: Final = 1


@dataclass(frozen=True)
class ScoredImages:
    """``embeds`` float32 [image tokens, hidden]; ``deepstack`` float32 [features, image tokens, hidden];
    ``position_ids`` int32 [3, n]: time, row and column of every token."""

    embeds: _F32
    deepstack: _F32
    position_ids: NDArray[np.int32]


@dataclass(frozen=True)
class Score:
    """``logits`` float32 [n, vocab]; ``k`` and ``v`` float32 [n_layers, n, kv_dim], as attention uses them;
    ``greedy_ids`` int32: the tokens that follow when the largest logit is taken each time, ends not heeded."""

    logits: _F32
    k: _F32
    v: _F32
    greedy_ids: NDArray[np.int32]
    images: ScoredImages | None = None


def score(
    path: Path,
    token_ids: NDArray[np.int32],
    images: Images | None = None,
    *,
    chunk: int,
    n_threads: int,
    n_greedy: int,
    quant: Quant = "q8",
    kv: KvKind = KvKind.F32,
    weights: WeightsMode = "auto",
) -> Score:
    """Run the engine over the text, ``chunk`` tokens at a time. Raises as ``check_request`` and Engine do."""
    check_request(open_model(path).config, token_ids, images, n_greedy=n_greedy)
    engine = Engine.load(path, _options(path, len(token_ids) + n_greedy, n_threads, quant, kv, weights))
    try:
        features, seen = _look(engine, token_ids, images)
        sequence = engine.new_sequence()
        logits = np.concatenate(
            [
                engine.forward([_chunk(sequence, token_ids[start : start + chunk], seen, "all")])[0]
                for start in range(0, len(token_ids), chunk)
            ]
        )
        k, v = _rows(engine.geometry, sequence)
        greedy = _greedy(engine, sequence, logits[-1], n_greedy, seen)
        scored = None
        if features is not None and seen is not None:
            scored = ScoredImages(
                features.embeds, features.deepstack.transpose(1, 0, 2), seen.sight(0, len(token_ids)).positions
            )
        return Score(logits, k, v, greedy, scored)
    finally:
        engine.close()


def score_reference(path: Path, token_ids: NDArray[np.int32], images: Images | None = None, *, n_greedy: int) -> Score:
    """The same by the slow float path."""
    check_request(open_model(path).config, token_ids, images, n_greedy=n_greedy)
    model = ReferenceModel.load(path)
    output = model.forward(token_ids, images, n_greedy=n_greedy)
    scored = None
    if output.image is not None:
        scored = ScoredImages(output.image.embeds, output.image.deepstack, output.position_ids)
    return Score(output.logits, output.k, output.v, output.greedy_ids, scored)


def check_request(
    config: ModelConfig, token_ids: NDArray[np.int32], images: Images | None = None, *, n_greedy: int
) -> int:
    """Refuse what the model cannot compute, from its shape alone, before weights are read; the bytes of the results.

    Raises InvalidTokens, ContextExceeded, UnsupportedArchitecture.
    """
    n, vision = len(token_ids), config.vision
    if images is not None and vision is None:
        raise UnsupportedArchitecture(f"this {config.architecture} model takes no images")
    if n == 0:
        raise InvalidTokens("a text is at least one token")
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= config.vocab_size))
    if len(outside):
        raise InvalidTokens(
            f"token ids lie in 0 .. {config.vocab_size - 1}; token {outside[0]} is {token_ids[outside[0]]}"
        )
    if n + n_greedy > config.context_length:
        continued = f" and {n_greedy} to continue with" if n_greedy else ""
        raise ContextExceeded(f"{n} tokens{continued} are more than the context of {config.context_length} holds")
    n_floats = n * (config.vocab_size + 2 * config.n_layers * config.kv_dim) + n_greedy
    if images is not None and vision is not None:
        n_floats += 3 * n + _check_images(config, vision, token_ids, images)
    return n_floats * np.dtype(np.float32).itemsize


def _check_images(config: ModelConfig, vision: VisionConfig, token_ids: NDArray[np.int32], images: Images) -> int:
    """Refuse images that the tower cannot take or that do not stand in the text; the floats of their features."""
    grids = grids_of(images.grid_thw, vision)
    expected = (sum(grid.n_patches for grid in grids), vision.patch_elements)
    if images.pixel_values.shape != expected:
        raise InvalidTokens(
            f"pixel_values has shape {list(images.pixel_values.shape)}, and the grids ask for {list(expected)}"
        )
    image_positions(token_ids, grids, vision)
    n_image_tokens = sum(grid.n_tokens(vision.merge_size) for grid in grids)
    return n_image_tokens * config.hidden_size * (1 + len(vision.deepstack_layers))


def with_images(
    path: Path, token_ids: NDArray[np.int32], image_files: Sequence[bytes]
) -> tuple[NDArray[np.int32], Images]:
    """Images out of PNG, JPEG or WebP files, and the tokens with as many image tokens as they have.

    Raises InvalidImage, UnsupportedArchitecture, InvalidTokens.
    """
    config = open_model(path).config
    if config.vision is None:
        raise UnsupportedArchitecture(f"this {config.architecture} model takes no images")
    prepared = [prepare_image(data, config.vision) for data in image_files]
    grids = [image.grid for image in prepared]
    n_image_tokens = sum(grid.n_tokens(config.vision.merge_size) for grid in grids)
    if np.count_nonzero(token_ids == config.vision.image_token_id) != n_image_tokens:
        token_ids = np.array(expand_image_tokens(token_ids.tolist(), grids, config.vision), np.int32)
    pixels = np.concatenate([image.pixel_values for image in prepared])
    return token_ids, Images(pixels, np.array([(grid.frames, grid.rows, grid.cols) for grid in grids], np.int32))


def _look(
    engine: Engine, token_ids: NDArray[np.int32], images: Images | None
) -> tuple[Features | None, SeenPrompt | None]:
    if images is None:
        return None, None
    vision = engine.config.vision
    if vision is None:
        raise UnsupportedArchitecture(f"this {engine.config.architecture} model takes no images")
    grids = grids_of(images.grid_thw, vision)
    features = engine.tower.see(images.pixel_values, grids)
    return features, SeenPrompt.of_prompt(token_ids, grids, features, vision)


def _chunk(
    sequence: KvSequence, token_ids: NDArray[np.int32], seen: SeenPrompt | None, logits: Literal["last", "all"]
) -> Chunk:
    start = sequence.n_rows
    sight = seen.sight(start, start + len(token_ids)) if seen is not None else None
    return Chunk(sequence, token_ids, logits, sight)


def _options(
    path: Path, n_tokens: int, n_threads: int, quant: Quant, kv: KvKind, weights: WeightsMode
) -> EngineOptions:
    config = open_model(path).config
    geometry = KvGeometry(config.n_layers, config.n_kv_heads, config.head_dim, kind=kv)
    n_blocks = -(-n_tokens // geometry.block_size) + _SPARE_BLOCKS
    # No longer context than the text needs: a model's own may be a quarter of a million positions of rope angles.
    n_context = min(config.context_length, max(n_tokens, 1))
    return EngineOptions(
        n_threads=n_threads,
        kv_bytes=n_blocks * geometry.block_bytes,
        context_length=n_context,
        quant=quant,
        kv=kv,
        weights=weights,
    )


def _rows(geometry: KvGeometry, sequence: KvSequence) -> tuple[_F32, _F32]:
    k = np.empty((geometry.n_layers, sequence.n_rows, geometry.kv_dim), np.float32)
    v = np.empty_like(k)
    for layer in range(geometry.n_layers):
        sequence.read_rows(layer, 0, sequence.n_rows, k[layer], v[layer])
    return k, v


def _greedy(
    engine: Engine, sequence: KvSequence, logits: _F32, n_tokens: int, seen: SeenPrompt | None
) -> NDArray[np.int32]:
    ids: list[int] = []
    for i in range(n_tokens):
        ids.append(int(np.argmax(logits)))  # the lowest id among equals
        if i + 1 < n_tokens:
            logits = engine.forward([_chunk(sequence, np.array(ids[-1:], np.int32), seen, "last")])[0][0]
    return np.array(ids, np.int32)
