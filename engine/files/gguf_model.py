"""A GGUF file, with the mmproj file of a model that sees, as the engine sees a model."""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path
from typing import Final

from kvferry.engine.config import ModelConfig, VisionConfig
from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.dequantize import KINDS
from kvferry.engine.files.gguf_config import read_vision_config
from kvferry.engine.files.gguf_file import GgufFile, GgufTensor, open_gguf
from kvferry.engine.files.model_file import ModelFile, file_state
from kvferry.engine.files.tensor_names import gguf_name, gguf_vision_name, model_shapes, vision_shapes
from kvferry.engine.files.tensors import FramePatches, PairedRows, StoredRows, Tensor

MMPROJ_PATTERN: Final = "*mmproj*.gguf"


def open_gguf_model(path: Path, vision_path: Path | None = None) -> ModelFile:
    """Open a GGUF file; see ``open_model`` for what is checked and raised."""
    opened_as = [file_state(path)]
    file = open_gguf(path)
    config = file.config
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, shape in model_shapes(config).items():
        theirs = gguf_name(name)
        tensors[name] = _tensor(file, config, name, theirs, shape)
        used.add(theirs)
    _refuse_unknown(file, used)
    files = [path]
    if config.mrope_section is not None:
        vision_path = vision_path or _mmproj_beside(path)
    if vision_path is not None:
        opened_as.append(file_state(vision_path))
        config, found = _open_vision(vision_path, file, config)
        tensors |= found
        files.append(vision_path)
    return ModelFile(path, config, tensors, tuple(files), tuple(opened_as))


def _tensor(file: GgufFile, config: ModelConfig, name: str, theirs: str, shape: tuple[int, int]) -> Tensor:
    stored = _stored(file, theirs)
    data, own = stored.data, stored.shape
    if ".experts." in name and config.moe is not None:
        expert = int(name.split(".")[3])
        own, n_experts = shape, config.moe.n_experts
        if stored.shape != (n_experts * shape[0], shape[1]):
            raise _wrong_shape(file, stored, (n_experts * shape[0], shape[1]))
        data = data[expert * shape[0] : (expert + 1) * shape[0]]
    if own != shape:
        raise _wrong_shape(file, stored, shape)
    if config.rope_adjacent_pairs and name.endswith((".attn_q", ".attn_k")):
        return PairedRows(shape, stored.kind, data, config.head_dim)
    return StoredRows(shape, stored.kind, data)


def _stored(file: GgufFile, name: str) -> GgufTensor:
    stored = file.tensors.get(name)
    if stored is None:
        raise ModelInvalid(f"{file.path}: tensor {name!r} is missing")
    if stored.kind not in KINDS:
        raise UnsupportedArchitecture(
            f"{file.path}: tensor {name!r} is stored as {stored.kind}; supported are {', '.join(KINDS)}"
        )
    return stored


def _wrong_shape(file: GgufFile, tensor: GgufTensor, expected: tuple[int, int]) -> ModelInvalid:
    return ModelInvalid(
        f"{file.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
        f"and the metadata asks for {list(expected)}"
    )


def _refuse_unknown(file: GgufFile, used: set[str]) -> None:
    for name in file.tensors.keys() - used:
        raise ModelInvalid(f"{file.path} holds tensor {name!r}, which a model of the shape in its metadata has not")


def _mmproj_beside(path: Path) -> Path | None:
    """The vision tower's file in the same folder. None when there is none: the model then takes text only."""
    found = sorted(other for other in path.parent.glob(MMPROJ_PATTERN) if other != path)
    if len(found) > 1:
        names = ", ".join(other.name for other in found)
        raise ModelInvalid(
            f"{path.parent} holds several mmproj files ({names}); leave the one that belongs to {path.name}"
        )
    return found[0] if found else None


def _open_vision(path: Path, model: GgufFile, config: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    file = open_gguf(path)
    vision = read_vision_config(path, file.metadata, model.metadata)
    n_stated = model.metadata.get(f"{model.architecture}.n_deepstack_layers", len(vision.deepstack_layers))
    if n_stated != len(vision.deepstack_layers):
        raise ModelInvalid(
            f"{path} has {len(vision.deepstack_layers)} deepstack layers and {model.path} asks for {n_stated}"
        )
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, shape in vision_shapes(vision, config.hidden_size).items():
        theirs = gguf_vision_name(name, vision)
        if name == "vision.patch":
            tensors[name] = _patches(file, theirs, shape, vision)
            used.add(f"{theirs}.1")
        else:
            stored = _stored(file, theirs)
            if stored.shape != shape:
                raise _wrong_shape(file, stored, shape)
            tensors[name] = StoredRows(shape, stored.kind, stored.data)
        used.add(theirs)
    _refuse_unknown(file, used)
    try:
        return dataclasses.replace(config, vision=vision), tensors
    except ModelInvalid as error:
        raise ModelInvalid(f"{path}: {error}") from error


def _patches(file: GgufFile, name: str, shape: tuple[int, int], vision: VisionConfig) -> Tensor:
    """The patch embedding: one tensor [size, channel, row, column] for each of two frames."""
    frames: list[Tensor] = []
    for frame_name in (name, f"{name}.1"):
        stored = _stored(file, frame_name)
        n_cols = shape[1] // vision.temporal_patch_size
        if prod(stored.shape) != shape[0] * n_cols or stored.kind not in {"f32", "f16", "bf16"}:
            raise _wrong_shape(file, stored, (shape[0], n_cols))
        frames.append(StoredRows((shape[0], n_cols), stored.kind, stored.data.reshape(shape[0], -1)))
    return FramePatches(shape, frames[0].kind, tuple(frames))
