"""From a model on disk to weights in memory as the kernels read them, and the records that point at them.

q4_0, q4_1 and q8_0 are packed as they are; every other kind (f32, bf16, f16, q5, K-quants) is read as floats and
quantised to the engine's own q8 or q4 on the way, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig, MoeConfig
from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.pages import drop_pages
from kvferry.engine.files.tensors import Tensor
from kvferry.engine.kernels import records
from kvferry.engine.kernels.layout import CACHE_LINE, QUANT_BLOCK, WEIGHTS_Q4, WEIGHTS_Q8, weight_block_bytes
from kvferry.engine.kernels.linear import GROUP_ROWS, UNIT_ROWS
from kvferry.engine.kernels.packing import pack_q4_0, pack_q4_1, pack_q8_0
from kvferry.engine.quantise import pack_floats
from kvferry.engine.rope import rope_table

_U8 = NDArray[np.uint8]

Quant = Literal["q8", "q4"]

# How weights and activations are held; part of the fingerprint, since it decides what rows are computed.
NATIVE_RECIPE: Final = "weights as stored, q4_0/q4_1/q8_0; activations int8 in blocks of 32, scale absmax/127"
_QUANTISED_RECIPE: Final = NATIVE_RECIPE + "; other weights to {quant}, recipe 1"

_KINDS: Final = {"q4_0": WEIGHTS_Q4, "q4_1": WEIGHTS_Q4, "q8_0": WEIGHTS_Q8}
_LINEAR_LAYERS: Final = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_o"}
_GATED: Final = ("gate", "up", "down")
# What `--quant q4` makes q4. The rest stays q8: embedding and head, k and v (small, and every later token reads what
# they wrote), and a dense layer's down, whose inputs have the widest range.
_Q4_PARTS: Final = (".attn_q", ".attn_o", ".ffn_gate", ".ffn_up", ".gate", ".up", ".down")
_CHUNK_ELEMENTS: Final = 1 << 20  # floats that are held at a time while a tensor is quantised


def aligned_empty(n_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory that starts on a cache line."""
    raw = np.empty(n_bytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + n_bytes]


def whole_blocks(n: int) -> int:
    """``n`` rounded up to whole blocks of 32: what is added is zero."""
    return -(-n // QUANT_BLOCK) * QUANT_BLOCK


@dataclass(frozen=True)
class PackedModel:
    """Weights in the kernels' layout. ``model`` and ``layers`` hold addresses into ``arrays``.

    ``rope``: float32 [context_length, 2, head_dim / 2]. ``recipe``: what was done to the weights, for the fingerprint.
    """

    config: ModelConfig
    model: NDArray[Any]  # records.MODEL [1]
    layers: NDArray[Any]  # records.LAYER [n_layers]
    rope: NDArray[np.float32]
    recipe: str
    arrays: tuple[NDArray[Any], ...]

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def pack_model(file: ModelFile, context_length: int, quant: Quant = "q8") -> PackedModel:
    """Pack all tensors of a model; rope angles are made for ``context_length`` positions.

    ``quant``: what weights become that the kernels cannot take as they are stored. Raises UnsupportedArchitecture for a
    size that the kernels do not have, ModelInvalid for weights that no block can hold.
    """
    return _Packer(file, context_length, quant).pack()


class _Packer:
    def __init__(self, file: ModelFile, context_length: int, quant: Quant) -> None:
        self.file = file
        self.config = file.config
        self.context_length = context_length
        self.quant: Quant = quant
        self.arrays: list[NDArray[Any]] = []
        self.recipe = NATIVE_RECIPE

    def pack(self) -> PackedModel:
        config = self.config
        self._check_sizes()
        model = np.zeros(1, records.MODEL)
        for name in ("n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "rms_eps"):
            model[name] = getattr(config, name)
        model["ffn_size"] = whole_blocks(config.ffn_size)
        model["query_scale"] = np.float32(1.0) / np.sqrt(np.float32(config.head_dim))
        if config.moe is not None:
            model["n_experts"], model["n_active"] = config.moe.n_experts, config.moe.n_active
            model["expert_size"] = whole_blocks(config.moe.ffn_size)
            model["normalise"] = int(config.moe.normalise)
        model["output_norm_at"] = self._vector("output_norm")
        model["embedding_at"], model["embedding_kind"] = self._matrices(["embedding"])
        if config.tied_embeddings:
            model["head_at"], model["head_kind"] = model["embedding_at"], model["embedding_kind"]
        else:
            model["head_at"], model["head_kind"] = self._matrices(["head"])
        layers = np.zeros(config.n_layers, records.LAYER)
        for index in range(config.n_layers):
            self._pack_layer(layers[index : index + 1], index)
        rope = rope_table(self.context_length, config.head_dim, config.rope_theta)
        return PackedModel(config, model, layers, rope, self.recipe, tuple(self.arrays))

    def _check_sizes(self) -> None:
        config = self.config
        if config.head_dim % QUANT_BLOCK or config.hidden_size % QUANT_BLOCK:
            raise UnsupportedArchitecture(
                f"{self.file.path}: head_dim {config.head_dim} and hidden size {config.hidden_size} must be multiples "
                f"of {QUANT_BLOCK}"
            )

    def _pack_layer(self, layer: NDArray[Any], index: int) -> None:
        config, prefix = self.config, f"layers.{index}."
        layer["attention_norm_at"] = self._vector(f"{prefix}attn_norm")
        layer["ffn_norm_at"] = self._vector(f"{prefix}ffn_norm")
        if config.qkv_bias:
            for part in ("q", "k", "v"):
                layer[f"{part}_bias_at"] = self._vector(f"{prefix}attn_{part}_bias")
        if config.qk_norm:
            for part in ("q", "k"):
                layer[f"{part}_norm_at"] = self._vector(f"{prefix}attn_{part}_norm")
        names = {field: [prefix + name] for field, name in _LINEAR_LAYERS.items()}
        moe = config.moe
        if moe is not None and config.is_sparse(index):
            layer["router_at"] = self._keep(self.file.tensors[f"{prefix}router"].read())
            names |= {part: _expert_names(prefix, part, moe) for part in _GATED}
        else:
            names |= {part: [f"{prefix}ffn_{part}"] for part in _GATED}
        for field, tensors in names.items():
            layer[f"{field}_at"], layer[f"{field}_kind"] = self._matrices(tensors)

    def _vector(self, name: str) -> int:
        return self._keep(self.file.tensors[name].read()[0])

    def _matrices(self, names: list[str]) -> tuple[int, int]:
        """Pack tensors of one shape and kind one after the other; returns the first one's address and the kind."""
        tensors = [self.file.tensors[name] for name in names]
        as_stored = {_native_kind(tensor) for tensor in tensors}
        native = as_stored.pop() if len(as_stored) == 1 else None
        kind = self._own_kind(names[0]) if native is None else native
        packed = _empty_groups(len(tensors), tensors[0].shape, kind)
        for name, tensor, target in zip(names, tensors, packed, strict=True):
            try:
                pack_tensor(tensor, target, kind, as_stored=native is not None)
            except ModelInvalid as error:
                raise ModelInvalid(f"{self.file.path}: tensor {name!r}: {error}") from error
            drop_pages(tensor)
        return self._keep(packed), kind

    def _own_kind(self, name: str) -> int:
        self.recipe = _QUANTISED_RECIPE.format(quant=self.quant)
        return WEIGHTS_Q4 if self.quant == "q4" and name.endswith(_Q4_PARTS) else WEIGHTS_Q8

    def _keep(self, array: NDArray[Any]) -> int:
        self.arrays.append(array)
        return array.ctypes.data


def _empty_groups(n_tensors: int, shape: tuple[int, int], kind: int) -> _U8:
    """Room for packed tensors [n_tensors, n_groups, n_blocks, block bytes]; rows that only fill a unit are zero."""
    n_rows, n_cols = shape
    n_groups = -(-n_rows // UNIT_ROWS) * UNIT_ROWS // GROUP_ROWS
    packed_shape = (n_tensors, n_groups, whole_blocks(n_cols) // QUANT_BLOCK, weight_block_bytes(kind, GROUP_ROWS))
    packed = aligned_empty(int(np.prod(packed_shape))).reshape(packed_shape)
    packed[:, n_rows // GROUP_ROWS :] = 0
    return packed


def pack_as_q8(tensor: Tensor) -> _U8:
    """A tensor on its own as q8, [n_groups, n_blocks, block bytes]."""
    packed: _U8 = _empty_groups(1, tensor.shape, WEIGHTS_Q8)[0]
    pack_tensor(tensor, packed, WEIGHTS_Q8, as_stored=_native_kind(tensor) == WEIGHTS_Q8)
    return packed


def _expert_names(prefix: str, part: str, moe: MoeConfig) -> list[str]:
    return [f"{prefix}experts.{expert}.{part}" for expert in range(moe.n_experts)]


def _native_kind(tensor: Tensor) -> int | None:
    """The kind that a tensor can be packed as without a change of its values."""
    return _KINDS.get(tensor.kind) if tensor.stored(0, 1) is not None else None


def pack_tensor(tensor: Tensor, packed: _U8, kind: int, *, as_stored: bool) -> None:
    """Fill ``packed`` [n_groups, n_blocks, block bytes] with a tensor's rows, as they are stored or quantised.

    What is beyond the tensor's rows is left as it is. Raises ModelInvalid for values that a block cannot hold.
    """
    for start, stop in _pieces(tensor.shape):
        target = packed[start // GROUP_ROWS : -(-stop // GROUP_ROWS)]
        if not as_stored:
            padded = np.zeros((stop - start, packed.shape[1] * QUANT_BLOCK), np.float32)
            padded[:, : tensor.shape[1]] = tensor.read(start, stop)
            pack_floats(padded, target, kind)
            continue
        stored = tensor.stored(start, stop)
        if stored is None:
            raise ValueError("the tensor is not stored as rows")
        source, rows = _readonly(stored), np.arange(stop - start, dtype=np.int64)
        if tensor.kind == "q4_1":
            pack_q4_1(source, rows, target)
        elif tensor.kind == "q8_0":
            pack_q8_0(source, rows, target)
        else:
            pack_q4_0(source, _minima_of_q4_0(source), rows, target)


def _pieces(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) to be packed at a time: whole units, not many elements."""
    n_rows, n_cols = shape
    step = max(1, _CHUNK_ELEMENTS // (n_cols * UNIT_ROWS)) * UNIT_ROWS
    for start in range(0, n_rows, step):
        yield start, min(start + step, n_rows)


def _readonly(array: _U8) -> _U8:
    """The kernels are compiled for one kind of source: contiguous and not to be written to."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _minima_of_q4_0(blocks: _U8) -> _U8:
    """-8 * d of every block as float16 bytes [rows, 2 * n_blocks]: d * (q - 8) is d * q + m with that m, exactly."""
    d = np.ascontiguousarray(blocks.reshape(len(blocks), -1, 18)[:, :, :2]).view(np.float16)
    minima = d.astype(np.float32) * np.float32(-8.0)
    with np.errstate(over="ignore"):
        halves = minima.astype(np.float16)
    if not np.all(np.isfinite(halves)):
        raise ModelInvalid("it has q4_0 scales above 8188, more than the kernels can hold")
    return halves.reshape(len(blocks), -1).view(np.uint8)
