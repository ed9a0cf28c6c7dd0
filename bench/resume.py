"""`make bench-resume`: the first token of a session's next turn on another node, restored or computed again.

The real engine and the demo's model; a session of 2,048 tokens, a next turn of 40. Restored rows end up in the engine's
own cache, and the turn's logits are computed from them: the same bits, or the bench fails. The disk is the page cache
(warm), the disk itself (cold), and a disk slowed down to gigabit ethernet (110 MB/s) and to eMMC (240 MB/s).

The q8 lines read what a node with a q8 cache would read: the engine has no such cache yet, so those rows go to plain
memory, and the turn's 40 tokens are timed on float32 rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.text.model import TextModel
from kvferry.node.sequence_rows import SequenceRows
from kvferry.store.fs import Buffer, PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.payload import Kind
from kvferry.store.q8 import Q8Rows, quantise
from kvferry.store.snapshot_store import SnapshotStore

N_NEXT = 40
DISKS = {"warm": None, "cold": None, "110 MB/s": 110e6, "240 MB/s": 240e6}


class SlowDisk(PosixFileSystem):
    """Reads no faster than a rate, whoever reads."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        n = super().preadv(fd, buffers, offset)
        if self.bytes_per_s:
            with self._lock:
                self._free_at = max(self._free_at, time.perf_counter()) + n / self.bytes_per_s
                free_at = self._free_at
            time.sleep(max(0.0, free_at - time.perf_counter()))
        return n


@dataclass(slots=True)
class Line:
    """Seconds per round."""

    n_bytes: int
    restore_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


class Bench:
    """One engine that is both nodes: rows leave its cache through a store and come back to new blocks."""

    def __init__(self, folder: Path, n_tokens: int, n_threads: int) -> None:
        path = resolve_model("smollm2-135m")
        options = EngineOptions(n_threads=n_threads, kv_bytes=4 * (n_tokens + 4096) * 46_080)
        self.engine = Engine.load(path, options)
        self.ids = _some_tokens(TextModel.load(path), n_tokens + N_NEXT)
        self.n_tokens = n_tokens
        self.folder = folder
        g = self.engine.geometry
        self.geometry = KvGeometry(g.n_layers, g.n_kv_heads, g.head_dim, g.block_size)
        self.lines: dict[tuple[str, str], Line] = {}
        self.recompute_s: list[float] = []
        self.sequence, self.logits = self.recompute()
        self.recompute_s.clear()  # the first one warms up
        self.next_s: list[float] = []
        self.q8, self.q8_target = self._quantised(), self._quantised()
        self.names = {name: self._store(name, None).publish(self.ids[:n_tokens], self._source(name)) for name in STORES}

    def recompute(self) -> tuple[KvSequence, NDArray[np.float32]]:
        """The whole prompt on a node that has nothing."""
        sequence = self.engine.new_sequence()
        started = time.perf_counter()
        (logits,) = self.engine.forward([Chunk(sequence, self.ids, "last")])
        self.recompute_s.append(time.perf_counter() - started)
        return sequence, logits

    def resume(self, name: str, disk: str) -> None:
        """Restores the session and computes its next turn's first token."""
        store = self._store(name, DISKS[disk])
        store.refresh()
        if disk == "cold":
            forget(store.path)
        sequence = self.engine.new_sequence()
        line = self.lines.setdefault((name, disk), Line(sum(f.stat().st_size for f in store.path.glob("*.kv"))))
        started = time.perf_counter()
        match = store.find(self.ids)
        assert match is not None
        assert match.n_common == self.n_tokens
        sink = SequenceRows(self.engine.pool, sequence, self.n_tokens)
        store.restore(match, self.n_tokens, self.q8_target if "q8" in name else sink)  # type: ignore[arg-type]  # a q8 store takes q8 sinks
        line.restore_s.append(time.perf_counter() - started)
        if "q8" in name:
            assert self.q8_target.k.tobytes() == self.q8.k.tobytes()
            sequence = self.sequence.fork(self.n_tokens)
            started = time.perf_counter() - line.restore_s[-1]
        else:
            sequence.commit(self.n_tokens)
        began = time.perf_counter()
        (logits,) = self.engine.forward([Chunk(sequence, self.ids[self.n_tokens :], "last")])
        self.next_s.append(time.perf_counter() - began)
        line.first_token_s.append(time.perf_counter() - started)
        assert logits.tobytes() == self.logits.tobytes(), "restored is not recomputed"
        sequence.release()

    def _store(self, name: str, bytes_per_s: float | None) -> SnapshotStore:
        kind = Kind.Q8 if "q8" in name else Kind.F32
        return SnapshotStore(
            self.folder,
            name.replace(" ", ""),
            self.geometry,
            1 << 20,
            1 << 40,
            100,
            "bench",
            version=1 if name == "v1" else 3,
            kind=kind,
            fs=SlowDisk(bytes_per_s),
        )

    def _source(self, name: str) -> SequenceRows | Q8Rows:
        return self.q8 if "q8" in name else SequenceRows(self.engine.pool, self.sequence)

    def _quantised(self) -> Q8Rows:
        n, g = self.n_tokens, self.geometry
        k, v = (np.empty((g.n_layers, n, g.kv_dim), np.float32) for _ in range(2))
        for layer in range(g.n_layers):
            self.sequence.read_rows(layer, 0, n, k[layer], v[layer])
        (kq, ks), (vq, vs) = quantise(k, g.n_kv_heads), quantise(v, g.n_kv_heads)
        return Q8Rows(kq, vq, ks, vs)


STORES = ("v1", "v3 f32", "v3 q8")


def _some_tokens(text: TextModel, n_tokens: int) -> NDArray[np.int32]:
    story = "The ferry left the harbour before the fog had lifted, and nobody on deck knew the way. "
    ids = text.encode(" ".join(f"{number}. {story}" for number in range(n_tokens)))[:n_tokens]
    return np.array(ids, np.int32)


def forget(folder: Path) -> None:
    """Drops the folder's files from the page cache."""
    for path in folder.glob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def middle(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def print_table(bench: Bench, rounds: int) -> None:
    """One line for each store and disk, medians of all rounds."""
    recompute_s = middle(bench.recompute_s)
    table = Table(
        "store", "disk", "bytes", "restore s", "first token s", "recompute s", "prefill ratio", "wall ratio",
        title=f"{bench.n_tokens} tokens and {N_NEXT} more, {bench.engine.kernel_path},"
        f" {bench.engine.n_threads} threads, medians of {rounds} rounds",
    )  # fmt: skip
    for (name, disk), line in bench.lines.items():
        restore_s, first_s = middle(line.restore_s), middle(line.first_token_s)
        table.add_row(
            name, disk, f"{line.n_bytes / 1e6:.1f} MB", f"{restore_s:.3f}", f"{first_s:.3f}", f"{recompute_s:.2f}",
            f"{recompute_s * bench.n_tokens / len(bench.ids) / restore_s:.1f}", f"{recompute_s / first_s:.1f}",
        )  # fmt: skip
    Console(width=130).print(table)
    print(f"of which the {N_NEXT} new tokens take {middle(bench.next_s):.3f} s, from memory as well")
    print("asked: 13.1 on the first token; llama.cpp's slot restore gives 12.5 in the same experiment")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: the current one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory or Path.cwd()) as folder:
        bench = Bench(Path(folder), arguments.tokens, arguments.threads)
        for _ in range(arguments.rounds):
            sequence, logits = bench.recompute()
            sequence.release()
            assert logits.tobytes() == bench.logits.tobytes()
            for name in STORES:
                for disk in DISKS:
                    bench.resume(name, disk)
        print_table(bench, arguments.rounds)
        bench.engine.close()


if __name__ == "__main__":
    main()
