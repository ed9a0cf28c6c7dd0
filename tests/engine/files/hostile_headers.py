"""Opens mutated model files one after the other, as its own process: prints what came of them and its peak memory.

Run as: hostile_headers.py FOLDER KIND SEED COUNT, where FOLDER holds a whole model of that kind named m.gguf or m/.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections import Counter
from pathlib import Path

from kvferry.engine.errors import EngineError
from kvferry.engine.files.open_model import open_model

_NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    65536,
    1 << 24,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 62,
    (1 << 64) - 1,
)


def mutated(body: bytes, header_bytes: int, chance: random.Random) -> bytes:
    """One to six changes within the header: a flipped bit, a byte, an absurd number, a hole, a repetition, or a cut."""
    changed = bytearray(body)
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(min(header_bytes, len(changed)))
        match chance.randrange(7):
            case 0:
                changed[place] ^= 1 << chance.randrange(8)
            case 1:
                changed[place] = chance.randrange(256)
            case 2 | 3:
                n_bytes = chance.choice((1, 4, 8))
                number = chance.choice(_NUMBERS) & ((1 << 8 * n_bytes) - 1)
                changed[place : place + n_bytes] = number.to_bytes(n_bytes, "little")
            case 4:
                del changed[place : place + chance.randint(1, 40)]
            case 5:
                changed[place:place] = changed[place : place + chance.randint(1, 40)] * chance.randint(1, 30)
            case _:
                if chance.random() < 0.2:
                    del changed[place:]
        if not changed:
            break
    return bytes(changed)


def main() -> None:
    folder, kind, seed, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    victim = folder / ("m.gguf" if kind == "gguf" else "m/model.safetensors")
    opened = folder / ("m.gguf" if kind == "gguf" else "m")
    body = victim.read_bytes()
    header_bytes = body.rindex(b"blk.0") + 60 if kind == "gguf" else 8 + int.from_bytes(body[:8], "little")
    open_model(opened)  # all that is loaded once is loaded now
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()
    sentences: set[str] = set()
    for _ in range(count):
        victim.unlink()
        victim.write_bytes(mutated(body, header_bytes, chance))
        try:
            model = open_model(opened)
            outcomes["opened"] += 1
            del model
        except EngineError as error:
            outcomes[type(error).__name__] += 1
            sentences.add(str(error))
    bad = [s for s in sentences if "\n" in s or not s.isprintable() or str(folder) not in s or len(s) > 2000]
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"outcomes": outcomes, "bad_sentences": bad[:3], "grown_mib": (after_kib - before_kib) / 1024}))


if __name__ == "__main__":
    main()
