"""Two nodes on one directory, a budget, crashes and strangers, against a simple model: a dictionary of what was
published."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.store import names, vlkv
from kvferry.store.errors import SnapshotGone, SnapshotRejected, StoreFull
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

from .no_sync import NoSync

GEOMETRY = KvGeometry(2, 1, 2, 16)
VOCAB = 4
FINGERPRINT = "feed"

# Short sequences over two tokens: most of them are prefixes of one another, or nearly.
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(tuple)
nodes = st.sampled_from(["node-1", "node-2"])


def _rows_of(tokens: tuple[int, ...]) -> MemoryRows:
    """Rows as an engine's: each depends on its own token and all before it, so equal prefixes have equal rows."""
    prefix_values = np.cumsum(np.array(tokens, np.float32) + 0.5)
    rows = MemoryRows.empty(GEOMETRY, len(tokens))
    for layer in range(GEOMETRY.n_layers):
        rows.k[layer] = prefix_values[:, None] + layer
        rows.v[layer] = -prefix_values[:, None] - layer
    return rows


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class StoreMachine(RuleBasedStateMachine):
    """The model: which sequences were published and not lost, and which of them each node can know of."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.unique = itertools.count(1)
        self.published: set[tuple[int, ...]] = set()
        self.damaged: set[str] = set()

    @initialize(max_files=st.integers(1, 5), max_tokens=st.integers(40, 120))
    def start(self, max_files: int, max_tokens: int) -> None:
        self.max_files = max_files
        self.max_bytes = 64 * max_files + max_tokens * vlkv.token_bytes(GEOMETRY)
        self.stores = {node: self._open(node) for node in ("node-1", "node-2")}

    def _open(self, node: str) -> SnapshotStore:
        return SnapshotStore(
            self.root,
            FINGERPRINT,
            GEOMETRY,
            VOCAB,
            self.max_bytes,
            self.max_files,
            node,
            fs=NoSync(),
            unique=lambda: f"{next(self.unique):032x}",
        )

    @property
    def folder(self) -> Path:
        return self.root / FINGERPRINT

    def _on_disk(self) -> set[str]:
        return {path.name for path in self.folder.glob("kv_*.kv")}

    @rule(node=nodes, tokens=sequences)
    def publish(self, node: str, tokens: tuple[int, ...]) -> None:
        name = vlkv.file_name(vlkv.fnv1a(np.array(tokens, np.int32)))
        if name in self.damaged and name in self._on_disk():
            return
        was_there = name in self._on_disk()
        info = self.stores[node].publish(tokens, _rows_of(tokens))
        assert info.name == name
        assert info.already_there == was_there
        assert name in self._on_disk()
        assert self.stores[node].find(tokens, min_tokens=1).n_common == len(tokens)
        self.damaged.discard(name)
        self.published.add(tokens)

    @rule(node=nodes, tokens=sequences)
    def publish_with_another_one_pinned(self, node: str, tokens: tuple[int, ...]) -> None:
        store = self.stores[node]
        match = store.find(tokens, min_tokens=1)
        if match is None or match.name not in self._on_disk():
            return
        with store.pin(match.name):
            with contextlib.suppress(StoreFull):
                self.publish(node, tokens)
            assert match.name in self._on_disk()

    @rule(node=nodes)
    def refresh(self, node: str) -> None:
        store = self.stores[node]
        store.refresh()
        assert store.statistics().n_known + len(store.refused()) == len(self._on_disk())

    @rule(node=nodes, tokens=sequences)
    def announce(self, node: str, tokens: tuple[int, ...]) -> None:
        name = vlkv.file_name(vlkv.fnv1a(np.array(tokens, np.int32)))
        try:
            known = self.stores[node].announce(name)
        except SnapshotRejected:
            assert name in self.damaged
        else:
            assert known or name not in self._on_disk() or name in self.damaged

    @rule(node=nodes, tokens=sequences, data=st.data())
    def find_and_restore(self, node: str, tokens: tuple[int, ...], data: st.DataObject) -> None:
        """Whatever comes out are the right rows; the best match is at least as long as any that this node must know
        of."""
        store = self.stores[node]
        match = store.find(tokens, min_tokens=1)
        if match is None:
            return
        assert tuple(match.token_ids) == tokens[: match.n_common]
        n_rows = data.draw(st.integers(1, match.n_common))
        rows = MemoryRows.empty(GEOMETRY, n_rows)
        try:
            store.restore(match, n_rows, rows)
        except (SnapshotGone, SnapshotRejected):
            assert match.name not in self._on_disk() or match.name in self.damaged
            assert getattr(store.find(tokens, min_tokens=1), "name", None) != match.name
            return
        wanted = _rows_of(tokens[:n_rows])
        assert np.array_equal(rows.k, wanted.k)
        assert np.array_equal(rows.v, wanted.v)

    @rule(node=nodes, tokens=sequences)
    def a_refreshed_node_finds_the_best(self, node: str, tokens: tuple[int, ...]) -> None:
        self.stores[node].refresh()
        there = {
            sequence
            for sequence in self.published
            if (name := vlkv.file_name(vlkv.fnv1a(np.array(sequence, np.int32)))) in self._on_disk()
            and name not in self.damaged
        }
        best = max((_common(sequence, tokens) for sequence in there), default=0)
        match = self.stores[node].find(tokens, min_tokens=1)
        assert (match.n_common if match else 0) >= best

    @rule(node=nodes)
    def evict(self, node: str) -> None:
        self.stores[node].evict()

    @rule(node=nodes)
    def restart(self, node: str) -> None:
        """A crash in the middle of a save, and the next start."""
        self.folder.mkdir(exist_ok=True)
        temp = self.folder / names.temp_name(f"kv_{1:016x}.kv", node, f"{next(self.unique):032x}", 1)
        temp.write_bytes(b"half")
        self.stores[node] = self._open(node)
        self.stores[node].reap()
        assert not temp.exists()

    @precondition(lambda self: self.folder.exists() and self._on_disk())
    @rule(data=st.data(), n_bytes=st.integers(0, 63))
    def a_disk_damages_a_file(self, data: st.DataObject, n_bytes: int) -> None:
        name = data.draw(st.sampled_from(sorted(self._on_disk())))
        content = (self.folder / name).read_bytes()
        (self.folder / name).write_bytes(content[:n_bytes])
        self.damaged.add(name)

    @invariant()
    def the_budget_holds(self) -> None:
        if self.folder.exists():
            assert len(self._on_disk()) <= self.max_files
            assert sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()) <= self.max_bytes
            assert not list(self.folder.glob("*.tmp"))

    def teardown(self) -> None:
        shutil.rmtree(self.root)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
