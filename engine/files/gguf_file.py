"""A GGUF model file: its metadata, its tensors as maps of the file, and the model's shape."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import SUPPORTED_ARCHITECTURES, ModelConfig
from kvferry.engine.errors import ModelInvalid, ModelNotFound, UnsupportedArchitecture
from kvferry.engine.files.gguf_header import HeaderDamaged, TensorEntry, read_header

_T = TypeVar("_T", int, float, str, bool)

_SUPPORTED_SENTENCE = f"this version runs GGUF files of architecture {', '.join(SUPPORTED_ARCHITECTURES)}"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. ``shape`` is (rows, cols) = (out_features, in_features); a vector has one row.

    ``kind`` is the block format's lower-case name ('f32', 'q4_1', 'q8_0', ...). ``data`` is uint8 [rows, bytes of a
    row], a read-only map of the file: a row is whole blocks, in the file's own byte layout.
    """

    name: str
    shape: tuple[int, int]
    kind: str
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """An opened file. Nothing but the header has been read; the tensors' pages are read when they are touched."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return self._require("general.architecture", str)

    @cached_property
    def config(self) -> ModelConfig:
        """The model's shape.

        Raises UnsupportedArchitecture for an architecture or a rope scaling that is not supported, ModelInvalid for
        metadata that is missing, of a wrong type, or in contradiction to the tensors.
        """
        arch = self.architecture
        if arch not in SUPPORTED_ARCHITECTURES:
            raise UnsupportedArchitecture(f"{self.path}: architecture {arch!r} is not supported; {_SUPPORTED_SENTENCE}")
        self._refuse_scaled_rope(arch)
        hidden = self._require(f"{arch}.embedding_length", int)
        n_heads = self._require(f"{arch}.attention.head_count", int)
        head_dim = self._optional(f"{arch}.attention.key_length", int, hidden // max(n_heads, 1))
        try:
            config = ModelConfig(
                architecture=arch,
                n_layers=self._require(f"{arch}.block_count", int),
                hidden_size=hidden,
                n_heads=n_heads,
                n_kv_heads=self._optional(f"{arch}.attention.head_count_kv", int, n_heads),
                head_dim=head_dim,
                ffn_size=self._require(f"{arch}.feed_forward_length", int),
                vocab_size=self._vocab_size(),
                context_length=self._require(f"{arch}.context_length", int),
                rope_theta=self._optional(f"{arch}.rope.freq_base", float, 10_000.0),
                rms_eps=self._require(f"{arch}.attention.layer_norm_rms_epsilon", float),
                tied_embeddings="output.weight" not in self.tensors,
                rope_adjacent_pairs=True,
                end_token_ids=self.end_token_ids,
            )
        except ModelInvalid as error:
            raise ModelInvalid(f"{self.path}: {error}") from error
        self._check_head_dim(arch, config)
        return config

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, the file's end-of-sequence token first."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = [self._require(key, int) for key in keys if key in self.metadata]
        return tuple(dict.fromkeys(found))

    def _vocab_size(self) -> int:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelInvalid("there is no tensor 'token_embd.weight', so it holds no model weights")
        return embedding.shape[0]

    def _refuse_scaled_rope(self, arch: str) -> None:
        scaling = self._optional(f"{arch}.rope.scaling.type", str, "none")
        if scaling != "none" or "rope_freqs.weight" in self.tensors:
            kind = scaling if scaling != "none" else "llama3"
            raise UnsupportedArchitecture(
                f"{self.path}: rope scaling {kind!r} is not supported; {_SUPPORTED_SENTENCE}, unscaled rope"
            )

    def _check_head_dim(self, arch: str, config: ModelConfig) -> None:
        rope_dims = self._optional(f"{arch}.rope.dimension_count", int, config.head_dim)
        value_dims = self._optional(f"{arch}.attention.value_length", int, config.head_dim)
        if rope_dims != config.head_dim or value_dims != config.head_dim:
            raise UnsupportedArchitecture(
                f"{self.path}: heads of {config.head_dim} with rope over {rope_dims} and values of {value_dims} "
                f"elements are not supported; {_SUPPORTED_SENTENCE}, all three equal"
            )

    def _optional(self, key: str, kind: type[_T], default: _T) -> _T:
        return self._require(key, kind) if key in self.metadata else default

    def _require(self, key: str, kind: type[_T]) -> _T:
        if key not in self.metadata:
            raise ModelInvalid(f"{self.path}: metadata {key!r} is missing")
        value = self.metadata[key]
        if type(value) is not kind:
            shown = type(value).__name__
            raise ModelInvalid(f"{self.path}: metadata {key!r} is of type {shown}, expected {kind.__name__}")
        return value


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a GGUF file and check its header against its size.

    Raises ModelNotFound when nothing is there, ModelInvalid when it is not a whole GGUF file, UnsupportedArchitecture
    for a folder checkpoint.
    """
    path = Path(path)
    if path.is_dir():
        _refuse_folder(path)
    try:
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            raise ModelInvalid(f"{path} is empty, so it is not a GGUF file")
        data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} does not exist; see `kvferry models list` for what is fetched") from error
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{path} cannot be read: {error}") from error
    try:
        header = read_header(memoryview(data.data))
    except HeaderDamaged as error:
        raise ModelInvalid(f"{path} {error}") from error
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedArchitecture(
            f"{path} is one part of a model split over several files; join them with gguf-split first"
        )
    return GgufFile(path, header.version, header.metadata, {e.name: _tensor(e, data) for e in header.tensors})


def _tensor(entry: TensorEntry, data: NDArray[np.uint8]) -> GgufTensor:
    cols = entry.dims[0]
    rows = 1
    for dim in entry.dims[1:]:
        rows *= dim
    body = data[entry.offset : entry.offset + entry.n_bytes].reshape(rows, entry.n_bytes // rows)
    return GgufTensor(entry.name, (rows, cols), entry.kind, body)


def _refuse_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelInvalid(
            f"{path} is a folder without a config.json, so it is not a model; name a GGUF file or a model folder"
        )
    raise UnsupportedArchitecture(
        f"{path} is a folder checkpoint (safetensors), which is not supported yet; {_SUPPORTED_SENTENCE}"
    )
