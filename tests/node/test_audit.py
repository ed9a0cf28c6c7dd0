"""Restored rows are computed again in idle time: what differs is dropped, counted and told."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.engine.kv_cache import KvGeometry, KvPool, KvSequence
from kvferry.node.audit import PIECE_ROWS, RestoreAudit
from kvferry.node.sessions import Resident, ResidentSessions
from kvferry.store import vlkv

from .running_node import running_node

Prompts = dict[str, list[int]]
Own = Callable[[list[int]], list[int]]
SHAPE = KvGeometry(n_layers=2, n_kv_heads=1, head_dim=4)


def write(sequence: KvSequence, token_ids: NDArray[np.int32]) -> None:
    """Rows that tell their tokens, as an engine's are a function of theirs."""
    start = sequence.n_rows
    rows = np.repeat(token_ids.astype(np.float32)[:, None], 4, axis=1)
    for layer in range(SHAPE.n_layers):
        sequence.write_rows(layer, start, rows + layer, -rows)
    sequence.commit(start + len(token_ids))


class Kit:
    """A pool, sessions, and an audit whose clock is turned by hand."""

    def __init__(self, n_blocks: int = 32) -> None:
        self.pool = KvPool(SHAPE, n_blocks * SHAPE.block_bytes)
        self.sessions = ResidentSessions()
        self.now = 0.0
        self.computed: list[tuple[int, int]] = []
        self.audit = RestoreAudit(self.compute, SHAPE, lambda: self.now, random.Random(1), every_seconds=10.0)

    def compute(self, sequence: KvSequence, token_ids: NDArray[np.int32]) -> None:
        self.computed.append((sequence.n_rows, len(token_ids)))
        write(sequence, token_ids)

    def restored(self, session_id: str, n_rows: int, n_restored: int) -> Resident:
        token_ids = np.arange(n_rows, dtype=np.int32)
        resident = Resident(session_id, token_ids, KvSequence(self.pool), n_rows)
        write(resident.sequence, token_ids)
        self.sessions.keep(resident)
        self.audit.note(session_id, n_restored, "kv3_x.kv")
        return resident

    def look(self, n_times: int) -> list[str]:
        found = []
        for _ in range(n_times):
            self.now += 10.0
            wrong = self.audit.look(self.sessions)
            while self.audit.is_looking:
                wrong = self.audit.look(self.sessions)
            if wrong is not None:
                found.append(wrong)
        return found


def test_good_rows_are_computed_again_block_by_block_and_nothing_is_said() -> None:
    kit = Kit()
    kit.restored("a", 100, 100)
    n_free = kit.pool.n_free_blocks
    assert kit.look(40) == []
    assert {at for at, _ in kit.computed} == set(range(0, 96, PIECE_ROWS))
    assert (kit.audit.n_audited, kit.audit.n_wrong) == (40, 0)
    assert kit.pool.n_free_blocks == n_free


def test_one_wrong_bit_is_found_and_its_session_named(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit()
    kit.restored("good", 64, 64)
    bad = kit.restored("bad", 64, 64)
    block = bad.sequence.block_table[1]
    kit.pool.tiles[block, 1].view(np.uint8).reshape(-1)[37] ^= 1
    assert kit.look(40) == ["bad"]
    assert "ALARM: rows 32 to 63 of session bad, restored from snapshot kv3_x.kv" in caplog.text
    assert "(layers 1)" in caplog.text
    assert kit.audit.n_wrong == 1


def test_only_rows_that_were_restored_are_looked_at() -> None:
    kit = Kit()
    kit.restored("a", 200, 70)
    kit.look(30)
    assert {at for at, _ in kit.computed} == set(range(0, 64, PIECE_ROWS))


def test_it_waits_between_two_looks() -> None:
    kit = Kit()
    kit.restored("a", 64, 64)
    for _ in range(100):
        kit.now += 1.0
        kit.audit.look(kit.sessions)
    assert kit.audit.n_audited == 10


def test_a_turn_that_comes_waits_for_a_few_rows_at_most() -> None:
    kit = Kit()
    kit.restored("a", 64, 64)
    n_free = kit.pool.n_free_blocks
    kit.now += 10.0
    assert kit.audit.look(kit.sessions) is None
    assert kit.audit.is_looking
    assert [n for _, n in kit.computed] == [PIECE_ROWS]
    kit.audit.abandon()  # what the turn's begin does
    assert not kit.audit.is_looking
    assert kit.pool.n_free_blocks == n_free


def test_a_session_that_is_dropped_meanwhile_is_left_alone() -> None:
    kit = Kit()
    resident = kit.restored("a", 64, 64)
    kit.now += 10.0
    kit.audit.look(kit.sessions)
    kit.sessions.take("a")
    resident.sequence.release()
    assert kit.audit.look(kit.sessions) is None
    assert not kit.audit.is_looking
    assert kit.pool.n_free_blocks == 32


def test_without_memory_it_leaves_the_turns_alone() -> None:
    kit = Kit(n_blocks=2)
    kit.restored("a", 64, 64)
    assert kit.look(5) == []
    assert kit.audit.n_audited == 0


def test_a_file_that_rotted_unseen_is_found_by_a_node(
    smollm2_path: Path, tmp_path: Path, prompts: Prompts, own: Own, session: str
) -> None:
    """Version 1 has no checksum over its rows: nothing else can notice."""
    prompt = own(prompts["chat_en"] * 2)
    store = ("--store", str(tmp_path / "store"), "--store-version", "1")
    with running_node(tmp_path / "n", smollm2_path, *store) as node:
        node.run_turn(prompt, session=session, max_tokens=4, end_token_ids=[])
        node.wait_for("load.snapshots_published == 1")
        (path,) = (tmp_path / "store").glob("*/kv_*.kv")
        data = bytearray(path.read_bytes())
        first_row = vlkv.HEADER_BYTES + vlkv.ID_BYTES * int.from_bytes(data[24:28], "little")
        for at in range(first_row, len(data), 1024):
            data[at] ^= 1  # the lowest bit of a float
        path.write_bytes(data)
        node.drop(session)
        node.run_turn([*prompt, 7], session=session, max_tokens=1, end_token_ids=[])
        node.wait_for("load.blocks_wrong == 1", seconds=60)
        assert "ALARM: rows" in node.log
        assert f"of session {session}, restored from snapshot {path.name}" in node.log
