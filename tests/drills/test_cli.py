"""What `kvferry drill` says when it cannot do all of its work, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.drills.cli import drill
from kvferry.drills.drill_commands import _run_one, keep_report, run
from kvferry.drills.errors import DrillImpossible
from kvferry.drills.journal import STATE_VARIABLE
from kvferry.drills.runner import Outcome
from kvferry.drills.scenarios import SCENARIOS, Scenario
from kvferry.drills.targets.local import LocalTarget
from kvferry.drills.targets.processes import OwnClusterOptions
from kvferry.drills.undo import RemoveFile


def test_a_drill_that_never_began_leaves_no_folder_behind(tmp_path: Path) -> None:
    drill = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kvferry.client.cli import main; main()",
            "drill",
            "demo",
            "--model",
            str(tmp_path / "nosuch"),
        ],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert drill.returncode == 3
    assert "there is no model" in drill.stderr
    assert "files and logs" not in drill.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_drill_whose_report_could_not_be_kept_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reports = tmp_path / "file" / "reports"
    result = CliRunner().invoke(run, ["kill", "--model", str(tmp_path / "nosuch"), "--report", str(reports)])
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: no report can be written to {reports} (not a directory): name another folder with --report\n"
    )


def test_a_verdict_is_told_even_where_its_report_cannot_be_kept(tmp_path: Path, capsys) -> None:
    outcome = Outcome(SCENARIOS["kill"], "local", started=0.0, reason="only a test")
    (tmp_path / "file").touch()
    with pytest.raises(DrillImpossible, match=r"cannot be kept in .*file.*not a directory"):
        keep_report(outcome, tmp_path / "file", ["a process"], tmp_path)
    told = capsys.readouterr().out
    assert "only a test" in told
    assert "LEFT BEHIND: a process" in told


def test_whatever_is_listed_can_be_explained() -> None:
    listed = json.loads(CliRunner().invoke(drill, ["list", "--json"]).stdout)
    assert "demo" in {line["name"] for line in listed}
    for line in listed:
        explained = CliRunner().invoke(drill, ["explain", line["name"]])
        assert (explained.exit_code, line["hypothesis"] in explained.output) == (0, True)
        assert json.loads(CliRunner().invoke(drill, ["explain", line["name"], "--json"]).stdout)["name"] == line["name"]


@pytest.mark.parametrize(("error", "exit_code"), [(KeyboardInterrupt(), 130), (DrillImpossible("too slow"), 2)])
def test_what_a_drill_that_ended_early_could_not_undo_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, error: BaseException, exit_code: int
) -> None:
    class Failing(LocalTarget):
        def start(self, scenario: Scenario) -> None:
            (tmp_path / "folder").mkdir()
            self.journal.write("a folder", RemoveFile(str(tmp_path / "folder")))
            raise error

    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "runs"))
    make = partial(Failing, options=OwnClusterOptions(model="none"))
    assert _run_one(SCENARIOS["kill"], make, tmp_path, is_json=False) == exit_code
    told = capsys.readouterr().err
    assert "could not be undone: a folder: " in told
    assert "the next drill tries again" in told
    assert "has been undone\n" not in told
