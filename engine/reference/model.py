"""A whole model in plain numpy: tokens and images in, rows and logits out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.errors import InvalidTokens, UnsupportedArchitecture
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.open_model import open_model
from kvferry.engine.reference.dense import attend, gated, project, rope_angles
from kvferry.engine.reference.layers import F32, rms_norm
from kvferry.engine.reference.moe import Routing, mixture
from kvferry.engine.reference.vision import ImageFeatures, run_tower
from kvferry.engine.reference.weights import WEIGHTS_BYTES_MAX, Weights
from kvferry.engine.vision.positions import grids_of, image_positions


@dataclass(frozen=True, slots=True)
class Images:
    """Images as the tower takes them: ``pixel_values`` [patches, elements] and ``grid_thw`` int [images, 3]."""

    pixel_values: F32
    grid_thw: NDArray[np.integer]


@dataclass
class SequenceState:
    """One sequence's rows: ``k`` and ``v`` [layers, n, kv_heads, head_dim]; ``rope_delta`` of the images in it."""

    k: F32
    v: F32
    rope_delta: int = 0

    @property
    def n_rows(self) -> int:
        return int(self.k.shape[1])


@dataclass(frozen=True, slots=True)
class Step:
    """What a step made of its n tokens. ``hidden`` [layers + 2, n, hidden]: each layer's input, the last one's output
    (before a deepstack feature is added), and that after the last norm. ``routings``: by layer, of sparse ones."""

    logits: F32
    hidden: F32
    routings: dict[int, Routing] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """What a prompt became. ``logits`` [n, vocab]; ``k`` and ``v`` [layers, n, kv_dim]; ``greedy_ids`` int32
    [n_greedy]; ``position_ids`` int32 [3, n]; the rest as in ``Step``; ``image`` None without images."""

    logits: F32
    k: F32
    v: F32
    greedy_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    rope_delta: int
    hidden: F32
    routings: dict[int, Routing]
    image: ImageFeatures | None


class ReferenceModel:
    """Not fast, and not for several threads at once."""

    def __init__(self, file: ModelFile, weights_bytes_max: int = WEIGHTS_BYTES_MAX) -> None:
        self.config: ModelConfig = file.config
        self._weights = Weights(file, n_bytes_max=weights_bytes_max)

    @classmethod
    def load(cls, path: Path) -> ReferenceModel:
        """Open a model; see ``open_model`` for what is raised."""
        return cls(open_model(path))

    def new_state(self) -> SequenceState:
        config = self.config
        empty = np.empty((config.n_layers, 0, config.n_kv_heads, config.head_dim), np.float32)
        return SequenceState(empty, empty)

    def forward(
        self, token_ids: NDArray[np.integer], images: Images | None = None, *, n_greedy: int = 0
    ) -> ReferenceOutput:
        """Run a prompt and then ``n_greedy`` steps of the likeliest token, ends of answers ignored."""
        state = self.new_state()
        features = self.see(images) if images is not None else None
        positions, state.rope_delta = self.positions(token_ids, images)
        prompt = self.step(token_ids, state, positions, features)
        scored_k, scored_v = (rows.reshape(self.config.n_layers, len(token_ids), -1) for rows in (state.k, state.v))
        logits, greedy = prompt.logits[-1], []
        for _ in range(n_greedy):
            greedy.append(int(np.argmax(logits)))
            if len(greedy) < n_greedy:
                logits = self.step(np.array(greedy[-1:], np.int32), state).logits[-1]
        return ReferenceOutput(
            prompt.logits,
            scored_k,
            scored_v,
            np.array(greedy, np.int32),
            positions,
            state.rope_delta,
            prompt.hidden,
            prompt.routings,
            features,
        )

    def see(self, images: Images) -> ImageFeatures:
        """Run the vision tower. Raises UnsupportedArchitecture when there is none, InvalidTokens for odd patches."""
        vision = self.config.vision
        if vision is None:
            raise UnsupportedArchitecture(f"this {self.config.architecture} model takes no images")
        grids = grids_of(images.grid_thw, vision)
        expected = (sum(grid.n_patches for grid in grids), vision.patch_elements)
        if images.pixel_values.shape != expected:
            raise InvalidTokens(
                f"pixel_values has shape {list(images.pixel_values.shape)}, and the grids ask for {list(expected)}"
            )
        return run_tower(images.pixel_values.astype(np.float32), grids, self._weights.part("vision."), vision)

    def positions(self, token_ids: NDArray[np.integer], images: Images | None) -> tuple[NDArray[np.int32], int]:
        """Positions int32 [3, n] of a whole prompt, and its rope delta. Raises InvalidTokens."""
        vision = self.config.vision
        if vision is None:
            row = np.arange(len(token_ids), dtype=np.int32)
            return np.stack([row, row, row]), 0
        return image_positions(token_ids, grids_of(images.grid_thw, vision) if images is not None else [], vision)

    def step(
        self,
        token_ids: NDArray[np.integer],
        state: SequenceState,
        positions: NDArray[np.int32] | None = None,
        features: ImageFeatures | None = None,
    ) -> Step:
        """Append tokens to a sequence. ``positions``: [3, n], by default those after what is there.

        ``features``: of the images whose tokens are among these, all of them. Raises InvalidTokens.
        """
        config, weights = self.config, self._weights
        if len(token_ids) == 0 or np.min(token_ids) < 0 or np.max(token_ids) >= config.vocab_size:
            raise InvalidTokens(f"there must be tokens, all of them in the vocabulary of {config.vocab_size}")
        if positions is None:
            start = state.n_rows + state.rope_delta
            positions = np.tile(np.arange(start, start + len(token_ids), dtype=np.int32), (3, 1))
        x = weights.matrix("embedding")[token_ids]
        image_rows = np.zeros(0, np.int64)
        if features is not None and config.vision is not None:
            image_rows = np.flatnonzero(np.asarray(token_ids) == config.vision.image_token_id)
            x[image_rows] = features.embeds
        angles = rope_angles(positions.astype(np.float32), config)
        hidden, routings, new_rows = [x], {}, []
        for i in range(config.n_layers):
            x, k, v, routing = self._layer(i, x, angles, state)
            new_rows.append((k, v))
            hidden.append(x)
            if routing is not None:
                routings[i] = routing
            if features is not None and i < len(features.deepstack):
                x = x.copy()
                x[image_rows] += features.deepstack[i]
                if i + 1 < config.n_layers:
                    hidden[-1] = x
        state.k = np.concatenate([state.k, np.stack([k for k, _ in new_rows])], axis=1)
        state.v = np.concatenate([state.v, np.stack([v for _, v in new_rows])], axis=1)
        normed = rms_norm(x, weights.vector("output_norm"), config.rms_eps)
        head = weights.matrix("embedding" if config.tied_embeddings else "head")
        return Step(normed @ head.T, np.stack([*hidden, normed]), routings)

    def _layer(self, i: int, x: F32, angles: F32, state: SequenceState) -> tuple[F32, F32, F32, Routing | None]:
        """One layer: its output, its new K and V rows, and what its router decided."""
        config, weights = self.config, self._weights.part(f"layers.{i}.")
        q, k, v = project(rms_norm(x, weights.vector("attn_norm"), config.rms_eps), weights, config, angles)
        all_k, all_v = np.concatenate([state.k[i], k]), np.concatenate([state.v[i], v])
        x = x + weights.linear(attend(q, all_k, all_v), "attn_o")
        normed = rms_norm(x, weights.vector("ffn_norm"), config.rms_eps)
        if config.moe is not None and config.is_sparse(i):
            y, routing = mixture(normed, weights, config.moe)
            return x + y, k, v, routing
        return x + gated(normed, weights), k, v, None
