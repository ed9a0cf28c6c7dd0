"""Load a model, prefill, decode, and print what came out and what it took, as JSON: run in a process of its own."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from kvferry.engine.engine import Chunk, Engine, EngineOptions

N_PROMPT, N_TOKENS = 24, 12


def main(folder: Path, weights: str) -> None:
    engine = Engine.load(
        folder, EngineOptions(n_threads=2, kv_bytes=32 << 20, context_length=256, quant="q4", weights=weights)
    )
    sequence, digest = engine.new_sequence(), hashlib.sha256()
    logits = engine.forward([Chunk(sequence, np.arange(N_PROMPT, dtype=np.int32) * 977)])[0]
    began_at = time.perf_counter()
    for _ in range(N_TOKENS):
        digest.update(logits.tobytes())
        logits = engine.forward([Chunk(sequence, np.array([logits[0].argmax()], np.int32))])[0]
    seconds = time.perf_counter() - began_at
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    found = {
        "digest": digest.hexdigest(),
        "fingerprint": engine.fingerprint,
        "seconds_per_token": seconds / N_TOKENS,
        "weights": engine.weights,
        "peak_rss": int(peak[1]) * 1024 if peak else 0,
    }
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
