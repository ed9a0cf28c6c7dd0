"""What a drill leaves in the folder for temporary files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.drills.cli import drill
from kvferry.drills.drill_commands import keep_report, run
from kvferry.drills.errors import DrillImpossible
from kvferry.drills.runner import Outcome
from kvferry.drills.scenarios import SCENARIOS


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
