"""A checkpoint folder: config.json and the weights in one or several safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig, MoeConfig
from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.checkpoint_config import read_checkpoint_config
from kvferry.engine.files.fields import JSON_BYTES_MAX, read_json
from kvferry.engine.files.gguf_header import HeaderDamaged
from kvferry.engine.files.model_file import ModelFile, file_state, map_file
from kvferry.engine.files.safetensors_header import read_safetensors_header
from kvferry.engine.files.tensor_names import checkpoint_name, fused_experts_names, model_shapes, vision_shapes
from kvferry.engine.files.tensors import Columns, StoredRows, Tensor

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
_SHARDS_MAX: Final = 1 << 12
_KINDS: Final = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

# In some folders and of no use: rope's frequencies, which follow from the config.
_IGNORED_SUFFIXES: Final = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a safetensors file holds it. ``data``: its bytes, a map of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def kind(self) -> str:
        """The engine's name of the type. Raises UnsupportedArchitecture for what no weight is read from."""
        if self.dtype not in _KINDS:
            raise UnsupportedArchitecture(
                f"{self.path}: tensor {self.name!r} is stored as {self.dtype}; supported are {', '.join(_KINDS)}"
            )
        return _KINDS[self.dtype]

    def as_rows(self, shape: tuple[int, int]) -> StoredRows:
        """The tensor as [rows, cols]: its first dimension, and all others together; a vector is one row.

        Raises ModelInvalid when its shape is another.
        """
        own = (1, *self.shape) if len(self.shape) == 1 else (self.shape[0], prod(self.shape[1:])) if self.shape else ()
        if own != shape:
            asked = list(shape[1:] if len(self.shape) == 1 else shape)
            raise ModelInvalid(
                f"{self.path}: tensor {self.name!r} has shape {list(self.shape)}, and config.json asks for {asked}"
            )
        return StoredRows(shape, self.kind, self.data.reshape(shape[0], -1))


def open_checkpoint(folder: Path) -> ModelFile:
    """Open a folder; see ``open_model`` for what is checked and raised."""
    if not (folder / "config.json").is_file():
        raise ModelInvalid(
            f"{folder} is a folder without a config.json, so it is not a model; name a GGUF file or a model folder"
        )
    config = read_checkpoint_config(folder)
    paths = weight_files(folder)
    opened_as = tuple(map(file_state, paths))
    stored = read_stored(folder, paths)
    shapes = model_shapes(config)
    if config.vision is not None:
        shapes |= vision_shapes(config.vision, config.hidden_size)
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    experts = dict(_fused_experts(config, stored, used))
    for name, shape in shapes.items():
        if name in experts:
            tensors[name] = experts[name]
            continue
        theirs = checkpoint_name(name, config)
        if theirs not in stored:
            raise ModelInvalid(f"{folder}: tensor {theirs!r} is missing, and config.json asks for it")
        tensors[name] = stored[theirs].as_rows(shape)
        used.add(theirs)
    _refuse_unknown(folder, config, stored, used)
    return ModelFile(folder, config, tensors, tuple(paths), opened_as)


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, in the order of their names. Raises ModelInvalid when one is missing."""
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    if not (folder / INDEX_NAME).is_file():
        raise ModelInvalid(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}, so its weights are missing")
    names = sorted(set(_weight_map(folder).values()))
    if len(names) > _SHARDS_MAX:
        raise ModelInvalid(f"{folder / INDEX_NAME} names {len(names)} files, more than the limit of {_SHARDS_MAX}")
    for name in names:
        if not (folder / name).is_file():
            raise ModelInvalid(f"{folder}: {name} is missing, and {INDEX_NAME} names it; fetch the model again")
    return [folder / name for name in names]


def read_stored(folder: Path, paths: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of the files by name, each where the index says. Raises ModelInvalid."""
    weight_map = _weight_map(folder) if paths != [folder / SINGLE_NAME] else None
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        data = map_file(path)
        try:
            entries = read_safetensors_header(memoryview(data.data))
        except HeaderDamaged as error:
            raise ModelInvalid(f"{path} {error}") from error
        for entry in entries:
            if weight_map is not None and weight_map.get(entry.name) != path.name:
                raise ModelInvalid(f"{path} holds tensor {entry.name!r}, and {INDEX_NAME} says otherwise")
            body = data[entry.start : entry.stop]
            stored[entry.name] = StoredTensor(path, entry.name, entry.dtype, entry.shape, body)
    for name in weight_map or ():
        if name not in stored:
            raise ModelInvalid(f"{folder}: tensor {name!r} is missing from {(weight_map or {})[name]}")
    return stored


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor to file name; only names of files right in the folder."""
    path = folder / INDEX_NAME
    weight_map = read_json(path, JSON_BYTES_MAX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelInvalid(f"{path}: 'weight_map' is missing or empty")
    for name in set(map(str, weight_map.values())):
        if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
            raise ModelInvalid(f"{path}: {name[:200]!r} is not the name of a safetensors file in the folder")
    return {str(tensor): str(name) for tensor, name in weight_map.items()}


def _fused_experts(
    config: ModelConfig, stored: dict[str, StoredTensor], used: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """The experts of layers whose checkpoint holds them fused: gate and up in one tensor, all experts in one."""
    moe = config.moe
    if moe is None:
        return
    for i in range(config.n_layers):
        names = fused_experts_names(i, config)
        if config.is_sparse(i) and all(name in stored for name in names):
            used.update(names)
            gate_up, down = stored[names[0]], stored[names[1]]
            make = _transposed if _is_transposed(gate_up, down, config, moe) else _straight
            yield from make(f"layers.{i}.experts", gate_up, down, config.hidden_size, moe)


def _is_transposed(gate_up: StoredTensor, down: StoredTensor, config: ModelConfig, moe: MoeConfig) -> bool:
    """Released files hold [expert, in, out], some re-saved ones [expert, out, in]; the two shapes together tell which.

    One of them alone may be square, never both.
    """
    hidden, ffn, n = config.hidden_size, moe.ffn_size, moe.n_experts
    shapes = (gate_up.shape, down.shape)
    if shapes == ((n, hidden, 2 * ffn), (n, ffn, hidden)):
        return True
    if shapes == ((n, 2 * ffn, hidden), (n, hidden, ffn)):
        return False
    raise ModelInvalid(
        f"{gate_up.path}: tensors {gate_up.name!r} and {down.name!r} have shapes {list(gate_up.shape)} and "
        f"{list(down.shape)}, which is not what config.json asks for: {n} experts, hidden {hidden}, ffn {ffn}"
    )


def _transposed(
    prefix: str, gate_up: StoredTensor, down: StoredTensor, hidden: int, moe: MoeConfig
) -> Iterator[tuple[str, Tensor]]:
    both, back = _elements(gate_up), _elements(down)
    for e in range(moe.n_experts):
        yield f"{prefix}.{e}.gate", Columns((moe.ffn_size, hidden), gate_up.kind, both[e], 0)
        yield f"{prefix}.{e}.up", Columns((moe.ffn_size, hidden), gate_up.kind, both[e], moe.ffn_size)
        yield f"{prefix}.{e}.down", Columns((hidden, moe.ffn_size), down.kind, back[e], 0)


def _straight(
    prefix: str, gate_up: StoredTensor, down: StoredTensor, hidden: int, moe: MoeConfig
) -> Iterator[tuple[str, Tensor]]:
    both = gate_up.data.reshape(moe.n_experts, 2 * moe.ffn_size, -1)
    back = down.data.reshape(moe.n_experts, hidden, -1)
    for e in range(moe.n_experts):
        yield f"{prefix}.{e}.gate", StoredRows((moe.ffn_size, hidden), gate_up.kind, both[e, : moe.ffn_size])
        yield f"{prefix}.{e}.up", StoredRows((moe.ffn_size, hidden), gate_up.kind, both[e, moe.ffn_size :])
        yield f"{prefix}.{e}.down", StoredRows((hidden, moe.ffn_size), down.kind, back[e])


def _elements(tensor: StoredTensor) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """A view of the file by elements. A safetensors range need not be aligned to them; numpy reads it all the same."""
    if tensor.kind == "f32":
        return tensor.data.view(np.uint32).reshape(tensor.shape)
    return tensor.data.view(np.uint16).reshape(tensor.shape)


def _refuse_unknown(folder: Path, config: ModelConfig, stored: dict[str, StoredTensor], used: set[str]) -> None:
    """A weight that nothing reads would make another model of it than the one that was trained."""
    copies = {"lm_head.weight"} if config.tied_embeddings else set()
    for name in stored.keys() - used - copies:
        if not name.endswith(_IGNORED_SUFFIXES):
            raise ModelInvalid(
                f"{folder} holds tensor {name!r}, which a {config.architecture} of the shape in config.json has not"
            )
