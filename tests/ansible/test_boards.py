"""The test kit's own promise: it leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import platformdirs
import pytest

from . import boards

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base() -> Path:
    reason = boards.why_not()
    if reason:
        pytest.skip(reason)
    root: Path = boards.base_root(platformdirs.user_cache_path("kvferry") / "test-boards")
    return root


def leftovers(prefix: str, folder: Path) -> list[str]:
    found = [str(path) for path in Path("/run/netns").glob(f"{prefix}-*")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{prefix}-*")]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if prefix in line]
    found += [str(folder)] if folder.exists() else []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes()
        except OSError:  # ended meanwhile
            continue
        if prefix.encode() in command or str(folder).encode() in command:
            found.append(command.decode(errors="replace"))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_boards_go_when_their_owner_ends(base: Path, tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "rig"
    owner = subprocess.Popen(
        [sys.executable, boards.__file__, "up", folder, "1", base.parent, "/srv/shared"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert owner.stdout is not None
    with owner.stdout:
        while not owner.stdout.readline().startswith("up;"):
            assert owner.poll() is None
    prefix = json.loads((folder / "rig.json").read_text())["prefix"]
    assert len(leftovers(prefix, folder)) > 5
    os.kill(owner.pid, number)
    owner.wait(30)
    until = time.monotonic() + 30
    while found := leftovers(prefix, folder):
        assert time.monotonic() < until, found
        time.sleep(0.1)


def test_a_power_cut_ends_a_board_at_once_and_its_disk_stays(base: Path, tmp_path: Path) -> None:
    with boards.Rig.make(tmp_path / "rig", 1, base, shared_at="/srv/shared") as rig:
        rig.start(1)
        rig.wait_until_up(1)
        rig.ssh(1, "echo written > /root/note; echo all > /srv/shared/note")
        rig.power_cut(1)
        assert rig.ssh(1, "true", check=False, seconds=3).returncode == 255
        rig.start(1)
        rig.wait_until_up(1)
        assert rig.ssh(1, "cat /root/note").stdout == "written\n"
        assert (rig.folder / "shared/note").read_text() == "all\n"


def test_a_frozen_board_answers_again_after_it_thaws(base: Path, tmp_path: Path) -> None:
    with boards.Rig.make(tmp_path / "rig", 1, base, shared_at="/srv/shared") as rig:
        rig.start(1)
        rig.wait_until_up(1)
        rig.freeze(1)
        assert rig.ssh(1, "true", check=False, seconds=3).returncode == 255
        rig.thaw(1)
        assert rig.ssh(1, "true").returncode == 0


def test_a_cut_cable_can_be_plugged_in_again(base: Path, tmp_path: Path) -> None:
    with boards.Rig.make(tmp_path / "rig", 1, base, shared_at="/srv/shared") as rig:
        rig.start(1)
        rig.wait_until_up(1)
        rig.cut(1)
        assert rig.ssh(1, "true", check=False, seconds=3).returncode == 255
        rig.heal(1)
        assert rig.ssh(1, "true").returncode == 0
