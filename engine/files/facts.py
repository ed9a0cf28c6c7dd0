"""What there is to say about a model's files, whether it can be run or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvferry.engine.config import ModelConfig
from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.checkpoint import read_stored, weight_files
from kvferry.engine.files.checkpoint_config import read_checkpoint_config
from kvferry.engine.files.fields import read_json_if_there
from kvferry.engine.files.gguf_file import open_gguf


@dataclass(frozen=True, slots=True)
class _TensorFacts:
    name: str
    shape: tuple[int, ...]
    kind: str
    n_parameters: int
    n_bytes: int


def model_facts(path: Path, *, with_tensors: bool) -> dict[str, Any]:
    """What a GGUF file or a checkpoint folder holds, as JSON can hold it; with the reason if it cannot be run.

    Raises ModelNotFound or ModelInvalid for what is no model, or damaged.
    """
    return _folder_facts(path, with_tensors) if path.is_dir() else _gguf_facts(path, with_tensors)


def _gguf_facts(path: Path, with_tensors: bool) -> dict[str, Any]:
    file = open_gguf(path)
    tensors = [
        _TensorFacts(t.name, t.shape, t.kind, t.shape[0] * t.shape[1], t.data.nbytes) for t in file.tensors.values()
    ]
    metadata = file.metadata
    return {
        "path": str(path),
        "format": f"GGUF version {file.version}",
        "name": str(metadata.get("general.name", "")),
        "config": _config_facts(lambda: file.config, metadata.get("general.architecture")),
        "tokenizer": str(metadata.get("tokenizer.ggml.pre", metadata.get("tokenizer.ggml.model", "none"))),
        **_tensor_facts(tensors, with_tensors),
        "n_file_bytes": path.stat().st_size,
    }


def _folder_facts(folder: Path, with_tensors: bool) -> dict[str, Any]:
    paths = weight_files(folder)
    tensors = [
        _TensorFacts(t.name, t.shape, t.dtype.lower(), prod(t.shape), t.data.nbytes)
        for t in read_stored(folder, paths).values()
    ]
    architecture = read_json_if_there(folder / "config.json").get("model_type")
    return {
        "path": str(folder),
        "format": f"safetensors, {len(paths)} file{'s' if len(paths) > 1 else ''}",
        "name": folder.resolve().name,
        "config": _config_facts(lambda: read_checkpoint_config(folder), architecture),
        "tokenizer": "tokenizer.json" if (folder / "tokenizer.json").is_file() else "none",
        **_tensor_facts(tensors, with_tensors),
        "n_file_bytes": sum(path.stat().st_size for path in paths),
    }


def _config_facts(read: Callable[[], ModelConfig], architecture: object) -> dict[str, Any]:
    try:
        config = read()
    except (UnsupportedArchitecture, ModelInvalid) as error:
        return {"architecture": architecture, "cannot be run": str(error)}
    return {**config.as_dict(), "kv_dim": config.kv_dim}


def _tensor_facts(tensors: Iterable[_TensorFacts], with_tensors: bool) -> dict[str, Any]:
    tensors = list(tensors)
    counts = Counter(tensor.kind for tensor in tensors)
    parameters: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for tensor in tensors:
        parameters[tensor.kind] += tensor.n_parameters
        n_bytes[tensor.kind] += tensor.n_bytes
    facts: dict[str, Any] = {
        "kinds": {
            kind: {"tensors": counts[kind], "parameters": parameters[kind], "bytes": n_bytes[kind]}
            for kind in sorted(counts)
        },
        "n_tensors": counts.total(),
        "n_parameters": parameters.total(),
        "n_tensor_bytes": n_bytes.total(),
    }
    if with_tensors:
        facts["tensors"] = [
            {"name": t.name, "shape": list(t.shape), "kind": t.kind, "bytes": t.n_bytes} for t in tensors
        ]
    return facts
