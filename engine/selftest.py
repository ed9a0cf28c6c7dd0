"""Golden bits: a small made-up model whose logits and K/V rows are known, run before a process serves.

The bits are the same on every processor and kernel path (docs/numerics.md). A compiler, an emulator or a processor that
computes anything else would give conversations that no other node can go on with; such a process must not serve.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.errors import SelfTestFailed
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.tensors import StoredRows
from kvferry.engine.kv_cache import KvKind
from kvferry.engine.packing import pack_model

# SHA-256 of logits and stored rows, by what the cache stores. They change with NUMERICS_VERSION and never otherwise.
GOLDEN: Final = {
    KvKind.F32: "e93cf1ba9ffcc21871a4c5dc65d4338be0c0be0c060fff222a69f81ac3ea8a43",
    KvKind.F16: "f533bde54a7ff2a850a234ff0ffc6392f2c30ddc771eb6a3a5f023d3605c02fe",
    KvKind.Q8: "0c529ab277f1979379bee11af82336a480b0da6c58ab04bfe9e0393df60e27eb",
}

_CONFIG: Final = ModelConfig(
    architecture="llama",
    n_layers=2,
    hidden_size=192,
    n_heads=3,
    n_kv_heads=1,
    head_dim=64,
    ffn_size=256,
    vocab_size=96,
    context_length=96,
    rope_theta=10_000.0,
    rms_eps=1e-5,
    tied_embeddings=True,
    rope_adjacent_pairs=False,
    end_token_ids=(),
)
# Large tiles, small ones, single tokens, and attention over the edge of a block.
_CHUNKS: Final = (37, 1, 2, 3, 1)


def self_test(n_threads: int = 1) -> None:
    """Compute the golden bits for every KV kind. Raises SelfTestFailed when one differs; takes some milliseconds."""
    for kind, digest in computed_bits(n_threads).items():
        if digest != GOLDEN[kind]:
            raise SelfTestFailed(
                f"this machine computes other bits than it should ({kind} rows: {digest[:16]}, not "
                f"{GOLDEN[kind][:16]}), so it cannot share conversations; set KVFERRY_KERNEL_PATH=generic, and report "
                "what `kvferry doctor` prints"
            )


def computed_bits(n_threads: int = 1) -> dict[KvKind, str]:
    """What this machine computes, as the digests that GOLDEN holds."""
    packed = pack_model(made_model(), _CONFIG.context_length)
    found = {}
    for kind in KvKind:
        engine = Engine(packed, EngineOptions(n_threads=n_threads, kv_bytes=1 << 20, kv=kind), "0" * 32)
        found[kind] = _digest(engine)
        engine.close()
    return found


def _digest(engine: Engine) -> str:
    sequence = engine.new_sequence()
    tokens = np.arange(sum(_CHUNKS), dtype=np.int32) * 7 % _CONFIG.vocab_size
    digest = hashlib.sha256()
    for part in np.split(tokens, np.cumsum(_CHUNKS)[:-1]):
        digest.update(engine.forward([Chunk(sequence, part, "all")])[0].tobytes())
    for layer in range(_CONFIG.n_layers):
        planes = engine.geometry.empty_planes(sequence.n_rows)
        sequence.read_planes(layer, 0, sequence.n_rows, planes)
        for plane in planes:
            digest.update(plane.tobytes())
    sequence.release()
    return digest.hexdigest()


class _Numbers:
    """Reproducible integers (splitmix64), which no library's next version can change."""

    def __init__(self) -> None:
        self._next = 1

    def take(self, *shape: int) -> NDArray[np.uint64]:
        n = int(np.prod(shape))
        counter = np.arange(self._next, self._next + n, dtype=np.uint64)
        self._next += n
        mixed = counter * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (mixed ^ (mixed >> np.uint64(31))).reshape(shape)


def made_model() -> ModelFile:
    """The small model, the same on every machine."""
    numbers, c = _Numbers(), _CONFIG
    query, kv = c.n_heads * c.head_dim, c.kv_dim
    tensors: dict[str, Any] = {
        "embedding": _q8(numbers, c.vocab_size, c.hidden_size),
        "output_norm": _vector(numbers, c.hidden_size),
    }
    for layer in range(c.n_layers):
        prefix = f"layers.{layer}."
        tensors |= {
            f"{prefix}attn_norm": _vector(numbers, c.hidden_size),
            f"{prefix}attn_q": _q4(numbers, query, c.hidden_size),
            f"{prefix}attn_k": _q4(numbers, kv, c.hidden_size),
            f"{prefix}attn_v": _q8(numbers, kv, c.hidden_size),
            f"{prefix}attn_o": _q4(numbers, c.hidden_size, query),
            f"{prefix}ffn_norm": _vector(numbers, c.hidden_size),
            f"{prefix}ffn_gate": _q4(numbers, c.ffn_size, c.hidden_size),
            f"{prefix}ffn_up": _q4(numbers, c.ffn_size, c.hidden_size),
            f"{prefix}ffn_down": _q8(numbers, c.hidden_size, c.ffn_size),
        }
    return ModelFile(Path("self-test"), c, tensors, ())


def _scales(numbers: _Numbers, n_rows: int, n_blocks: int) -> NDArray[np.float16]:
    """1/64 to 1/2 of a unit, a 32nd of it apart: exact as float16."""
    return ((numbers.take(n_rows, n_blocks) % np.uint64(32) + np.uint64(1)) / 64).astype(np.float16)


def _bytes(numbers: _Numbers, n_rows: int, n_blocks: int, n: int) -> NDArray[np.uint8]:
    return (numbers.take(n_rows, n_blocks, n) & np.uint64(255)).astype(np.uint8)


def _q4(numbers: _Numbers, n_rows: int, n_cols: int) -> StoredRows:
    """q4_1 blocks: scale, minimum, 32 nibbles; the elements lie around zero."""
    n_blocks = n_cols // 32
    d = _scales(numbers, n_rows, n_blocks) / np.float16(8)
    m = d * np.float16(-7.5)
    head = np.stack([d, m], axis=-1).astype(np.float16).view(np.uint8)
    blocks = np.concatenate([head, _bytes(numbers, n_rows, n_blocks, 16)], axis=-1)
    return StoredRows((n_rows, n_cols), "q4_1", blocks.reshape(n_rows, -1))


def _q8(numbers: _Numbers, n_rows: int, n_cols: int) -> StoredRows:
    """q8_0 blocks: scale, 32 integers."""
    n_blocks = n_cols // 32
    d = (_scales(numbers, n_rows, n_blocks) / np.float16(128))[..., None].view(np.uint8)
    blocks = np.concatenate([d, _bytes(numbers, n_rows, n_blocks, 32)], axis=-1)
    return StoredRows((n_rows, n_cols), "q8_0", blocks.reshape(n_rows, -1))


def _vector(numbers: _Numbers, n: int) -> StoredRows:
    values = (numbers.take(1, n) % np.uint64(64) + np.uint64(32)) / 64
    return StoredRows((1, n), "f32", values.astype(np.float32).view(np.uint8))
