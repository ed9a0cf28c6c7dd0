"""Forks writers, kills them, and looks at what they leave. Run as a process of its own: `kill_writer.py ROOT MODE N
SEED VERSION`.

Version 3 writes each session as two segments. MODE "random": N kills at random instants. MODE "calls": a kill before
each file system call of a save, one call after the other. Prints a JSON object of counts; a torn file, wrong rows or a
lost old file are counted, not raised. MODE "pile": N kills with a temporary file open, and one start after them all.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Literal
from uuid import uuid4

import numpy as np

from kvferry.store.errors import SnapshotRejected
from kvferry.store.faults import FaultyFileSystem
from kvferry.store.fs import FileSystem, PosixFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.inspection import load_snapshot
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.segment_file import Terms, open_segment
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(4, 2, 32)
N_TOKENS = 200
VERSION = int(sys.argv[5])
MAX_FILES = 12 if VERSION == 1 else 8
N_SESSIONS = 12 if VERSION == 1 else 4  # of version 3, each has two files
VOCAB = 1 << 20
COUNTED = (
    "kills",
    "finished",
    "seen",
    "torn",
    "wrong",
    "lost",
    "temps_left",
    "temps_after_reap",
    "refused_after_start",
)


def ids_of(number: int) -> np.ndarray:
    return np.arange(number, number + N_TOKENS, dtype=np.int32)


def rows_of(number: int) -> MemoryRows:
    shape = (GEOMETRY.n_layers, N_TOKENS, GEOMETRY.kv_dim)
    k = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + number
    return MemoryRows(k, -k)


def open_store(root: Path, fs: FileSystem | None = None, max_files: int = MAX_FILES) -> SnapshotStore:
    version: Literal[1, 3] = 3 if VERSION == 3 else 1
    store = SnapshotStore(
        root, "kill", GEOMETRY, VOCAB, 1 << 40, max_files, "node-1", trash_grace_s=0, fs=fs, version=version
    )
    if version == 3:
        store.refresh()
    return store


def publish(store: SnapshotStore, number: int) -> None:
    if VERSION == 3:
        store.publish(ids_of(number)[: N_TOKENS // 2], rows_of(number))
    store.publish(ids_of(number), rows_of(number))


def write_until_killed(root: Path, first: int) -> None:
    store = open_store(root)
    for number in itertools.count(first):
        publish(store, number)


def kill_before_call(root: Path, number: int, n_calls: int) -> None:
    left = itertools.count(n_calls, -1)

    def die(_: str) -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    publish(open_store(root, FaultyFileSystem(on_call=die)), number)


def look(root: Path, counts: dict[str, int]) -> None:
    """Judges every file that has a final name, rows included; then starts again and reaps."""
    folder = root / "kill"
    for path in folder.glob("kv3_*.kv"):
        with open_segment(PosixFileSystem(), path, Terms()) as file:
            counts["torn"] += bool(file.damaged_blocks())
            counts["seen"] += 1
    for path in folder.glob("kv_*.kv"):
        try:
            found = load_snapshot(PosixFileSystem(), path, GEOMETRY, VOCAB)
        except SnapshotRejected:
            counts["torn"] += 1
            continue
        wanted = rows_of(int(found.token_ids[0]))
        counts["wrong"] += not (np.array_equal(found.k, wanted.k) and np.array_equal(found.v, wanted.v))
        counts["seen"] += 1
    counts["temps_left"] += len(list(folder.glob("*.tmp")))
    store = open_store(root)
    store.reap()
    store.refresh()
    counts["temps_after_reap"] += len(list(folder.glob("*.tmp")))
    counts["refused_after_start"] += len(store.refused()) + store.statistics().n_orphans
    for number in range(N_SESSIONS) if VERSION == 3 else ():
        match = store.find(ids_of(number))
        if match is not None:
            rows, wanted = MemoryRows.empty(GEOMETRY, match.n_common), rows_of(number)
            store.restore(match, match.n_common, rows)
            counts["wrong"] += not np.array_equal(rows.k, wanted.k[:, : match.n_common])


class Deadly:
    """Told of each call, kills this process at one of those that are made with the temporary file open."""

    def __init__(self, n_writes: int) -> None:
        self.left = n_writes

    def __call__(self, call: str) -> None:
        if call in {"fstat", "writev", "fsync"}:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def pile_up(root: Path, n_kills: int, moments: random.Random) -> None:
    """Kills N writers while their temporary file is being written, and looks at nothing in between."""
    deadly = Deadly(1 << 30)
    store = open_store(root, FaultyFileSystem(on_call=deadly), max_files=1 << 20)
    for kill in range(n_kills):
        deadly.left = moments.choice(
            (0, 0, 0, 0, 1, 2, 3)
        )  # most right after it was made: the others look at all files
        child = os.fork()
        if child == 0:
            publish(store, 1000 * (kill + 1))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)


def main() -> None:
    root, mode, n_kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    counts = dict.fromkeys(COUNTED, 0)
    moments = random.Random(seed)
    store = open_store(root)
    store.reap()
    foreign = store.path / f"kv_{0:016x}.kv.node-2.{uuid4().hex}.1000.tmp"
    foreign.write_bytes(b"another node is writing this")
    started = time.monotonic()
    for number in range(N_SESSIONS):
        publish(store, number)
    save_s = (time.monotonic() - started) / N_SESSIONS
    if mode == "pile":
        pile_up(root, n_kills, moments)
        counts["kills"] = n_kills
        look(root, counts)
    for kill in range(n_kills if mode != "pile" else 0):
        child = os.fork()
        if child == 0:
            if mode == "random":
                write_until_killed(root, 1000 * (kill + 1))
            else:
                kill_before_call(root, 1000 * (kill + 1), kill)
            os._exit(0)
        if mode == "random":
            time.sleep(moments.uniform(0, 3 * save_s))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        counts["kills" if os.WIFSIGNALED(status) else "finished"] += 1
        # one was evicted for the save that was killed, one gives its place to the save of node-2
        counts["lost"] += max(0, MAX_FILES - 2 - len(list((root / "kill").glob("*.kv"))))
        look(root, counts)
        if mode == "calls" and os.WIFEXITED(status):
            break
    counts["foreign_temp_kept"] = foreign.exists()
    print(json.dumps(counts))


main()
