"""From a model on disk to weights as the kernels read them, in memory or in a file, and the records that point at them.

What GGUF files hold in blocks is packed without a change of its values (packing_kinds.py); floats (f32, bf16, f16) are
quantised to the engine's own q8 or q4 on the way, some rows at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig, MoeConfig
from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.digest import Progress, no_progress
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.pages import drop_pages
from kvferry.engine.files.tensors import Tensor
from kvferry.engine.kernels.layout import QUANT_BLOCK, WEIGHTS_Q4, WEIGHTS_Q8
from kvferry.engine.kernels.linear import GROUP_ROWS
from kvferry.engine.memory import aligned_empty, huge_empty
from kvferry.engine.packing_kinds import STORED_KINDS, pack_stored, recipe_of
from kvferry.engine.quantise import pack_floats
from kvferry.engine.rope import rope_table
from kvferry.engine.weight_plan import Part, Piece, WeightPlan, laid_out, pieces_of

_U8 = NDArray[np.uint8]

Quant = Literal["q8", "q4"]

_LINEAR_LAYERS: Final = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_o"}
_GATED: Final = ("gate", "up", "down")
# What `--quant q4` makes q4. The rest stays q8: embedding and head, k and v (small, and every later token reads what
# they wrote), and a dense layer's down, whose inputs have the widest range.
_Q4_PARTS: Final = (".attn_q", ".attn_o", ".ffn_gate", ".ffn_up", ".gate", ".up", ".down")
_MAX_PACKERS: Final = 16  # threads; each holds a few pieces' worth of floats


@dataclass(frozen=True)
class PackedModel:
    """Weights in the kernels' layout. ``model`` and ``layers`` hold addresses into ``region``.

    ``rope``: float32 [context_length, 2, head_dim / 2]. ``recipe``: what was done to the weights, for the fingerprint.
    """

    config: ModelConfig
    model: NDArray[Any]  # records.MODEL [1]
    layers: NDArray[Any]  # records.LAYER [n_layers]
    rope: NDArray[np.float32]
    recipe: str
    region: _U8

    @classmethod
    def at(cls, plan: WeightPlan, region: _U8, context_length: int, streamed_beside: int | None = None) -> PackedModel:
        """The model whose weights lie in a region as planned.

        ``streamed_beside``: weights leave memory behind each layer, but for so many bytes of them. None: they stay.
        """
        model, layers = plan.records(region.ctypes.data)
        if streamed_beside is not None:
            plan.let_go_behind_layers(region.ctypes.data, model, layers, streamed_beside)
        c = plan.config
        rope = rope_table(context_length, c.head_dim, c.rope_theta, c.rope_divisors, c.rope_magnitude)
        return cls(plan.config, model, layers, rope, plan.recipe, region)

    @property
    def n_bytes(self) -> int:
        return self.region.nbytes


class Sink(Protocol):
    """Where packed pieces go; used by several threads at once."""

    def room(self, piece: Piece) -> _U8:
        """The memory to pack a piece into, uint8 [n_bytes]."""

    def filled(self, piece: Piece, packed: _U8) -> None:
        """It has been."""


@dataclass(frozen=True, slots=True)
class RegionSink:
    """Straight into memory. ``region``: uint8 [bytes of the plan]."""

    region: _U8

    def room(self, piece: Piece) -> _U8:
        return self.region[piece.offset : piece.offset + piece.n_bytes]

    def filled(self, piece: Piece, packed: _U8) -> None:
        """Nothing is left to do."""


def pack_model(file: ModelFile, context_length: int, quant: Quant = "q8") -> PackedModel:
    """Pack all tensors of a model into memory; rope angles are made for ``context_length`` positions.

    ``quant``: what weights become that the kernels cannot take as they are stored. Raises UnsupportedArchitecture for a
    size that the kernels do not have, ModelInvalid for weights that no block can hold.
    """
    plan = plan_weights(file, quant)
    region = huge_empty(plan.n_bytes)
    pack_pieces(file, plan, RegionSink(region))
    return PackedModel.at(plan, region, context_length)


def plan_weights(file: ModelFile, quant: Quant = "q8") -> WeightPlan:
    """Decide what each weight becomes and where it lies. Raises UnsupportedArchitecture."""
    config = file.config
    if config.head_dim % QUANT_BLOCK or config.hidden_size % QUANT_BLOCK:
        raise UnsupportedArchitecture(
            f"{file.path}: head_dim {config.head_dim} and hidden size {config.hidden_size} must be multiples "
            f"of {QUANT_BLOCK}"
        )
    parts = [_floats(file, "output_norm", "output_norm"), _packed(file, quant, "embedding", ("embedding",))]
    if not config.tied_embeddings:
        parts.append(_packed(file, quant, "head", ("head",)))
    for index in range(config.n_layers):
        parts += _layer_parts(file, quant, index)
    is_native = all(part.as_stored for part in parts)
    kinds = {tensor.kind for tensor in file.tensors.values()}
    return laid_out(config, parts, recipe_of(kinds, None if is_native else quant))


def pack_pieces(file: ModelFile, plan: WeightPlan, sink: Sink, progress: Progress = no_progress) -> None:
    """Pack everything into a sink, on as many threads as there are processors. Raises ModelInvalid."""

    def pack(piece: Piece) -> int:
        packed = sink.room(piece)
        tensor = file.tensors[piece.tensor]
        try:
            pack_piece(tensor, piece, packed)
        except ModelInvalid as error:
            raise ModelInvalid(f"{file.path}: tensor {piece.tensor!r}: {error}") from error
        sink.filled(piece, packed)
        drop_pages(tensor, piece.start, piece.stop)
        return piece.n_bytes

    n_threads = min(len(os.sched_getaffinity(0)), _MAX_PACKERS)
    with ThreadPoolExecutor(n_threads, "kvferry-pack") as pool:
        try:
            n_done = 0
            for n_bytes in pool.map(pack, plan.pieces()):
                n_done += n_bytes
                progress(n_done, plan.n_bytes)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def pack_piece(tensor: Tensor, piece: Piece, packed: _U8) -> None:
    """Fill ``packed`` uint8 [n_bytes] with a piece. Raises ModelInvalid for values that a block cannot hold."""
    kind = piece.part.kind
    if kind is None:
        packed[:] = tensor.read(piece.start, piece.stop).reshape(-1).view(np.uint8)
        return
    target = packed.reshape(-1, *piece.part.tensor_shape[1:])
    target[(piece.stop - piece.start) // GROUP_ROWS :] = 0  # rows that only fill a unit
    pack_rows(tensor, piece.start, piece.stop, target, kind, as_stored=piece.part.as_stored)


def pack_as_q8(tensor: Tensor) -> _U8:
    """A tensor on its own as q8, [n_groups, n_blocks, block bytes]."""
    part = Part("", ("",), tensor.shape, WEIGHTS_Q8, _native_kind(tensor) == WEIGHTS_Q8)
    packed = aligned_empty(part.tensor_bytes)
    for piece in pieces_of(part, "", 0):
        pack_piece(tensor, piece, packed[piece.offset : piece.offset + piece.n_bytes])
    return packed.reshape(part.tensor_shape)


def pack_rows(tensor: Tensor, start: int, stop: int, packed: _U8, kind: int, *, as_stored: bool) -> None:
    """Fill ``packed`` [n_groups, n_blocks, block bytes] with rows of a tensor, as they are stored or quantised.

    What is beyond those rows is left as it is. Raises ModelInvalid for values that a block cannot hold.
    """
    if not as_stored:
        padded = np.zeros((stop - start, packed.shape[1] * QUANT_BLOCK), np.float32)
        padded[:, : tensor.shape[1]] = tensor.read(start, stop)
        pack_floats(padded, packed, kind)
        return
    stored = tensor.stored(start, stop)
    if stored is None:
        raise ValueError("the tensor is not stored as rows")
    pack_stored(tensor.kind, stored, packed)


def _layer_parts(file: ModelFile, quant: Quant, index: int) -> Iterator[Part]:
    config, prefix = file.config, f"layers.{index}."
    vectors = {"attention_norm": "attn_norm", "ffn_norm": "ffn_norm"}
    if config.qkv_bias:
        vectors |= {f"{part}_bias": f"attn_{part}_bias" for part in ("q", "k", "v")}
    if config.qk_norm:
        vectors |= {f"{part}_norm": f"attn_{part}_norm" for part in ("q", "k")}
    is_sparse = config.moe is not None and config.is_sparse(index)
    if is_sparse:
        vectors["router"] = "router"
    for field, name in vectors.items():
        yield _floats(file, prefix + field, prefix + name)
    for field, name in _LINEAR_LAYERS.items():
        yield _packed(file, quant, prefix + field, (prefix + name,))
    for field in _GATED:
        names: tuple[str, ...] = (f"{prefix}ffn_{field}",)
        if is_sparse and config.moe is not None:
            names = _expert_names(prefix, field, config.moe)
        yield _packed(file, quant, prefix + field, names)


def _floats(file: ModelFile, name: str, tensor: str) -> Part:
    return Part(name, (tensor,), file.tensors[tensor].shape, None, as_stored=True)


def _packed(file: ModelFile, quant: Quant, name: str, names: tuple[str, ...]) -> Part:
    """Tensors of one shape that lie one after the other, so they are all made of one kind."""
    kinds = {_native_kind(file.tensors[tensor]) for tensor in names}
    native = kinds.pop() if len(kinds) == 1 else None
    kind = _own_kind(names[0], quant) if native is None else native
    return Part(name, names, file.tensors[names[0]].shape, kind, as_stored=native is not None)


def _own_kind(name: str, quant: Quant) -> int:
    return WEIGHTS_Q4 if quant == "q4" and name.endswith(_Q4_PARTS) else WEIGHTS_Q8


def _expert_names(prefix: str, part: str, moe: MoeConfig) -> tuple[str, ...]:
    return tuple(f"{prefix}experts.{expert}.{part}" for expert in range(moe.n_experts))


def _native_kind(tensor: Tensor) -> int | None:
    """The kind that a tensor can be packed as without a change of its values."""
    return STORED_KINDS.get(tensor.kind) if tensor.stored(0, 1) is not None else None
