"""The small programs that units call on a board, run here as they run there; and what a bundle is named by."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

RK3588 = {0: 530, 1: 530, 2: 530, 3: 530, 4: 1024, 5: 1024, 6: 1024, 7: 1024}


@pytest.fixture
def programs(ansible: Path) -> Path:
    return ansible / "roles/base/files"


def sysfs_with(folder: Path, capacities: dict[int, int | str]) -> Path:
    for core, capacity in capacities.items():
        (folder / f"cpu{core}").mkdir(parents=True)
        (folder / f"cpu{core}/cpu_capacity").write_text(f"{capacity}\n")
    (folder / "cpufreq").mkdir(parents=True)  # no core, though its name begins like one
    return folder


@pytest.mark.parametrize(
    ("capacities", "allowed", "chosen"),
    [
        pytest.param(RK3588, range(8), {4, 5, 6, 7}, id="RK3588"),
        pytest.param({0: 1024, 1: 1024, 2: 530, 3: 530}, range(4), {0, 1}, id="big cores first"),
        pytest.param({0: 250, 1: 980, 2: 1024}, range(3), {1, 2}, id="big clusters that differ a little"),
        pytest.param({0: 1024, 1: 1024}, range(2), {0, 1}, id="all alike"),
        pytest.param({}, range(2), {0, 1}, id="the kernel says nothing"),
        pytest.param({0: 530, 1: "", 2: 1024}, range(3), {0, 1, 2}, id="one is unknown"),
        pytest.param(RK3588, range(4), {0, 1, 2, 3}, id="only small ones are allowed"),
        pytest.param(RK3588, range(2, 6), {4, 5}, id="some are allowed"),
    ],
)
def test_big_cores_are_found_by_their_capacity(
    tmp_path: Path, programs: Path, capacities: dict[int, int | str], allowed: range, chosen: set[int]
) -> None:
    assert load_on_big_cores(programs).big_cores(sysfs_with(tmp_path / "cpu", capacities), set(allowed)) == chosen


def load_on_big_cores(programs: Path) -> ModuleType:
    namespace = ModuleType("on_big_cores")
    exec(compile((programs / "on_big_cores.py").read_text(), "on_big_cores.py", "exec"), namespace.__dict__)  # noqa: S102
    return namespace


def test_the_program_really_runs_on_the_big_cores(tmp_path: Path, programs: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one processor has no big and small ones")
    big = allowed[-1]
    sysfs = sysfs_with(tmp_path / "cpu", {core: 1024 if core == big else 400 for core in allowed})
    ask = "import os; print(sorted(os.sched_getaffinity(0)))"
    done = subprocess.run(
        [sys.executable, programs / "on_big_cores.py", sys.executable, "-c", ask],
        env={**os.environ, "ON_BIG_CORES_SYSFS": str(sysfs)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"[{big}]\n"
    assert f"on the big cores [{big}]" in done.stderr


def test_it_becomes_the_program_so_that_signals_reach_it(programs: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, programs / "on_big_cores.py", "sh", "-c", "echo $$"], stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=30)
    assert int(out) == process.pid


def wait_until_ready(programs: Path, file: Path, main_pid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [programs / "wait_until_ready.sh", file],
        env={**os.environ, "MAINPID": str(main_pid)},
        stderr=subprocess.DEVNULL,
    )


def test_a_start_waits_for_the_ready_file(tmp_path: Path, programs: Path) -> None:
    ready = tmp_path / "ready.json"
    with wait_until_ready(programs, ready, os.getpid()) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
        ready.write_text("{}")
        assert waiting.wait(10) == 0


def test_a_start_fails_when_the_service_ends_before_it_is_ready(tmp_path: Path, programs: Path) -> None:
    service = subprocess.Popen(["sleep", "60"])
    with wait_until_ready(programs, tmp_path / "ready.json", service.pid) as waiting:
        service.kill()
        service.wait()
        assert waiting.wait(10) == 1


def small_tree(folder: Path) -> Path:
    (folder / "node").mkdir(parents=True)
    (folder / "node/core.py").write_text("x = 1\n")
    (folder / "src/kvferry").mkdir(parents=True)
    (folder / "src/kvferry/node").symlink_to("../../node")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (folder / name).write_text(name)
    return folder


def digest(bundle: ModuleType, tree: Path) -> str:
    copy = tree.with_name(f"{tree.name}-copy")
    shutil.rmtree(copy, ignore_errors=True)
    bundle._copy_sources(tree, copy)
    found: str = bundle._digest_of_tree(copy)
    return found


def test_a_release_is_named_by_its_sources(tmp_path: Path, bundle: ModuleType) -> None:
    tree = small_tree(tmp_path / "tree")
    before = digest(bundle, tree)
    (tree / "node/__pycache__").mkdir()
    (tree / "node/__pycache__/core.cpython-311.pyc").write_bytes(b"compiled")
    (tree / "notes.txt").write_text("not part of the wheel")
    assert digest(bundle, tree) == before
    (tree / "node/core.py").write_text("x = 2\n")
    assert digest(bundle, tree) != before


def test_a_bundle_carries_the_sum_of_each_wheel_and_is_the_same_each_time(tmp_path: Path, bundle: ModuleType) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("b-1-py3-none-any.whl", "a-1-py3-none-any.whl"):
        (wheels / name).write_bytes(name.encode())
    for tar in (tmp_path / "one.tar", tmp_path / "two.tar"):
        bundle._write_tar(wheels, tar)
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(tmp_path / "one.tar", unpacked, filter="data")
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=unpacked, check=False).returncode == 0
    (unpacked / "a-1-py3-none-any.whl").write_bytes(b"damaged")
    assert subprocess.run(check, cwd=unpacked, check=False, capture_output=True).returncode == 1
