"""Promises 1 and 10: SIGKILL of a writer at any instant tears nothing that can be seen, and what it leaves is gone
after a start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITER = Path(__file__).with_name("kill_writer.py")
SOURCES = Path(__file__).parents[2] / "src"


def _run(root: Path, mode: str, n_kills: int, seed: int, version: int = 1) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(WRITER), str(root), mode, str(n_kills), str(seed), str(version)],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def _assert_unharmed(counts: dict[str, int]) -> None:
    assert counts["torn"] == 0
    assert counts["wrong"] == 0
    assert counts["lost"] == 0
    assert counts["refused_after_start"] == 0
    assert counts["temps_after_reap"] == counts["kills"] + counts["finished"]  # the foreign one, each time
    assert counts["foreign_temp_kept"]
    assert counts["temps_left"] > counts["temps_after_reap"]  # the kills did hit saves in progress


@pytest.mark.parametrize("version", [1, 3])
def test_200_kills_at_random_instants_tear_nothing(tmp_path: Path, version: int) -> None:
    """100 of each version."""
    counts = _run(tmp_path, "random", 100, seed=1, version=version)
    assert counts["kills"] == 100
    _assert_unharmed(counts)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 3])
def test_1000_kills_at_random_instants_tear_nothing(tmp_path: Path, version: int) -> None:
    counts = _run(tmp_path, "random", 1000, seed=2, version=version)
    assert counts["kills"] == 1000
    _assert_unharmed(counts)


def test_the_temporary_files_of_1000_kills_are_gone_after_one_start(tmp_path: Path) -> None:
    """A fresh one of another node is kept."""
    counts = _run(tmp_path, "pile", 1000, seed=10, version=3)
    assert (counts["kills"], counts["temps_left"]) == (1000, 1001)
    assert counts["temps_after_reap"] == 1
    assert counts["foreign_temp_kept"]
    assert counts["torn"] == counts["wrong"] == 0


@pytest.mark.parametrize("version", [1, 3])
def test_a_kill_before_each_single_call_of_a_save_tears_nothing(tmp_path: Path, version: int) -> None:
    counts = _run(tmp_path, "calls", 1000, seed=3, version=version)
    assert counts["finished"] == 1
    assert counts["kills"] > 15
    _assert_unharmed(counts)
