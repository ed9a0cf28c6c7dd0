"""The small programs that units call on a board, run here as they run there; and what a bundle is named by."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import load_program


@pytest.fixture
def programs(ansible: Path) -> Path:
    return ansible / "roles/base/files"


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


def board_of(folder: Path, *, swaps: str = "", root: str = "/dev/mmcblk0p2 / ext4 rw,noatime 0 0") -> Path:
    """The kernel's files of an RK3588 that boots from an SD card, fresh from its distribution but for the arguments."""
    files = {
        "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "schedutil\n",
        "sys/devices/system/cpu/cpufreq/policy4/scaling_governor": "performance\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
        "proc/sys/vm/swappiness": "60\n",
        "proc/swaps": f"Filename\tType\tSize\tUsed\tPriority\n/dev/zram0 partition 1 0 5\n{swaps}",
        "proc/self/mounts": f"proc /proc proc rw 0 0\n{root}\n/dev/nvme0n1p1 /srv ext4 rw,relatime 0 0\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


ALL_SETTINGS = {"governor": "performance", "huge_pages": "madvise", "swappiness": "10", "swap": "not-on-flash",
                "noatime": "yes"}  # fmt: skip


@pytest.fixture(scope="module")
def board_settings(ansible: Path) -> ModuleType:
    return load_program(ansible / "roles/base/files/board_settings.py")


def test_a_fresh_board_is_set_up_and_then_nothing_is_left_to_say(tmp_path: Path, board_settings: ModuleType) -> None:
    board = board_settings.Board(board_of(tmp_path))
    said = board_settings.check(board, ALL_SETTINGS)
    assert [sentence.partition(str(tmp_path))[2] for sentence in said] == [
        "/sys/devices/system/cpu/cpufreq/policy0/scaling_governor holds schedutil, not performance",
        "/sys/kernel/mm/transparent_hugepage/enabled holds always, not madvise",
        "/proc/sys/vm/swappiness holds 60, not 10",
    ]
    board_settings.apply(board, ALL_SETTINGS)
    assert board_settings.check(board, ALL_SETTINGS) == []


@pytest.mark.parametrize(
    ("swaps", "root", "said"),
    [
        ("/dev/mmcblk0p3 partition 1 0 -2", "/dev/mmcblk0p2 / ext4 rw,noatime 0 0", ["/dev/mmcblk0p3 swaps to"]),
        ("/var/swap file 1 0 -2", "/dev/mmcblk0p2 / ext4 rw,noatime 0 0", ["/var/swap swaps to"]),
        ("/var/swap file 1 0 -2", "/dev/nvme0n1p2 / ext4 rw,relatime 0 0", []),
        ("/srv/swap file 1 0 -2", "/dev/mmcblk0p2 / ext4 rw,noatime 0 0", []),
        ("/dev/sda2 partition 1 0 -2", "/dev/mmcblk0p2 / ext4 rw,relatime 0 0", ["/ lies on an SD card"]),
    ],
    ids=["a partition of the card", "a file on the card", "an SSD", "a file on an SSD", "a card that is written to"],
)
def test_what_wears_out_a_card_is_found(
    tmp_path: Path, board_settings: ModuleType, swaps: str, root: str, said: list[str]
) -> None:
    board = board_settings.Board(board_of(tmp_path, swaps=swaps, root=root))
    wear = {"swap": "not-on-flash", "noatime": "yes"}
    found = board_settings.check(board, wear)
    assert len(found) == len(said)
    assert all(sentence.startswith(start) for sentence, start in zip(found, said, strict=True))
    assert board_settings.check(board, {"swap": "keep", "noatime": "keep"}) == []


def test_a_board_without_these_files_needs_nothing(tmp_path: Path, board_settings: ModuleType) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/swaps").write_text("Filename\n")
    (tmp_path / "proc/self/mounts").write_text("/dev/vda1 / ext4 rw 0 0\n")
    assert board_settings.check(board_settings.Board(tmp_path), ALL_SETTINGS) == []
