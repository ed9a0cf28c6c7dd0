"""What may still be taken is what the system has or a control group leaves, whichever is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.engine.available import available_memory

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable:   8388608 kB\n")
    return tmp_path / "proc"


def group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (folder / name).write_text(f"{body}\n")


def test_without_groups_it_is_what_the_system_has(proc: Path, tmp_path: Path) -> None:
    assert available_memory(proc, tmp_path / "none") == 8 * GIB


def test_the_tightest_group_above_counts_and_its_file_cache_is_free(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/slice/unit\n")
    stat = f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 2}"
    group(tmp_path / "cg/slice", {"memory.max": 3 * GIB, "memory.current": 2 * GIB, "memory.stat": stat})
    group(tmp_path / "cg/slice/unit", {"memory.max": "max", "memory.current": GIB, "memory.stat": stat})
    assert available_memory(proc, tmp_path / "cg") == 2 * GIB


def test_the_older_kind_of_groups_is_understood(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("9:cpu,memory:/board\n0::/\n")
    stat = f"total_inactive_file {GIB // 4}\ntotal_active_file {GIB // 4}"
    files = {"memory.limit_in_bytes": GIB, "memory.usage_in_bytes": 3 * GIB // 4, "memory.stat": stat}
    group(tmp_path / "cg/memory/board", files)
    assert available_memory(proc, tmp_path / "cg") == 3 * GIB // 4


def test_a_group_that_is_over_its_limit_leaves_nothing(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/unit\n")
    group(tmp_path / "cg/unit", {"memory.max": GIB, "memory.current": 2 * GIB, "memory.stat": "anon 1"})
    assert available_memory(proc, tmp_path / "cg") == 0
