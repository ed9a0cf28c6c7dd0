"""Where every packed weight of a model lies, decided from shapes and kinds alone, before a byte of it is read.

All weights are one region: the same plan whether they are packed into memory or into a file, and on every node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.kernels import records
from kvferry.engine.kernels.layout import CACHE_LINE, FLOAT_BYTES, QUANT_BLOCK, weight_block_bytes
from kvferry.engine.kernels.linear import GROUP_ROWS, UNIT_ROWS

PAGE: Final = 4096
# What is packed, written and checked at a time; also bounds the memory that packing takes. Part of the file's format.
PIECE_BYTES: Final = 1 << 20


def whole_blocks(n: int) -> int:
    """``n`` rounded up to whole blocks of 32: what is added is zero."""
    return -(-n // QUANT_BLOCK) * QUANT_BLOCK


@dataclass(frozen=True, slots=True)
class Part:
    """One run of bytes: float32 rows, or packed tensors of one shape and kind, one after the other.

    ``name``: of the record's field, behind ``layers.N.`` for a layer's. ``kind``: of packed weights, None for floats.
    ``as_stored``: packed without a change of any value.
    """

    name: str
    tensors: tuple[str, ...]
    shape: tuple[int, int]
    kind: int | None
    as_stored: bool
    offset: int = 0

    @property
    def tensor_shape(self) -> tuple[int, int, int]:
        """(groups, blocks, bytes of a block) of one packed tensor."""
        n_rows, n_cols = self.shape
        n_groups = -(-n_rows // UNIT_ROWS) * UNIT_ROWS // GROUP_ROWS
        if self.kind is None:
            raise ValueError(f"{self.name} is not packed")
        return n_groups, whole_blocks(n_cols) // QUANT_BLOCK, weight_block_bytes(self.kind, GROUP_ROWS)

    @property
    def tensor_bytes(self) -> int:
        return prod(self.shape) * FLOAT_BYTES if self.kind is None else prod(self.tensor_shape)

    @property
    def n_bytes(self) -> int:
        return self.tensor_bytes * len(self.tensors)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of one tensor, and where they go: ``n_bytes`` from ``offset`` on, zero where rows end."""

    part: Part
    tensor: str
    start: int
    stop: int
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class WeightPlan:
    """``parts`` in the order in which they lie. ``recipe``: what is done to the weights, for the fingerprint."""

    config: ModelConfig
    parts: tuple[Part, ...]
    recipe: str

    @property
    def n_bytes(self) -> int:
        """Of the whole region: whole pages."""
        return _up(self.parts[-1].offset + self.parts[-1].n_bytes, PAGE)

    def pieces(self) -> Iterator[Piece]:
        """All weights, a piece at a time, in order."""
        for part in self.parts:
            for index, tensor in enumerate(part.tensors):
                yield from pieces_of(part, tensor, part.offset + index * part.tensor_bytes)

    def records(self, base_at: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The model's record [1] and those of its layers [n_layers], for a region that lies at ``base_at``."""
        model, layers = _model_record(self.config), np.zeros(self.config.n_layers, records.LAYER)
        for part in self.parts:
            layer, _, field = part.name.rpartition(".")
            record = layers[int(layer.split(".")[1])] if layer else model[0]
            record[f"{field}_at"] = base_at + part.offset
            if part.kind is not None:
                record[f"{field}_kind"] = part.kind
        if self.config.tied_embeddings:
            model["head_at"], model["head_kind"] = model["embedding_at"], model["embedding_kind"]
        return model, layers

    def let_go_behind_layers(
        self, base_at: int, model: NDArray[Any], layers: NDArray[Any], kept_bytes: int = 0
    ) -> None:
        """Enter into the records which pages go behind each layer and behind the logits.

        Up to ``kept_bytes`` of what every step reads from end to end stay: the head, then layers from the first on,
        experts excepted, of which a step reads few.
        """
        start, n_bytes = self._span(self._of("embedding" if self.config.tied_embeddings else "head"))
        if n_bytes <= kept_bytes:
            kept_bytes -= n_bytes
        else:
            model["head_pages_at"], model["head_pages_bytes"] = base_at + start, n_bytes
        for index in range(self.config.n_layers):
            own = self._of(f"layers.{index}.")
            n_always = next((i for i, part in enumerate(own) if len(part.tensors) > 1), len(own))  # experts come last
            _, n_bytes = self._span(own[:n_always])
            if n_bytes <= kept_bytes:
                kept_bytes -= n_bytes
                own = own[n_always:]
            if own:
                start, n_bytes = self._span(own)
                layers[index]["pages_at"], layers[index]["pages_bytes"] = base_at + start, n_bytes

    def _of(self, prefix: str) -> list[Part]:
        """The parts whose names begin so: they lie together and begin on a page."""
        return [part for part in self.parts if part.name.startswith(prefix)]

    @staticmethod
    def _span(own: list[Part]) -> tuple[int, int]:
        """Offset and bytes of parts that lie together."""
        return own[0].offset, own[-1].offset + own[-1].n_bytes - own[0].offset


def laid_out(config: ModelConfig, parts: list[Part], recipe: str) -> WeightPlan:
    """Give the parts their places: packed ones and each layer start on a page of their own, floats on a cache line."""
    placed: list[Part] = []
    end, layer = 0, ""
    for part in parts:
        own_layer = part.name.rpartition(".")[0]
        alignment = CACHE_LINE if part.kind is None and own_layer == layer else PAGE
        placed.append(replace(part, offset=_up(end, alignment)))
        end, layer = placed[-1].offset + part.n_bytes, own_layer
    return WeightPlan(config, tuple(placed), recipe)


def pieces_of(part: Part, tensor: str, offset: int) -> Iterator[Piece]:
    """One tensor of a part in pieces, when it lies at ``offset``."""
    n_rows = part.shape[0]
    if part.kind is None:
        yield Piece(part, tensor, 0, n_rows, offset, part.tensor_bytes)
        return
    n_groups, n_blocks, block_bytes = part.tensor_shape
    unit_bytes = UNIT_ROWS // GROUP_ROWS * n_blocks * block_bytes
    step = max(1, PIECE_BYTES // unit_bytes)
    n_units = n_groups * GROUP_ROWS // UNIT_ROWS
    for first in range(0, n_units, step):
        n = min(step, n_units - first)
        stop = min((first + n) * UNIT_ROWS, n_rows)
        yield Piece(part, tensor, first * UNIT_ROWS, stop, offset + first * unit_bytes, n * unit_bytes)


def _model_record(config: ModelConfig) -> NDArray[Any]:
    model = np.zeros(1, records.MODEL)
    for name in ("n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "rms_eps"):
        model[name] = getattr(config, name)
    model["ffn_size"] = whole_blocks(config.ffn_size)
    model["query_scale"] = np.float32(1.0) / np.sqrt(np.float32(config.head_dim))
    if config.moe is not None:
        model["n_experts"], model["n_active"] = config.moe.n_experts, config.moe.n_active
        model["expert_size"] = whole_blocks(config.moe.ffn_size)
        model["normalise"] = int(config.moe.normalise)
    return model


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
