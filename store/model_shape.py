"""A model's KV geometry and vocabulary, read from what lies beside its weights; no weight is looked at.

Only for the command line, where no engine is running that could say it. A folder's config.json, or a GGUF file's
metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import platformdirs

from kvferry.store.errors import StoreMisuse
from kvferry.store.geometry import KvGeometry

_CONFIG_BYTES_MAX: Final = 16 << 20  # the longest config.json in use has some 100 KB


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What snapshots of a model are held against; vocab_size None: not known, so only negative ids are refused."""

    geometry: KvGeometry
    vocab_size: int | None


def parse_shape(text: str, vocab_size: int | None) -> ModelShape:
    """'LAYERS,KV_HEADS,HEAD_DIM' or with ',BLOCK_SIZE'. Raises StoreMisuse."""
    parts = text.split(",")
    if len(parts) not in {3, 4} or not all(part.strip().isdecimal() for part in parts):
        raise StoreMisuse(
            f"{text!r} is no geometry; write LAYERS,KV_HEADS,HEAD_DIM or LAYERS,KV_HEADS,HEAD_DIM,BLOCK_SIZE",
            op="geometry",
        )
    return ModelShape(KvGeometry(*(int(part) for part in parts)), vocab_size)


def read_shape(model: str) -> ModelShape:
    """The shape of a model: a folder with config.json, a GGUF file, or the name of a fetched one. Raises
    StoreMisuse."""
    path = _find(model)
    try:
        return _from_config(path) if path.name == "config.json" else _from_gguf(path)
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise StoreMisuse(
            f"{path} does not tell the model's KV geometry ({type(error).__name__}: {error}); give it with --geometry",
            op="read model",
            path=path,
        ) from error


def _find(model: str) -> Path:
    cache = Path(os.environ.get("KVFERRY_CACHE") or platformdirs.user_cache_path("kvferry"))
    for path in (cache / "models" / model.replace("/", "--"), Path(model).expanduser()):
        if path.is_file():
            return path
        candidates = [*sorted(path.rglob("config.json")), *sorted(path.rglob("*.gguf"))] if path.is_dir() else []
        if candidates:
            return candidates[0]
    raise StoreMisuse(
        f"there is no model {model!r}: neither a folder with a config.json, nor a GGUF file, nor a fetched name",
        op="read model",
    )


def _from_config(path: Path) -> ModelShape:
    if path.stat().st_size > _CONFIG_BYTES_MAX:
        raise ValueError("it is too long for a config.json")
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config = config.get("text_config", config)  # vision models keep the language model's settings one level down
    n_heads = int(config["num_attention_heads"])
    head_dim = config.get("head_dim") or int(config["hidden_size"]) // n_heads
    n_kv_heads = config.get("num_key_value_heads") or n_heads
    vocab_size = config.get("vocab_size")
    return ModelShape(
        KvGeometry(int(config["num_hidden_layers"]), int(n_kv_heads), int(head_dim)),
        None if vocab_size is None else int(vocab_size),
    )


def _from_gguf(path: Path) -> ModelShape:
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    name = fields["general.architecture"].contents()

    def number(key: str) -> int | None:
        found = fields.get(f"{name}.{key}")
        return None if found is None else int(found.contents())

    n_layers, n_heads = number("block_count"), number("attention.head_count")
    if n_layers is None or n_heads is None:
        raise ValueError(f"its metadata lacks {name}.block_count or {name}.attention.head_count")
    n_kv_heads = number("attention.head_count_kv") or n_heads
    head_dim = number("attention.key_length") or (number("embedding_length") or 0) // n_heads
    tokens = fields.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens.data) if tokens is not None else number("vocab_size")
    return ModelShape(KvGeometry(n_layers, n_kv_heads, head_dim), vocab_size)
