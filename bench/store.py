"""The store beside dd, in one run: how fast it saves and restores, what verification costs, how much memory it takes.

`python -m kvferry.bench.store [--tokens N] [--rounds N] [--directory DIR]`. Rates are medians of interleaved rounds;
judge the ratios, since everything in a round meets the same disk and the same neighbours. Rows lie in memory that has
been touched before, as a node's do after its first sessions.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvferry.store.chain_reader import ChainReader, Part
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.payload import F32Rows, Kind
from kvferry.store.q8 import Q8Rows, quantise
from kvferry.store.segment_file import Terms, open_segment
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(30, 3, 64)  # SmolLM2-135M: 46,080 bytes a token
VOCAB = 1 << 20


class Pool(MemoryRows):
    """Rows in tiles, as the engine's cache holds them; blocks in part as rows."""

    def __init__(self, n_tokens: int) -> None:
        shape = (GEOMETRY.n_layers, n_tokens, GEOMETRY.kv_dim)
        super().__init__(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        self.tiles = np.zeros((-(-n_tokens // 32), GEOMETRY.n_layers, 2 * GEOMETRY.kv_dim * 32), np.float32)
        self.tiles[:] = 1

    def fill(self, seed: int) -> Pool:
        """Rows that no file system can compress."""
        self.tiles[:] = np.random.default_rng(seed).standard_normal(self.tiles.shape, np.float32)
        return self

    def tile_buffers(self, layer: int, first_block: int, n_blocks: int) -> list[memoryview]:
        """The blocks' memory."""
        return [self.tiles[b, layer].view(np.uint8).data for b in range(first_block, first_block + n_blocks)]


def dd(*arguments: str) -> None:
    """Copies as fast as the disk and the page cache let it."""
    subprocess.run(["dd", "bs=1M", "status=none", *arguments], check=True)


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
    """One directory, one sequence, one pool."""

    def __init__(self, directory: Path, n_tokens: int) -> None:
        self.directory = directory
        self.ids = np.arange(1, n_tokens + 1, dtype=np.int32)
        self.source = Pool(n_tokens).fill(1)
        self.target = Pool(n_tokens)
        self.fs = PosixFileSystem()
        self.seconds: dict[str, list[float]] = {}
        self.n_saves = 0

    def measure(self, name: str, action: Callable[[], object]) -> None:
        """Adds a round's figure."""
        self.seconds.setdefault(name, []).append(timed(action))

    def save(self) -> Path:
        """One whole sequence as a segment, in a store of its own."""
        self.n_saves += 1
        store = SnapshotStore(
            self.directory / str(self.n_saves), "bench", GEOMETRY, VOCAB, 1 << 40, 100, "bench", version=3
        )
        return store.path / store.publish(self.ids, self.source).name

    def restore(self, path: Path, *, verify: bool = True) -> None:
        """All rows, into the target's tiles."""
        with open_segment(self.fs, path, Terms(GEOMETRY, Kind.F32)) as file:
            file.verify = verify
            reader = ChainReader([Part(file, 0, len(self.ids))], GEOMETRY, Kind.F32)
            n_good, damages = reader.restore(len(self.ids), F32Rows(sink=self.target), self.target)
            assert n_good == len(self.ids)
            assert not damages

    def run(self, rounds: int) -> Path:
        """Interleaved: each round does everything once."""
        path = self.save()
        copy = self.directory / "dd"
        for _ in range(rounds):
            self.measure("dd conv=fsync", lambda: dd(f"if={path}", f"of={copy}", "conv=fsync"))
            copy.unlink()
            self.measure("save", self.save)
            shutil.rmtree(self.directory / str(self.n_saves))
            for temperature in ("cold", "warm"):
                for name, action in (
                    ("dd", lambda: dd(f"if={path}", "of=/dev/null")),
                    ("restore", lambda: self.restore(path)),
                    ("restore, not verified", lambda: self.restore(path, verify=False)),
                ):
                    if temperature == "cold":
                        forget(path)
                    self.measure(f"{temperature} {name}", action)
        assert self.target.tiles.tobytes() == self.source.tiles.tobytes()
        return path


def peak_memory(action: Callable[[], object]) -> int:
    """Bytes that an action takes at most beside what was there; Python's and numpy's."""
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def sizes(n_tokens: int) -> dict[str, int]:
    """Bytes of the same rows by version and kind."""
    with tempfile.TemporaryDirectory() as folder:
        n = min(n_tokens, 256)
        k = np.random.default_rng(2).standard_normal((GEOMETRY.n_layers, n, GEOMETRY.kv_dim), np.float32)
        (kq, ks), (vq, vs) = quantise(k, GEOMETRY.n_kv_heads), quantise(-k, GEOMETRY.n_kv_heads)
        found = {}
        for name, options, rows in (
            ("v1", {"version": 1}, MemoryRows(k, -k)),
            ("v3 f32", {"version": 3}, MemoryRows(k, -k)),
            ("v3 q8", {"version": 3, "kind": Kind.Q8}, Q8Rows(kq, vq, ks, vs)),
        ):
            store = SnapshotStore(Path(folder), name.replace(" ", ""), GEOMETRY, VOCAB, 1 << 40, 100, "b", **options)  # type: ignore[arg-type]  # options of different types
            found[name] = store.publish(np.arange(1, n + 1), rows).n_bytes * n_tokens // n
        return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: the current one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory or Path.cwd()) as folder:
        bench = Bench(Path(folder), arguments.tokens)
        path = bench.run(arguments.rounds)
        n_bytes = path.stat().st_size
        medians = {name: statistics.median(seconds) for name, seconds in bench.seconds.items()}
        print(f"{arguments.tokens} tokens, {n_bytes / 1e6:.1f} MB, median of {arguments.rounds} rounds")
        for name, seconds in medians.items():
            print(f"  {name:32} {seconds:8.3f} s {n_bytes / seconds / 1e6:9.0f} MB/s")
        best = {name: min(seconds) for name, seconds in bench.seconds.items()}
        print("in brackets: of the best rounds, which neighbours disturbed least")
        ratio, least = (figures["dd conv=fsync"] / figures["save"] for figures in (medians, best))
        print(f"save / dd conv=fsync      {ratio:.2f} [{least:.2f}]   (>= 0.85)")
        for temperature in ("cold", "warm"):
            ratio = medians[f"{temperature} dd"] / medians[f"{temperature} restore"]
            least = best[f"{temperature} dd"] / best[f"{temperature} restore"]
            print(f"{temperature} restore / dd         {ratio:.2f} [{least:.2f}]   (>= 0.85)")
        cost = medians["warm restore"] / medians["warm restore, not verified"] - 1
        least = best["warm restore"] / best["warm restore, not verified"] - 1
        print(f"verification, warm        {cost:+.1%} [{least:+.1%}] of the restore   (<= 10 %)")
        for name, action in (
            ("save", lambda: shutil.rmtree(bench.save().parent)),
            ("restore", lambda: bench.restore(path)),
        ):
            print(f"peak extra memory, {name:8} {peak_memory(action) / 2**20:.1f} MiB   (<= 64)")
        print("bytes: " + ", ".join(f"{name} {n / 1e6:.1f} MB" for name, n in sizes(arguments.tokens).items()))


if __name__ == "__main__":
    main()
