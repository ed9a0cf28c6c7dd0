"""Sessions in a real pool, saved through the real I/O threads into a real store."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.kv_cache import KvGeometry, KvPool, KvSequence
from kvferry.node.io_threads import IoThreads
from kvferry.node.load import Totals
from kvferry.node.memory import RowMemory
from kvferry.node.messages import PublishDone, RestoreDone
from kvferry.node.ports import CoreLimits
from kvferry.node.sessions import Resident
from kvferry.store import geometry
from kvferry.store.snapshot_store import SnapshotStore

N_LAYERS, KV_DIM = 2, 4
SHAPE = KvGeometry(n_layers=N_LAYERS, n_kv_heads=1, head_dim=KV_DIM)
LIMITS = CoreLimits(
    max_sessions=4,
    publish_every_tokens=256,
    publish_min_tokens=16,
    restore_min_tokens=32,
    restore_deadline_seconds=1.0,
)


class Kit:
    """A memory of n_blocks, with a store."""

    def __init__(self, root: Path, n_blocks: int) -> None:
        def store_of(namespace: str) -> SnapshotStore:
            shape = geometry.KvGeometry(N_LAYERS, 1, KV_DIM)
            return SnapshotStore(root, "f" * 32, shape, 1000, 1 << 30, 1000, "n", tenant=namespace)

        self.pool = KvPool(SHAPE, n_blocks * SHAPE.block_bytes)
        self.store = store_of("")
        self.answers: queue.Queue[RestoreDone | PublishDone] = queue.Queue()
        self.io = IoThreads(
            open_store=store_of, new_sequence=self.new_sequence, deliver=self.answers.put, stall_seconds=5.0
        )
        self.io.start()
        self.totals = Totals()
        self.memory = RowMemory(
            pool=self.pool,
            new_sequence=self.new_sequence,
            io=self.io,
            limits=LIMITS,
            running=lambda: (),
            totals=self.totals,
        )

    def new_sequence(self) -> KvSequence:
        return KvSequence(self.pool)

    def resident(
        self, session_id: str, tokens: NDArray[np.int32], n_published: int = 0, namespace: str = ""
    ) -> Resident:
        """A session whose rows tell its tokens."""
        sequence = self.new_sequence()
        rows = np.repeat(tokens.astype(np.float32)[:, None], KV_DIM, axis=1)
        for layer in range(N_LAYERS):
            sequence.write_rows(layer, 0, rows + layer, -rows)
        sequence.commit(len(tokens))
        return Resident(session_id, tokens, sequence, n_published, namespace=namespace)

    def settle(self) -> None:
        """Take the answers of all publishes."""
        while self.memory.publisher.n_asked:
            answer = self.answers.get(timeout=10)
            assert isinstance(answer, PublishDone)
            self.memory.publisher.done(answer)


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    kit = Kit(tmp_path, n_blocks=8)
    yield kit
    assert kit.io.close(5.0)


def tokens(n: int, first: int = 0) -> NDArray[np.int32]:
    return np.arange(first, first + n, dtype=np.int32)


def rows_of(sequence: KvSequence) -> NDArray[np.float32]:
    k = np.empty((sequence.n_rows, KV_DIM), np.float32)
    v = np.empty_like(k)
    sequence.read_rows(0, 0, sequence.n_rows, k, v)
    return k[:, 0]


def test_a_session_that_goes_on_takes_its_own_rows_over(kit: Kit) -> None:
    resident = kit.resident("a", tokens(40), n_published=40)
    kit.memory.keep(resident)
    sequence, n_published = kit.memory.rows_for("a", tokens(60), 59)
    assert sequence is resident.sequence
    assert n_published == 40
    assert len(kit.memory.sessions) == 0


def test_a_session_that_went_another_way_keeps_the_common_part(kit: Kit) -> None:
    kit.memory.keep(kit.resident("a", tokens(40), n_published=40))
    wanted = np.concatenate([tokens(35), tokens(20, first=500)])
    sequence, n_published = kit.memory.rows_for("a", wanted, len(wanted) - 1)
    assert rows_of(sequence).tolist() == list(range(35))
    assert n_published == 35
    sequence.release()
    assert kit.pool.n_free_blocks == 8


def test_another_sessions_prefix_is_shared_and_both_stay(kit: Kit) -> None:
    kit.memory.keep(kit.resident("a", tokens(64)))
    sequence, _ = kit.memory.rows_for("b", tokens(64), 63)
    assert sequence.n_rows == 63
    assert kit.pool.n_free_blocks == 8 - 2 - 1  # the first block is shared, the second was copied in part
    assert kit.memory.sessions.get("a") is not None


def test_nothing_in_common_is_an_empty_sequence(kit: Kit) -> None:
    kit.memory.keep(kit.resident("a", tokens(64)))
    sequence, n_published = kit.memory.rows_for("b", tokens(64, first=900), 63)
    assert (sequence.n_rows, n_published) == (0, 0)


def test_the_least_recently_used_goes_first_and_is_saved_before(kit: Kit) -> None:
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        kit.memory.keep(kit.resident(name, tokens(64, first)))
    kit.memory.sessions.touch("a")
    assert kit.memory.make_room(3) == "later"  # 2 blocks are free; b and c are on their way to the store
    assert repr(kit.memory.sessions) == "<Resident a:64>"
    assert kit.memory.make_room(3) == "later"  # asking again lets nobody else go
    assert repr(kit.memory.sessions) == "<Resident a:64>"
    kit.settle()
    assert kit.pool.n_free_blocks == 6
    kit.store.refresh()
    for first in (100, 200):
        match = kit.store.find(tokens(64, first))
        assert match is not None
        assert match.n_common == 64


def test_a_published_session_goes_at_once(kit: Kit) -> None:
    kit.memory.keep(kit.resident("a", tokens(64), n_published=64))
    kit.memory.keep(kit.resident("b", tokens(64, 100), n_published=64))
    assert kit.memory.make_room(1) == "free"
    assert repr(kit.memory.sessions) == "<Resident b:64>"


def test_a_session_that_could_not_be_saved_goes_all_the_same(kit: Kit) -> None:
    resident = kit.resident("a", tokens(64))
    resident.publish_failed = True
    kit.memory.keep(resident)
    assert kit.memory.make_room(2) == "free"
    assert kit.pool.n_free_blocks == 8


def test_without_idle_sessions_there_is_no_room(kit: Kit) -> None:
    kit.new_sequence().reserve(8 * 32)
    assert kit.memory.make_room(1) == "never"


def test_the_number_of_sessions_is_bounded(kit: Kit) -> None:
    for index in range(6):
        kit.memory.keep(kit.resident(str(index), tokens(20, 100 * index), n_published=20))
    assert [r.session_id for r in kit.memory.sessions] == ["2", "3", "4", "5"]


def test_a_fork_is_published_while_the_session_goes_on(kit: Kit) -> None:
    resident = kit.resident("a", tokens(40))
    kit.memory.keep(resident)
    kit.memory.publisher.publish_fork(resident)
    resident.sequence.write_rows(0, 40, np.zeros((8, KV_DIM), np.float32), np.zeros((8, KV_DIM), np.float32))
    kit.settle()
    assert resident.n_published == 40
    assert kit.totals.snapshots_published == 1
    assert [p.n_tokens for p in kit.memory.publisher.published_since(0)[0]] == [40]


def test_a_pool_without_a_block_for_the_copy_publishes_the_full_blocks(kit: Kit) -> None:
    resident = kit.resident("a", tokens(40))
    kit.memory.keep(resident)
    kit.new_sequence().reserve(6 * 32)
    kit.memory.publisher.publish_fork(resident)
    kit.settle()
    assert resident.n_published == 32


def test_save_all_leaves_nothing_unsaved(kit: Kit) -> None:
    kit.memory.keep(kit.resident("a", tokens(64), n_published=60))
    kit.memory.keep(kit.resident("b", tokens(64, 100)))
    kit.memory.save_all()
    kit.settle()
    assert kit.memory.n_saved() == 2
