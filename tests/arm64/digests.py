"""Prints what the engine computes on this machine, as JSON: `python tests/arm64/digests.py MODEL.gguf`.

The same program runs on x86-64 and, emulated, on AArch64; the digests must be equal.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.files.open_model import open_model
from kvferry.engine.kernels.compile_cache import compile_cache
from kvferry.engine.kernels.kv_read import read_tiles
from kvferry.engine.kv_cache import KvKind
from kvferry.engine.memory import aligned_empty
from kvferry.engine.packing import pack_model
from kvferry.engine.sampling import SamplingSettings, sample

N_TOKENS = 75
# Tiles of every height, decodes, and attention over three blocks.
CHUNKS = ((75,), (40, 1, 3, 31))
SAMPLINGS = (
    SamplingSettings(),
    SamplingSettings(temperature=0.8, seed=7, logprobs=True, top_logprobs=3),
    SamplingSettings(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seed=2**63 + 5),
)
# Of ``block_of`` as many bytes, by xxHash's own library.
XXH3 = {
    256: "2f433606b2ebce2dff5a1cefade75bb9",
    1025: "f66a602aa3eda73bc856c953bbdbc807",
    13056: "54478c9bdf9440c97f5fcb55c4be45fe",
}


def sha256(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def computed(engine: Engine, tokens: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits of all tokens and the stored K and V rows of all layers."""
    sequence = engine.new_sequence()
    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    logits = np.concatenate([engine.forward([Chunk(sequence, part, "all")])[0] for part in parts])
    rows = []
    for layer in range(engine.geometry.n_layers):
        planes = engine.geometry.empty_planes(sequence.n_rows)
        sequence.read_planes(layer, 0, sequence.n_rows, planes)
        rows += planes
    sequence.release()
    return logits, rows


def block_of(n_bytes: int) -> np.ndarray:
    """Bytes of a snapshot's block."""
    return (np.arange(n_bytes) * 7 + n_bytes).astype(np.uint8)


def is_taken(n_bytes: int, digest: str) -> bool:
    """Whether a restore takes a block of a file for the one that has this digest."""
    memory, first = aligned_empty(n_bytes), np.zeros(1, np.int32)
    expected = np.frombuffer(bytes.fromhex(digest), np.uint8).copy()
    with tempfile.TemporaryFile() as file:
        file.write(block_of(n_bytes).tobytes())
        file.flush()
        taken = read_tiles(file.fileno(), 0, memory.ctypes.data, n_bytes, first, expected, 1, n_bytes, n_bytes)
    return bool(taken) and memory.tobytes() == block_of(n_bytes).tobytes()


def main(path: Path) -> None:
    tokens = (np.arange(N_TOKENS, dtype=np.int32) * 37 + 11) % 64
    file = open_model(path)
    found: dict[str, object] = {"machine": platform.machine()}
    packed = pack_model(file, file.config.context_length)
    for kv, n_threads, sizes in ((kv, *how) for kv in KvKind for how in ((1, CHUNKS[0]), (2, CHUNKS[1]))):
        engine = Engine(packed, EngineOptions(n_threads=n_threads, kv_bytes=1 << 22, kv=kv), "0" * 32)
        found["kernel_path"] = engine.kernel_path
        logits, rows = computed(engine, tokens, sizes)
        engine.close()
        found[f"logits, {kv}, {n_threads} thread(s)"] = sha256(logits)
        found[f"rows, {kv}, {n_threads} thread(s)"] = sha256(*rows)
    for i, settings in enumerate(SAMPLINGS):
        drawn = [sample(row, tokens[:position], settings, position) for position, row in enumerate(logits)]
        found[f"sampling {i}"] = hashlib.sha256(repr(drawn).encode()).hexdigest()
    found["blocks taken"] = [is_taken(n, digest) for n, digest in XXH3.items()]
    found["damaged blocks taken"] = [is_taken(n, digest[1:] + digest[:1]) for n, digest in XXH3.items()]
    compile_cache().publish()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
