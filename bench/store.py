"""The store beside dd, in one run: how fast it saves and restores, what verification costs, how much memory it takes.

`python -m kvferry.bench.store [--tokens N] [--rounds N] [--formats v1,v3-f32,...] [--directory DIR]`. Rows are saved
from the engine's own cache and restored into it, as a node does. Rates are medians of interleaved rounds, and dd's are
its own figures; judge the ratios, since everything in a round meets the same disk and the same neighbours. The cache's
memory has been touched before, as a node's has after its first sessions.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np

from kvferry.engine.kv_cache import KvGeometry as CacheGeometry
from kvferry.engine.kv_cache import KvKind, KvPool, KvSequence
from kvferry.node.sequence_rows import SequenceRows
from kvferry.store.geometry import KvGeometry
from kvferry.store.payload import Kind
from kvferry.store.snapshot_store import SnapshotStore

N_LAYERS, N_KV_HEADS, HEAD_DIM = 30, 3, 64  # SmolLM2-135M: 46,080 bytes a token in float32
GEOMETRY = KvGeometry(N_LAYERS, N_KV_HEADS, HEAD_DIM)
VOCAB: Final = 1 << 20
SAMPLE_SECONDS: Final = 0.001


class Format(NamedTuple):
    """What is written, and by what kind of cache."""

    version: Literal[1, 3]
    cache: KvKind
    kind: Kind


FORMATS = {
    "v1": Format(1, KvKind.F32, Kind.F32),
    "v3-f32": Format(3, KvKind.F32, Kind.F32),
    "v3-f16": Format(3, KvKind.F16, Kind.F16),
    "v3-q8": Format(3, KvKind.Q8, Kind.Q8),
}


class Believing(SequenceRows):
    """Takes every block for good: what is left when verification costs nothing."""

    def read_tiles_in_place(
        self, fd: int, offset: int, layer: int, first_block: int, n_blocks: int, digests: memoryview
    ) -> bool:
        return super().read_tiles_in_place(fd, offset, layer, first_block, n_blocks, digests[:0])


def dd(*arguments: str) -> float:
    """Copies as fast as the disk and the page cache let it; the seconds that it says it took."""
    done = subprocess.run(
        ["dd", "bs=1M", *arguments], check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    return float(done.stderr.splitlines()[-1].split(", ")[-2].removesuffix(" s"))


def forget(path: Path) -> None:
    """Drops a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def timed(action: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


class Bench:
    """One directory, one format, one sequence in a cache that holds two."""

    def __init__(self, directory: Path, form: Format, n_tokens: int) -> None:
        self.directory = directory
        self.form = form
        self.ids = np.arange(1, n_tokens + 1, dtype=np.int32)
        geometry = CacheGeometry(N_LAYERS, N_KV_HEADS, HEAD_DIM, kind=form.cache)
        self.pool = KvPool(geometry, geometry.block_bytes * 2 * -(-n_tokens // geometry.block_size))
        self.pool.tiles.view(np.uint8)[:] = 1
        self.source = KvSequence(self.pool)
        self.fill()
        self.seconds: dict[str, list[float]] = {}
        self.n_saves = 0

    def fill(self) -> None:
        """Rows that no file system can compress."""
        random, step = np.random.default_rng(1), 32
        for start in range(0, len(self.ids), step):
            for layer in range(N_LAYERS):
                planes = self.pool.geometry.empty_planes(min(step, len(self.ids) - start))
                for plane in planes:
                    plane[:] = (
                        random.integers(-127, 128, plane.shape)
                        if plane.dtype == np.int8
                        else random.random(plane.shape, np.float32)
                    )
                self.source.write_planes(layer, start, planes)
        self.source.commit(len(self.ids))

    def measure(self, name: str, seconds: float) -> None:
        """Adds a round's figure."""
        self.seconds.setdefault(name, []).append(seconds)

    def store(self, name: str) -> SnapshotStore:
        """A store of its own for each name."""
        return SnapshotStore(
            self.directory / name,
            "bench",
            GEOMETRY,
            VOCAB,
            1 << 40,
            100,
            "bench",
            version=self.form.version,
            kind=self.form.kind,
        )

    def save(self) -> Path:
        """One whole sequence."""
        self.n_saves += 1
        store = self.store(str(self.n_saves))
        return store.path / store.publish(self.ids, SequenceRows(self.pool, self.source)).name

    def restore(self, store: SnapshotStore, rows: type[SequenceRows] = SequenceRows, *, compare: bool = False) -> None:
        """All rows, into a new sequence, as a node does."""
        match = store.find(self.ids)
        assert match is not None
        sequence = KvSequence(self.pool)
        n_good = store.restore_usable(match, len(self.ids), rows(self.pool, sequence, len(self.ids)))
        assert n_good == len(self.ids)
        sequence.commit(n_good)
        if compare:
            tiles = self.pool.tiles.view(np.uint8)
            for mine, other in zip(sequence.block_table, self.source.block_table, strict=True):
                assert np.array_equal(tiles[mine], tiles[other])
        sequence.release()

    def run(self, rounds: int) -> Path:
        """Interleaved: each round does everything once."""
        path = self.save()
        store = self.store("1")
        store.refresh()
        self.restore(store, compare=True)
        actions: dict[str, Callable[[], float]] = {
            "dd": lambda: dd(f"if={path}", "of=/dev/null"),
            "restore": lambda: timed(lambda: self.restore(store)),
            "restore, not verified": lambda: timed(lambda: self.restore(store, Believing)),
        }
        copy = self.directory / "dd"
        for _ in range(rounds):
            self.measure("dd conv=fsync", dd(f"if={path}", f"of={copy}", "conv=fsync"))
            copy.unlink()
            self.measure("save", timed(self.save))
            shutil.rmtree(self.directory / str(self.n_saves))
            for temperature in ("cold", "warm"):
                for name, action in actions.items():
                    if temperature == "cold":
                        forget(path)
                    self.measure(f"{temperature} {name}", action())
        return path


def peak_memory(action: Callable[[], object]) -> int:
    """Bytes by which the process's anonymous memory grew at most, sampled while an action runs."""
    done = threading.Event()
    before = most = anonymous_bytes()

    def watch() -> None:
        nonlocal most
        while not done.wait(SAMPLE_SECONDS):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        done.set()
        watcher.join()
    return most - before


def anonymous_bytes() -> int:
    """The process's own pages, files' not among them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("the system does not tell RssAnon")


def report(name: str, bench: Bench, path: Path) -> None:
    """Prints what was measured and how it compares."""
    n_bytes = path.stat().st_size
    print(f"{name}: {len(bench.ids)} tokens, {n_bytes / 1e6:.1f} MB; median of rounds [best, least disturbed]")
    medians = {what: statistics.median(seconds) for what, seconds in bench.seconds.items()}
    best = {what: min(seconds) for what, seconds in bench.seconds.items()}
    for what, seconds in medians.items():
        print(f"  {what:28} {seconds:7.4f} s {n_bytes / seconds / 1e6:7.0f} [{n_bytes / best[what] / 1e6:.0f}] MB/s")
    for what, beside, by in (
        ("save / dd conv=fsync", "dd conv=fsync", "save"),
        ("cold restore / dd", "cold dd", "cold restore"),
        ("warm restore / dd", "warm dd", "warm restore"),
    ):
        print(f"  {what:28} {medians[beside] / medians[by]:.2f} [{best[beside] / best[by]:.2f}]   (>= 0.85)")
    cost, least = (t["warm restore"] / t["warm restore, not verified"] - 1 for t in (medians, best))
    print(f"  {'verification, warm':28} {cost:+.1%} [{least:+.1%}]   (<= 10 %)")
    store = bench.store("1")
    store.refresh()
    for what, action in (("save", bench.save), ("restore", lambda: bench.restore(store))):
        print(f"  peak extra memory, {what:9} {peak_memory(action) / 2**20:.1f} MiB   (<= 64)")


def main() -> None:
    """Prints a table for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--formats", default=",".join(FORMATS), help="of " + ", ".join(FORMATS))
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: the current one")
    arguments = parser.parse_args()
    for name in arguments.formats.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.directory or Path.cwd()) as folder:
            bench = Bench(Path(folder), FORMATS[name], arguments.tokens)
            report(name, bench, bench.run(arguments.rounds))


if __name__ == "__main__":
    main()
