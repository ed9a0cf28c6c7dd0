"""From a GGUF file to weights in memory as the kernels read them, and the records that point at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.gguf_file import GgufFile, GgufTensor
from kvferry.engine.kernels import records
from kvferry.engine.kernels.layout import CACHE_LINE, QUANT_BLOCK, WEIGHTS_Q4, WEIGHTS_Q8, weight_block_bytes
from kvferry.engine.kernels.linear import GROUP_ROWS, UNIT_ROWS
from kvferry.engine.kernels.packing import pack_q4_0, pack_q4_1, pack_q8_0
from kvferry.engine.rope import rope_table

_KINDS: Final = {"q4_0": WEIGHTS_Q4, "q4_1": WEIGHTS_Q4, "q8_0": WEIGHTS_Q8}
_LINEAR_LAYERS: Final = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def aligned_empty(n_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory that starts on a cache line."""
    raw = np.empty(n_bytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + n_bytes]


@dataclass(frozen=True)
class PackedModel:
    """Weights in the kernels' layout. ``model`` and ``layers`` hold addresses into ``arrays``."""

    config: ModelConfig
    model: NDArray[Any]  # records.MODEL [1]
    layers: NDArray[Any]  # records.LAYER [n_layers]
    arrays: tuple[NDArray[Any], ...]

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def pack_model(file: GgufFile, context_length: int) -> PackedModel:
    """Pack all tensors of a llama GGUF file; rope angles are made for ``context_length`` positions.

    Raises ModelInvalid for a missing tensor or one of the wrong shape, UnsupportedArchitecture for a block format or a
    size that the kernels do not have.
    """
    return _Packer(file, context_length).pack()


class _Packer:
    def __init__(self, file: GgufFile, context_length: int) -> None:
        self.file = file
        self.config = file.config
        self.context_length = context_length
        self.arrays: list[NDArray[Any]] = []

    def pack(self) -> PackedModel:
        config = self.config
        self._check_sizes()
        model = np.zeros(1, records.MODEL)
        for name in (
            "n_layers",
            "hidden_size",
            "ffn_size",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "vocab_size",
            "rms_eps",
        ):
            model[name] = getattr(config, name)
        model["query_scale"] = np.float32(1.0) / np.sqrt(np.float32(config.head_dim))
        model["rope_at"] = self._keep(rope_table(self.context_length, config.head_dim, config.rope_theta))
        model["output_norm_at"] = self._vector("output_norm.weight")
        embedding = ("token_embd.weight", config.vocab_size, config.hidden_size)
        model["embedding_at"], model["embedding_kind"] = self._matrix(*embedding)
        if config.tied_embeddings:
            model["head_at"], model["head_kind"] = model["embedding_at"], model["embedding_kind"]
        else:
            model["head_at"], model["head_kind"] = self._matrix("output.weight", *embedding[1:])
        layers = np.zeros(config.n_layers, records.LAYER)
        for index in range(config.n_layers):
            self._pack_layer(layers[index : index + 1], f"blk.{index}.")
        return PackedModel(config, model, layers, tuple(self.arrays))

    def _check_sizes(self) -> None:
        config = self.config
        if config.head_dim % QUANT_BLOCK or config.hidden_size % QUANT_BLOCK or config.ffn_size % QUANT_BLOCK:
            raise UnsupportedArchitecture(
                f"{self.file.path}: head_dim {config.head_dim}, hidden size {config.hidden_size} and ffn size "
                f"{config.ffn_size} must be multiples of {QUANT_BLOCK}"
            )

    def _pack_layer(self, layer: NDArray[Any], prefix: str) -> None:
        config = self.config
        query_size = config.n_heads * config.head_dim
        shapes = {
            "q": (query_size, config.hidden_size),
            "k": (config.kv_dim, config.hidden_size),
            "v": (config.kv_dim, config.hidden_size),
            "o": (config.hidden_size, query_size),
            "gate": (config.ffn_size, config.hidden_size),
            "up": (config.ffn_size, config.hidden_size),
            "down": (config.hidden_size, config.ffn_size),
        }
        layer["attention_norm_at"] = self._vector(f"{prefix}attn_norm.weight")
        layer["ffn_norm_at"] = self._vector(f"{prefix}ffn_norm.weight")
        for field, (n_rows, n_cols) in shapes.items():
            paired = field in {"q", "k"} and config.rope_adjacent_pairs
            at, kind = self._matrix(f"{prefix}{_LINEAR_LAYERS[field]}.weight", n_rows, n_cols, paired=paired)
            layer[f"{field}_at"], layer[f"{field}_kind"] = at, kind

    def _tensor(self, name: str, n_rows: int, n_cols: int) -> GgufTensor:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise ModelInvalid(f"{self.file.path}: tensor {name!r} is missing")
        if tensor.shape != (n_rows, n_cols):
            raise ModelInvalid(f"{self.file.path}: tensor {name!r} is {tensor.shape}, expected {(n_rows, n_cols)}")
        return tensor

    def _vector(self, name: str) -> int:
        tensor = self._tensor(name, 1, self.config.hidden_size)
        if tensor.kind != "f32":
            raise UnsupportedArchitecture(f"{self.file.path}: tensor {name!r} is {tensor.kind}; f32 is supported")
        return self._keep(np.frombuffer(tensor.data.tobytes(), np.float32).copy())

    def _matrix(self, name: str, n_rows: int, n_cols: int, *, paired: bool = False) -> tuple[int, int]:
        """Pack one tensor; returns its address and kind. ``paired``: rows of a head are (2i, 2i + 1) rope pairs."""
        tensor = self._tensor(name, n_rows, n_cols)
        kind = _KINDS.get(tensor.kind)
        if kind is None:
            raise UnsupportedArchitecture(
                f"{self.file.path}: tensor {name!r} is stored as {tensor.kind}; {', '.join(_KINDS)} are supported"
            )
        rows = np.arange(n_rows, dtype=np.int64)
        if paired:
            rows = half_split_rows(n_rows, self.config.head_dim)
        n_groups = -(-n_rows // UNIT_ROWS) * UNIT_ROWS // GROUP_ROWS
        shape = (n_groups, n_cols // QUANT_BLOCK, weight_block_bytes(kind, GROUP_ROWS))
        packed = aligned_empty(int(np.prod(shape))).reshape(shape)
        if n_groups * GROUP_ROWS > n_rows:
            packed[n_rows // GROUP_ROWS :] = 0
        pack_tensor(tensor, rows, packed)
        return self._keep(packed), kind

    def _keep(self, array: NDArray[Any]) -> int:
        self.arrays.append(array)
        return array.ctypes.data


def half_split_rows(n_rows: int, head_dim: int) -> NDArray[np.int64]:
    """Source row of each row, from heads of rope pairs (2i, 2i + 1) to heads of pairs (i, i + head_dim / 2)."""
    in_head = np.arange(head_dim).reshape(head_dim // 2, 2).T.reshape(-1)
    heads = np.arange(0, n_rows, head_dim)
    return (heads[:, None] + in_head[None, :]).reshape(-1)


def pack_tensor(tensor: GgufTensor, rows: NDArray[np.int64], packed: NDArray[np.uint8]) -> None:
    """Fill ``packed`` [n_groups, n_blocks, block bytes] from a q4_0, q4_1 or q8_0 tensor; row r is its ``rows[r]``."""
    source = np.asarray(tensor.data)
    if tensor.kind == "q4_1":
        pack_q4_1(source, rows, packed)
    elif tensor.kind == "q8_0":
        pack_q8_0(source, rows, packed)
    else:
        pack_q4_0(source, _minima_of_q4_0(tensor), rows, packed)


def _minima_of_q4_0(tensor: GgufTensor) -> NDArray[np.uint8]:
    """-8 * d of every block as float16 bytes [rows, 2 * n_blocks]: d * (q - 8) is d * q + m with that m, exactly."""
    d = np.ascontiguousarray(tensor.data.reshape(tensor.shape[0], -1, 18)[:, :, :2]).view(np.float16)
    minima = d.astype(np.float32) * np.float32(-8.0)
    if not np.all(np.isfinite(minima.astype(np.float16))):
        raise UnsupportedArchitecture(
            f"tensor {tensor.name!r} has q4_0 scales above 8188, more than the kernels can hold"
        )
    return minima.astype(np.float16).reshape(tensor.shape[0], -1).view(np.uint8)
