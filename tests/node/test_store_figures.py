"""What a node did with its store is counted by what it does, and shown to people and programs."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from kvferry.node.cli import node as node_group
from kvferry.node.io_lane import PROBE_SECONDS
from kvferry.proto.v1 import worker_pb2
from kvferry.store.vlkv3 import FIXED_BYTES

from .running_node import ROW_BYTES, RunningNode, running_node

Prompts = dict[str, list[int]]
Own = Callable[[list[int]], list[int]]


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("kv*.kv"))


def test_a_chat_writes_little_more_than_the_bytes_of_its_new_rows(
    stored: RunningNode, store_of: Path, prompts: Prompts, own: Own, session: str
) -> None:
    """Whole files would write the rows of every turn before it again."""
    n_before, on_disk = stored.status().load.store.bytes_saved, file_bytes(store_of)
    tokens = own(prompts["multi"])
    for turn in range(1, 7):
        answer = stored.run_turn(tokens, session=session, max_tokens=20, end_token_ids=[])
        stored.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id=session), timeout=20)  # waits for its save
        n_rows = len(tokens) + len(answer.tokens) - 1
        tokens = [*tokens, *answer.tokens, *range(100 * turn, 100 * turn + 40)]
    written = stored.status().load.store.bytes_saved - n_before
    assert n_rows * ROW_BYTES < written <= 1.1 * n_rows * ROW_BYTES
    assert file_bytes(store_of) - on_disk == written


def test_what_is_restored_refused_and_quarantined_is_counted(
    stored: RunningNode, store_of: Path, prompts: Prompts, own: Own, session: str
) -> None:
    prompt = own(prompts["multi"])
    n_published = stored.status().load.snapshots_published
    stored.run_turn(prompt, session=session, max_tokens=1)
    stored.wait_for(f"load.snapshots_published > {n_published}")
    (path,) = (
        p
        for p in store_of.glob("kv3*.kv")
        if p.stat().st_mtime == max(q.stat().st_mtime for q in store_of.glob("kv3*.kv"))
    )
    before = stored.status().load.store
    stored.drop(session)
    assert stored.run_turn([*prompt, 3], session=session, max_tokens=1).sources == (0, len(prompt), 1)
    restored = stored.status().load.store
    assert len(prompt) * ROW_BYTES <= restored.bytes_restored - before.bytes_restored <= 1.01 * len(prompt) * ROW_BYTES
    data = bytearray(path.read_bytes())
    data[FIXED_BYTES + 4 * len(prompt) + 100] ^= 1
    path.write_bytes(data)
    stored.drop(session)
    assert stored.run_turn([*prompt, 3], session=session, max_tokens=1).sources == (0, 0, len(prompt) + 1)
    after = stored.wait_for(f"load.store.files_quarantined > {before.files_quarantined}").load.store
    assert after.files_refused == before.files_refused + 1


def test_budgets_that_refuse_are_counted_and_shown(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, own: Own
) -> None:
    flags = ("--store", str(tmp_path / "store"), "--store-write-per-hour", "8MiB", "--store-max-bytes", "6MiB")
    with running_node(tmp_path / "n", smollm2_path, *flags, "--publish-min-tokens", "24") as node:
        kept = random.Random(1).sample(range(1000), 100)
        node.run_turn(kept, session="kept", max_tokens=1)
        node.wait_for("load.snapshots_published == 1")
        node.run_turn([*kept, *range(8)], session="kept", max_tokens=1)
        node.run_turn(own(prompts["long"][:150]), session="large", max_tokens=1)
        node.wait_for("load.store.saves_without_room == 1")
        node.run_turn(own(prompts["code"][:90]), session="next", max_tokens=1)
        status = node.wait_for("load.store.saves_over_write_budget + load.snapshots_published >= 2")
        figures = status.load.store
        shown = CliRunner().invoke(node_group, ["status", node.address]).output
        told = json.loads(CliRunner().invoke(node_group, ["status", node.address, "--json"]).output)["load"]["store"]
    assert figures.saves_not_worth_it == 1
    assert figures.saves_over_write_budget == 1
    assert figures.write_budget_left == (8 << 20) - figures.bytes_saved
    assert f"{figures.bytes_saved / 1e6:.1f} MB saved" in shown
    assert (told["saves_without_room"], told["saves_over_write_budget"]) == ("1", "1")  # uint64 are text in JSON


def test_a_store_is_well_again_when_somebody_makes_room_on_its_disk(
    small_disk: Path, tmp_path: Path, smollm2_path: Path, prompts: Prompts, own: Own
) -> None:
    """Without a save that shows it: on a node that nobody talks to, the alert would stay for ever."""
    with running_node(tmp_path / "n", smollm2_path, "--store", str(small_disk), "--publish-min-tokens", "24") as node:
        theirs = small_disk / "theirs"
        theirs.write_bytes(bytes((64 << 20) - (1 << 20)))
        node.run_turn(own(prompts["multi"]), max_tokens=1)
        said = node.wait_for("not load.store_ok").load.store_error
        assert "its disk has" in said
        os.truncate(theirs, (64 << 20) - (2 << 20))  # some room, and not enough, at every moment
        time.sleep(2 * PROBE_SECONDS + 1)
        assert node.status().load.store_error == said
        theirs.unlink()
        node.wait_for("load.store_ok")
