"""Random cases of the bit contract, each drawn from a seed: which model, which text, and how the work is cut.

    python tests/engine/bit_contract/random_cases.py SEED [HOW_MANY] [--real]

judges so many seeds from SEED on, and says what each drew and which digests it gave; --real: on the demo model. What a
case computes, on one of the kernel paths of this machine, must be to the bit what the generic path computes of the same
text in one chunk, alone, with one thread. Every path is a process of its own: this program starts itself again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_models import IMAGE_TOKEN, MERGE_SIZE, REAL, RECIPES, integers, model

from kvferry.engine.engine import Chunk, Engine, EngineOptions, Sight
from kvferry.engine.kernels.compile_cache import compile_cache
from kvferry.engine.kernels.cpu_features import host_features
from kvferry.engine.kernels.instruction_sets import KERNEL_PATH_VARIABLE, choose_instruction_set
from kvferry.engine.kv_cache import KvKind, KvSequence
from kvferry.engine.vision.positions import Grid
from kvferry.engine.vision.sight import SeenPrompt
from kvferry.engine.vision.tower import Features

_I32 = NDArray[np.int32]

N_CASES: Final = 200
YARDSTICK: Final = "generic"
DIGEST_LENGTH: Final = 64  # all that is shorter or longer is an excuse
_KV_BYTES: Final = 1 << 27  # touched where rows are written
_SOILED_BLOCKS: Final = 32
_CHUNKINGS: Final = ((1,), (7,), (32,), (33,), (512,), ())  # (): every chunk's size is drawn
_LOGITS: Final = ("none", "last", "all")
_NEEDS: Final = {  # beside the fastest, which choose_instruction_set names
    "avx2": {"avx2", "fma", "f16c"},
    "avxvnni": {"avx512vl", "avx512vnni"},  # the same instruction at the same width
}


@dataclass(frozen=True)
class Case:
    """All that a seed draws. ``sizes``: of the chunks, over and over; ``beside``: how many other sequences share the
    steps; ``start``: where the first ``n_given`` rows come from; ``path``: 0 .. 1, of those the machine has."""

    seed: int
    model: str
    kv: KvKind
    tokens: _I32 = field(repr=False)
    n_tokens: int
    grids: tuple[Grid, ...]
    sizes: tuple[int, ...]
    beside: int
    start: str
    n_given: int
    n_threads: int
    max_batch_rows: int
    path: float


def draw(seed: int, *, is_real: bool = False) -> Case:
    """The case of a seed, the same on every machine."""
    random = np.random.Generator(np.random.Philox(seed))
    name = REAL if is_real else str(random.choice(list(RECIPES)))
    is_long = random.random() < 0.15 and not is_real
    n = int(random.integers(300, 800) if is_long else random.integers(2, 200))
    tokens = random.integers(0, 80, n).astype(np.int32)
    grids = (
        []
        if is_real or RECIPES[name].config.vision is None
        else [_drawn_grid(random) for _ in range(random.integers(0, 3))]
    )
    tokens = _with_images(tokens, np.sort(random.integers(0, n + 1, len(grids))), grids)
    n = len(tokens)
    sizes = _CHUNKINGS[int(random.integers(len(_CHUNKINGS)))]
    sizes = sizes or tuple(int(size) for size in random.choice([1, 1, 2, 3, 5, 8, 31, 40, 100, 300], 7))
    start = str(random.choice(["computed", "computed", "restored", "restored", "forked", "adopted"]))
    given = 0 if start == "computed" else int(random.integers(1, n))
    return Case(
        seed=seed,
        model=name,
        kv=list(KvKind)[int(random.integers(3))],
        tokens=tokens,
        n_tokens=n,
        grids=tuple(grids),
        sizes=sizes,
        beside=int(random.integers(0, 4)),
        start=start,
        n_given=given // 32 * 32 if start == "adopted" else given,
        n_threads=int(random.integers(1, 4)),
        max_batch_rows=int(random.choice([512, 512, 48])),
        path=float(random.random()),
    )


def _drawn_grid(random: np.random.Generator) -> Grid:
    rows, cols = random.integers(1, 5, 2)
    return Grid(1, 2 * int(rows), 2 * int(cols))


def _with_images(text: _I32, places: NDArray[np.int64], grids: Sequence[Grid]) -> _I32:
    """The text with each image's tokens put in at its place."""
    parts: list[_I32] = []
    for text_part, grid in zip(np.split(text, places), [*grids, None], strict=True):
        parts.append(text_part)
        if grid is not None:
            parts.append(np.full(grid.n_tokens(MERGE_SIZE), IMAGE_TOKEN, np.int32))
    return np.concatenate(parts)


class Run:
    """One case on this process's kernel path, on an engine of its own."""

    def __init__(self, case: Case, *, n_threads: int, max_batch_rows: int) -> None:
        self.case = case
        self.random = np.random.Generator(np.random.Philox(case.seed).jumped())
        file, packed = model(case.model)
        options = EngineOptions(n_threads, _KV_BYTES, max_batch_rows=max_batch_rows, kv=case.kv)
        self.engine = Engine(packed, options, "0" * 32, file)
        self.found = hashlib.sha256()
        self.seen = self._see()

    def plain(self) -> str:
        """The digest of the whole text in one chunk, alone; of its logits only those that the cut run computes."""
        sequence = self.engine.new_sequence()
        logits = self.engine.forward([self._chunk(sequence, self.case.n_tokens)])[0]
        return self._digest(sequence, logits[self.case.n_given :])

    def cut(self) -> str:
        """The digest of the same, cut up as the case has it."""
        mine = self._begun()
        others = [self.engine.new_sequence() for _ in range(self.case.beside)]
        parts: list[NDArray[np.float32]] = []
        sizes = self._sizes()
        while mine.n_rows < self.case.n_tokens:
            batch = [self._chunk(mine, next(sizes)), *self._chunks_beside(others)]
            order = self.random.permutation(len(batch))
            results = self.engine.forward([batch[i] for i in order])
            parts.append(results[int(np.argmin(order))])
        return self._digest(mine, np.concatenate(parts))

    def close(self) -> None:
        self.engine.close()

    def _see(self) -> SeenPrompt | None:
        vision = self.engine.config.vision
        if vision is None:
            return None
        pixels = integers(self.random, sum(grid.n_patches for grid in self.case.grids), vision.patch_elements)
        features: Features = self.engine.tower.see(pixels, self.case.grids)
        self.found.update(features.embeds.tobytes() + features.deepstack.tobytes())
        return SeenPrompt.of_prompt(self.case.tokens, self.case.grids, features, vision)

    def _begun(self) -> KvSequence:
        """A sequence that has the given rows, in memory that held other rows before."""
        case, engine = self.case, self.engine
        source, mine = engine.new_sequence(), engine.new_sequence()
        if case.n_given:
            more = int(self.random.integers(0, case.n_tokens - case.n_given + 1)) if case.start != "restored" else 0
            self.engine.forward([self._chunk(source, case.n_given + more, "none")])
        if case.start == "adopted":
            mine.adopt(source, case.n_given)
        elif case.start == "forked":
            mine = source.fork(case.n_given)
        elif case.start == "restored":
            stored = [engine.geometry.empty_planes(case.n_given) for _ in range(engine.geometry.n_layers)]
            for layer, planes in enumerate(stored):
                source.read_planes(layer, 0, case.n_given, planes)
            source.release()
            self._soil()
            for layer, planes in enumerate(stored):
                mine.write_planes(layer, 0, planes)
            mine.commit(case.n_given)
        source.release()
        self._soil()
        return mine

    def _soil(self) -> None:
        """Fill free blocks with bytes that no arithmetic survives: NaN, whatever is stored."""
        pool = self.engine.pool
        blocks = pool.allocate(_SOILED_BLOCKS)
        pool.tiles[blocks] = 0xFF if pool.tiles.dtype == np.uint8 else np.nan
        pool.release(blocks)

    def _sizes(self) -> Iterator[int]:
        while True:
            yield from self.case.sizes

    def _chunk(self, sequence: KvSequence, size: int, logits: Literal["none", "all"] = "all") -> Chunk:
        start = sequence.n_rows
        stop = min(start + size, self.case.n_tokens)
        sight: Sight | None = None if self.seen is None else self.seen.sight(start, stop)
        return Chunk(sequence, self.case.tokens[start:stop], logits, sight)

    def _chunks_beside(self, others: list[KvSequence]) -> list[Chunk]:
        """What some other sequences do in this step: they prefill, decode, end and begin anew."""
        chunks = []
        for i, other in enumerate(others):
            if other.n_rows > 120:
                other.release()
                others[i] = self.engine.new_sequence()
            if self.random.random() < 0.6:
                tokens = self.random.integers(0, 80, int(self.random.choice([1, 1, 1, 2, 9, 40]))).astype(np.int32)
                logits: Literal["none", "last", "all"] = _LOGITS[int(self.random.integers(3))]
                chunks.append(Chunk(others[i], tokens, logits))
        return chunks

    def _digest(self, sequence: KvSequence, logits: NDArray[np.float32]) -> str:
        """SHA-256 of what the images became, the logits, and all rows as they are stored."""
        self.found.update(logits.tobytes())
        for layer in range(self.engine.geometry.n_layers):
            planes = self.engine.geometry.empty_planes(sequence.n_rows)
            sequence.read_planes(layer, 0, sequence.n_rows, planes)
            for plane in planes:
                self.found.update(plane.tobytes())
        return self.found.hexdigest()


def compute(seeds: Sequence[int], *, is_plain: bool, is_real: bool) -> Iterator[tuple[int, str]]:
    """Digests on this process's kernel path, one by one."""
    for seed in seeds:
        case = draw(seed, is_real=is_real)
        n_threads, max_batch_rows = (1, 1024) if is_plain else (case.n_threads, case.max_batch_rows)
        run = Run(case, n_threads=n_threads, max_batch_rows=max_batch_rows)
        try:
            digest = run.plain() if is_plain else run.cut()
        except Exception as error:  # noqa: BLE001 - one case that fails must not hide the others
            digest = f"failed with {error!r}"
        run.close()
        yield seed, digest


def start(
    seeds: Sequence[int],
    path: str,
    *,
    is_plain: bool,
    is_real: bool = False,
    interpreter: Sequence[str] = (sys.executable,),
    environment: Mapping[str, str] | None = None,
) -> dict[int, str]:
    """Have another process compute digests of these seeds on a kernel path; they come back by seed."""
    words = [*interpreter, __file__, "--compute", "plain" if is_plain else "cut", *(["--real"] if is_real else [])]
    done = subprocess.run(
        [*words, *map(str, seeds)],
        env=os.environ | {KERNEL_PATH_VARIABLE: path} | dict(environment or {}),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = {int(seed): digest for seed, digest in (line.split(" ", 1) for line in done.stdout.splitlines())}
    return {seed: found.get(seed, f"nothing, the process ended with {done.returncode}") for seed in seeds}


def runnable_paths(features: set[str], native: str) -> list[str]:
    """Kernel paths that this processor runs."""
    also = [path for path, needed in _NEEDS.items() if needed <= features and path != native]
    return [native, *also, *([YARDSTICK] if native != YARDSTICK else [])]


@dataclass(frozen=True)
class Verdict:
    """What the yardstick computed of a case, and what the case did on its path."""

    case: Case
    path: str
    expected: str
    found: str

    @property
    def is_kept(self) -> bool:
        """Whether the contract is."""
        return self.expected == self.found and len(self.found) == DIGEST_LENGTH

    def __str__(self) -> str:
        word = "the same bits" if self.is_kept else f"OTHER BITS, {self.expected} expected"
        return f"{self.case}, on {self.path}: {self.found}, {word}"


def judge(seeds: Sequence[int], *, is_real: bool = False) -> dict[int, Verdict]:
    """Run the cases of these seeds, each on one of this machine's kernel paths."""
    features = host_features()
    paths = runnable_paths(features, choose_instruction_set(platform.machine(), features))
    cases = {seed: draw(seed, is_real=is_real) for seed in seeds}
    path_of = {seed: paths[int(case.path * len(paths))] for seed, case in cases.items()}
    with ThreadPoolExecutor(2) as pool:
        expected = pool.submit(start, seeds, YARDSTICK, is_plain=True, is_real=is_real)
        parts = [
            pool.submit(start, part, path, is_plain=False, is_real=is_real)
            for path in paths
            if (part := [seed for seed in seeds if path_of[seed] == path])
        ]
        found = {seed: digest for part in parts for seed, digest in part.result().items()}
        return {seed: Verdict(cases[seed], path_of[seed], expected.result()[seed], found[seed]) for seed in seeds}


def main() -> None:
    """What the module says, and its own children."""
    is_real = "--real" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--real"]
    if words[0] == "--compute":
        for seed, digest in compute([int(seed) for seed in words[2:]], is_plain=words[1] == "plain", is_real=is_real):
            print(seed, digest, flush=True)  # at once: the process may die in the next
        if not compile_cache().is_warm:
            compile_cache().publish()
        return
    first, n = int(words[0]), int(words[1]) if len(words) > 1 else 1
    verdicts = judge(range(first, first + n), is_real=is_real).values()
    for verdict in verdicts:
        print(verdict)
    sys.exit(not all(verdict.is_kept for verdict in verdicts))


if __name__ == "__main__":
    main()
