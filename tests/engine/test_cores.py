"""Which processors the engine's threads run on: made-up boards, and threads that are really pinned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvferry.engine import cores
from kvferry.engine.cores import CoreChoice, big_cores, choose_cores, cpu_quota
from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.packing import pack_model
from kvferry.engine.selftest import made_model

# Four A55 and four A76; the kernel of one board states 414 for the small ones, another's 530.
RK3588 = [414, 414, 414, 414, 1024, 1024, 1024, 1024]


def board(folder: Path, capacities: Sequence[int]) -> Path:
    """A tree as /sys/devices/system/cpu is on such a board."""
    for number, capacity in enumerate(capacities):
        core = folder / f"cpu{number}"
        core.mkdir(parents=True)
        (core / "cpu_capacity").write_text(f"{capacity}\n")
    (folder / "cpufreq").mkdir()
    (folder / "cpuidle").mkdir()
    return folder


@pytest.fixture
def on_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is chosen on a board with these capacities, and these processors allowed."""

    def choose(capacities: Sequence[int], allowed: set[int], quota: str = "max 100000") -> CoreChoice:
        folder = board(tmp_path / "cpu", capacities)
        (tmp_path / "group").write_text("0::/\n")
        (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
        monkeypatch.setattr(cores, "big_cores", lambda allowed: big_cores(allowed, folder))
        monkeypatch.setattr(cores, "cpu_quota", lambda: cpu_quota(tmp_path / "group", tmp_path))
        return choose_cores()

    return choose


def test_an_rk3588_computes_on_its_big_cores(on_board):
    choice = on_board(RK3588, set(range(8)))
    assert (choice.pinned, choice.n_threads) == (frozenset({4, 5, 6, 7}), 4)
    assert choice.others == frozenset({0, 1, 2, 3})
    assert str(choice) == "the big ones, 4-7 of 0-7"


def test_another_numbering_changes_nothing(on_board):
    choice = on_board([1024, 1024, 530, 530, 530, 530, 1024, 1024], set(range(8)))
    assert (choice.pinned, choice.n_threads) == (frozenset({0, 1, 6, 7}), 4)
    assert str(choice) == "the big ones, 0-1,6-7 of 0-7"


def test_of_those_that_may_be_used_the_big_ones_count(on_board):
    choice = on_board(RK3588, {0, 1, 2, 6})
    assert (choice.pinned, choice.n_threads) == (frozenset({6}), 1)


def test_where_all_that_may_be_used_are_alike_nothing_is_pinned(on_board):
    choice = on_board(RK3588, {0, 1, 2, 3})
    assert (choice.pinned, choice.others, choice.n_threads) == (None, None, 4)
    assert str(choice) == "0-3, all alike"


def test_a_quota_is_not_used_up_by_a_thread_too_many(on_board):
    choice = on_board(RK3588, set(range(8)), "250000 100000")
    assert (choice.pinned, choice.n_threads) == (frozenset({4, 5, 6, 7}), 2)
    assert str(choice).endswith("with the time of 2.5")


def test_half_a_processor_makes_one_thread():
    assert CoreChoice(frozenset({0, 1}), frozenset({0, 1}), 0.5).n_threads == 1


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/a/b", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "max 100000"}, 3.0),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "50000 100000"}, 0.5),
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "nonsense"}, None),
        ("4:cpu,x:/a", {"cpu,x/a/cpu.cfs_quota_us": "-1", "cpu,x/a/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu,x:/a", {"cpu,x/a/cpu.cfs_quota_us": "90000", "cpu,x/a/cpu.cfs_period_us": "30000"}, 3.0),
        ("4:memory:/a", {"memory/a/cpu.max": "50000 100000"}, None),
        ("nonsense", {}, None),
    ],
)  # fmt: skip
def test_the_quota_of_a_group_and_of_those_above_it(tmp_path: Path, line: str, files: dict[str, str], quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(f"9:memory:/\n{line}\n")
    assert cpu_quota(tmp_path / "self", tmp_path) == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path):
    assert cpu_quota(tmp_path / "nothing", tmp_path) is None


def test_the_engines_threads_keep_to_their_processors():
    chosen = frozenset({max(os.sched_getaffinity(0))})
    packed = pack_model(made_model(), 64)
    engine = Engine(packed, EngineOptions(n_threads=3, kv_bytes=1 << 20, cores=chosen), "0" * 32)
    engine.forward([Chunk(engine.new_sequence(), np.zeros(3, np.int32))])
    for thread in engine._workers._threads:
        assert thread.native_id is not None
        while os.sched_getaffinity(thread.native_id) != chosen:  # it pins itself when it begins
            pass
    engine.close()


@pytest.mark.parametrize(
    ("capacities", "big"),
    [
        ({0: 530, 1: 530, 2: 1024, 3: 1024}, {2, 3}),
        ({0: 1024, 1: 1000}, {0, 1}),
        ({0: 530}, {0, 1}),  # the kernel does not know all of them
        ({}, {0, 1}),
    ],
    ids=["two of four", "nearly equal", "one unknown", "all unknown"],
)
def test_big_cores_are_told_by_capacity(tmp_path: Path, capacities, big):
    for core, capacity in capacities.items():
        (tmp_path / f"cpu{core}").mkdir()
        (tmp_path / f"cpu{core}/cpu_capacity").write_text(f"{capacity}\n")
    assert big_cores(set(capacities) if len(capacities) > 1 else {0, 1}, tmp_path) == big
