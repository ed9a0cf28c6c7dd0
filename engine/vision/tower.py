"""The vision tower of Qwen3-VL in the engine's kernels: q8 weights, int8 activations, floats in between.

An image's features depend on the image alone: neither on other images nor on the number of threads
(docs/numerics.md, "The vision tower").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import VisionConfig
from kvferry.engine.errors import InvalidTokens, UnsupportedArchitecture
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.kernels import vision as kernels
from kvferry.engine.kernels.layout import KV_BLOCK, QUANT_BLOCK, WEIGHTS_Q8, activation_row_bytes
from kvferry.engine.kernels.linear import UNIT_ROWS, kernels_of
from kvferry.engine.memory import aligned_empty
from kvferry.engine.packing import pack_as_q8
from kvferry.engine.rope import rope_table
from kvferry.engine.vision.positions import Grid, patch_places, position_weights
from kvferry.engine.weight_plan import whole_blocks

_F32 = NDArray[np.float32]
_BY_TANH: Final = 0
_BY_ERF: Final = 1


@dataclass(frozen=True, slots=True)
class Features:
    """What images become: ``embeds`` float32 [tokens, hidden] and ``deepstack`` float32 [tokens, features, hidden]."""

    embeds: _F32
    deepstack: _F32


@dataclass(frozen=True, slots=True)
class _Linear:
    packed: NDArray[np.uint8]
    bias: _F32  # [n_units * 32]
    n_units: int
    n_blocks: int


class VisionTower:
    """Not thread-safe; starts ``n_threads`` threads while it works."""

    def __init__(self, file: ModelFile, n_threads: int) -> None:
        vision = file.config.vision
        if vision is None:
            raise UnsupportedArchitecture(f"{file.path}: this {file.config.architecture} model takes no images")
        if vision.hidden_size % QUANT_BLOCK:
            raise UnsupportedArchitecture(
                f"{file.path}: the vision tower's hidden size {vision.hidden_size} must be a multiple of {QUANT_BLOCK}"
            )
        self.vision: Final[VisionConfig] = vision
        self.hidden_size: Final = file.config.hidden_size
        self.n_threads: Final = n_threads
        self.linear: Final[dict[str, _Linear]] = {}
        self.vectors: Final[dict[str, _F32]] = {}
        for name, tensor in file.tensors.items():
            if not name.startswith("vision."):
                continue
            if name == "vision.positions" or name.endswith("_bias") or tensor.shape[0] == 1:
                self.vectors[name] = np.ascontiguousarray(tensor.read())
                continue
            bias = np.zeros(whole_blocks(tensor.shape[0]), np.float32)
            bias[: tensor.shape[0]] = file.tensors[f"{name}_bias"].read()[0]
            n_blocks = whole_blocks(tensor.shape[1]) // QUANT_BLOCK
            self.linear[name] = _Linear(pack_as_q8(tensor), bias, len(bias) // UNIT_ROWS, n_blocks)

    def see(self, pixel_values: _F32, grids: Sequence[Grid]) -> Features:
        """Features of images whose patches [patches, elements] follow each other. Raises InvalidTokens."""
        expected = (sum(grid.n_patches for grid in grids), self.vision.patch_elements)
        if pixel_values.shape != expected:
            raise InvalidTokens(
                f"pixel_values has shape {list(pixel_values.shape)}, and the grids ask for {list(expected)}"
            )
        seen, start = [], 0
        with ThreadPoolExecutor(self.n_threads) as pool:
            for grid in grids:
                patches = np.ascontiguousarray(pixel_values[start : start + grid.n_patches], np.float32)
                seen.append(_Image(self, pool, patches, grid).features())
                start += grid.n_patches
        empty = Features(
            np.empty((0, self.hidden_size), np.float32),
            np.empty((0, len(self.vision.deepstack_layers), self.hidden_size), np.float32),
        )
        return Features(
            np.concatenate([one.embeds for one in [empty, *seen]]),
            np.concatenate([one.deepstack for one in [empty, *seen]]),
        )


class _Image:
    """One image on its way through the tower."""

    def __init__(self, tower: VisionTower, pool: ThreadPoolExecutor, patches: _F32, grid: Grid) -> None:
        self.tower, self.pool, self.patches, self.grid = tower, pool, patches, grid
        self.vision = tower.vision
        self.rope = self._rope()

    def features(self) -> Features:
        vision = self.vision
        x = self.linear(self.patches, "vision.patch")
        x = x + self._positions()
        deepstack: dict[int, _F32] = {}
        for i in range(vision.n_layers):
            block = f"vision.blocks.{i}."
            x = x + self.linear(self._attention(self.norm(x, f"{block}norm1"), block), f"{block}out")
            inner = self.linear(self.norm(x, f"{block}norm2"), f"{block}fc1")
            x = x + self.linear(self.gelu(inner, _BY_TANH), f"{block}fc2")
            if i in vision.deepstack_layers:
                prefix = f"vision.deepstack.{vision.deepstack_layers.index(i)}."
                deepstack[i] = self._mlp(self.norm(self._merged(x), f"{prefix}norm"), prefix)
        embeds = self._mlp(self._merged(self.norm(x, "vision.merger.norm")), "vision.merger.")
        features = [deepstack[i] for i in vision.deepstack_layers]
        stacked = np.stack(features, axis=1) if features else np.empty((len(embeds), 0, embeds.shape[1]), np.float32)
        return Features(embeds, stacked)

    def linear(self, x: _F32, name: str) -> _F32:
        """x [n, cols] (less than whole blocks are filled with zeros) to [n, outputs as whole units]."""
        layer = self.tower.linear[name]
        n, size = len(x), layer.n_blocks * QUANT_BLOCK
        if x.shape[1] < size:
            x = np.concatenate([x, np.zeros((n, size - x.shape[1]), np.float32)], axis=1)
        x = np.ascontiguousarray(x[:, :size])
        stride = activation_row_bytes(size)
        rows = aligned_empty(n * stride)
        kernels.quantise_rows(_at(x), n, layer.n_blocks, _at(rows))
        y = np.empty((n, layer.n_units * UNIT_ROWS), np.float32)

        def share(first: int, stop: int) -> None:
            kernels.linear_units(
                kernels_of(WEIGHTS_Q8), _at(layer.packed), layer.n_blocks, first, stop - first,
                _at(rows), stride, n, _at(y), y.strides[0], _at(layer.bias), 0,
            )  # fmt: skip

        self._spread(layer.n_units, share)
        return y

    def norm(self, x: _F32, name: str) -> _F32:
        weight, bias = self.tower.vectors[name], self.tower.vectors[f"{name}_bias"]
        out = np.empty_like(x)
        epsilon = np.float32(self.vision.norm_eps)
        kernels.layer_norm_rows(_at(x), len(x), x.shape[1] // QUANT_BLOCK, _at(weight), _at(bias), epsilon, _at(out))
        return out

    def gelu(self, x: _F32, which: int) -> _F32:
        """In place."""
        kernels.gelu_rows(_at(x), len(x), x.shape[1] // QUANT_BLOCK, which)
        return x

    def _mlp(self, x: _F32, prefix: str) -> _F32:
        y = self.linear(self.gelu(self.linear(x, f"{prefix}fc1"), _BY_ERF), f"{prefix}fc2")
        return np.ascontiguousarray(y[:, : self.tower.hidden_size])

    def _merged(self, x: _F32) -> _F32:
        """The patches of one token beside each other."""
        return np.ascontiguousarray(x).reshape(-1, x.shape[1] * self.vision.merge_size**2)

    def _positions(self) -> _F32:
        table = self.tower.vectors["vision.positions"]
        indices, shares = position_weights(self.grid, self.vision)
        total: _F32 = table[indices[0]] * shares[0][:, None]
        for corner in range(1, 4):
            total = total + table[indices[corner]] * shares[corner][:, None]
        return total

    def _rope(self) -> tuple[_F32, _F32]:
        """Cosines and sines [patches, 1, head_dim / 2]: half of the frequencies by the row, half by the column."""
        table = rope_table(max(self.grid.rows, self.grid.cols), self.vision.head_dim // 2, self.vision.rope_theta)
        row, col = patch_places(self.grid, self.vision.merge_size)
        both = np.concatenate([table[row], table[col]], axis=2)
        return both[:, 0][:, None], both[:, 1][:, None]

    def _turned(self, x: _F32) -> _F32:
        cos, sin = self.rope
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _attention(self, x: _F32, block: str) -> _F32:
        """[patches, hidden]: every head on its own, every patch sees the whole image."""
        vision = self.vision
        n, heads, size = len(x), vision.n_heads, vision.head_dim
        qkv = self.linear(x, f"{block}qkv")[:, : 3 * vision.hidden_size].reshape(n, 3, heads, size)
        scale = np.float32(1) / np.sqrt(np.float32(size))
        padded, n_tiles = whole_blocks(size), -(-n // KV_BLOCK)
        q = np.zeros((heads, n, padded), np.float32)
        q[:, :, :size] = (self._turned(qkv[:, 0]) * scale).transpose(1, 0, 2)
        k = np.zeros((heads, n_tiles * KV_BLOCK, padded), np.float32)
        k[:, :n, :size] = self._turned(qkv[:, 1]).transpose(1, 0, 2)
        k = np.ascontiguousarray(k.reshape(heads, n_tiles, KV_BLOCK, padded).transpose(0, 1, 3, 2))
        v = np.zeros((heads, n_tiles * KV_BLOCK, padded), np.float32)
        v[:, :n, :size] = qkv[:, 2].transpose(1, 0, 2)
        out = np.empty_like(q)

        def share(first: int, stop: int) -> None:
            scratch = np.empty(kernels.TILE_FLOATS, np.float32)
            for h in range(first, stop):
                kernels.attend_head(_at(q[h]), _at(k[h]), _at(v[h]), n, padded, _at(out[h]), _at(scratch))

        self._spread(heads, share)
        return np.ascontiguousarray(out[:, :, :size].transpose(1, 0, 2)).reshape(n, -1)

    def _spread(self, n_items: int, work: Callable[[int, int], None]) -> None:
        """Share out [0, n_items) among the threads."""
        n_shares = min(self.tower.n_threads, n_items)
        borders = [n_items * i // n_shares for i in range(n_shares + 1)]
        list(self.pool.map(work, borders[:-1], borders[1:]))


def _at(array: NDArray[Any]) -> int:
    return array.ctypes.data
