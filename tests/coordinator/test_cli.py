"""Starting it wrongly: one sentence that says what to do, exit code 1. Real processes."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner
from cluster_kit import Processes

from kvferry.coordinator.cli import coordinator
from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.errors import CannotStart, InvalidSettings, StateInUse, StatePathInvalid
from kvferry.coordinator.state_directory import StateDirectory
from kvferry.engine.errors import ModelNotFound


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry.coordinator", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def sentence(result: subprocess.CompletedProcess[str], exit_code: int = 1) -> str:
    assert result.returncode == exit_code, result
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_port_in_use(smollm2_path: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = sentence(run("--model", str(smollm2_path), "--listen", address, "--state", str(tmp_path / "state")))
    assert f"cannot listen on {address}: address already in use" in said


def test_a_state_path_that_is_a_file(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    said = sentence(run("--model", str(smollm2_path), "--listen", "127.0.0.1:0", "--state", str(tmp_path / "state")))
    assert "is a file: give a folder with --state" in said


def test_an_unknown_model(tmp_path: Path) -> None:
    said = sentence(run("--model", "no-such-model", "--state", str(tmp_path / "state")), ModelNotFound.exit_code)
    assert "no-such-model" in said


def test_missing_settings_are_all_named_at_once() -> None:
    said = run("--listen", "nonsense", "--lease", "0")
    assert said.returncode == 1
    first, *problems = said.stderr.splitlines()
    assert first == "error: 4 settings of the coordinator are not right:"
    assert {problem.split()[0].removeprefix("--") for problem in problems} == {"model", "state", "listen", "lease"}


def test_a_port_beyond_the_last_one_is_refused_and_not_taken_modulo(tmp_path: Path) -> None:
    said = sentence(run("--model", "m", "--state", str(tmp_path / "s"), "--listen", "127.0.0.1:99999"))
    assert "--listen '127.0.0.1:99999' has port 99999: a port lies between 0 and 65535" in said


def test_a_ready_file_that_cannot_be_written_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    others = ("--model", "no-such-model", "--state", str(tmp_path / "state"))
    said = sentence(run(*others, "--ready-file", str(tmp_path / "nowhere" / "r.json")))
    assert f"--ready-file there is no folder {tmp_path / 'nowhere'}" in said
    assert "folder: name a file" in sentence(run(*others, "--ready-file", str(tmp_path)))


def test_a_host_that_is_not_known(smollm2_path: Path, tmp_path: Path) -> None:
    said = sentence(
        run("--model", str(smollm2_path), "--listen", "nohost.invalid:7070", "--state", str(tmp_path / "state"))
    )
    assert "the host name nohost.invalid is not known" in said
    assert "stop what uses it" not in said


def test_a_second_coordinator_on_the_same_state(processes: Processes, smollm2_path: Path, tmp_path: Path) -> None:
    first, _ = processes.coordinator()
    said = sentence(run("--model", str(smollm2_path), "--listen", "127.0.0.1:0", "--state", str(tmp_path / "state")))
    assert f"another coordinator (process {first.pid}) holds the state folder" in said


def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    held = StateDirectory(tmp_path / "s").acquire()
    with pytest.raises(StateInUse):
        StateDirectory(tmp_path / "s").acquire()
    held.release()
    StateDirectory(tmp_path / "s").acquire().release()


def test_a_state_folder_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: [share])
    with pytest.raises(StatePathInvalid, match="nfs4"):
        StateDirectory(tmp_path / "s").acquire()


def test_the_log_has_no_lines_of_the_library_that_retries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    retries = logging.getLogger("stamina")
    monkeypatch.setattr(retries, "level", logging.NOTSET)
    CliRunner().invoke(coordinator, ["run", "--state", str(tmp_path)])  # ends for want of a model
    retries._cache.clear()  # type: ignore[attr-defined]  # a logger remembers what it was asked
    assert not retries.isEnabledFor(logging.WARNING)  # the level of stamina.retry_scheduled


# Settings.


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('model = "from-file"\nstate = "/from/file"\nlease = 7.5\nmax_losses = 5\n')
    monkeypatch.setenv("KVFERRY_COORDINATOR_LEASE", "4")
    monkeypatch.setenv("KVFERRY_COORDINATOR_STATE", "/from/env")
    settings = CoordinatorSettings.load({"state": Path("/from/line"), "lease": None}, file)
    assert (settings.model, settings.state, settings.lease, settings.max_losses) == (
        ("from-file",),
        Path("/from/line"),
        4.0,
        5,
    )


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("lese = 3", "lese"),
        ("lease = nan", "lease"),
        ('listen = "x"', "listen"),
        ("not toml", "is not TOML"),
        ("max_losses = 0", "max_losses"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, toml: str, named: str) -> None:
    (tmp_path / "c.toml").write_text(f"{toml}\n")
    with pytest.raises(InvalidSettings, match=named):
        CoordinatorSettings.load({"model": "m", "state": tmp_path}, tmp_path / "c.toml")


def test_a_settings_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"c\.toml cannot be read: no such file"):
        CoordinatorSettings.load({"model": "m", "state": tmp_path}, tmp_path / "c.toml")


def test_settings_do_not_change(tmp_path: Path) -> None:
    settings = CoordinatorSettings.load({"model": "m", "state": tmp_path})
    with pytest.raises(ValueError, match="frozen"):
        settings.lease = 5.0  # type: ignore[misc]
