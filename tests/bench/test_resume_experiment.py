"""`kvferry bench resume` tells what it did, and tells both ratios."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvferry.bench.cli import bench
from kvferry.bench.node_process import Answer
from kvferry.bench.resume_experiment import Round
from kvferry.proto.v1.common_pb2 import PrefixReport

BENCH = [sys.executable, "-m", "kvferry.client.cli", "bench"]


def test_each_ratio_counts_what_it_says():
    resumed = Answer(PrefixReport(restore_seconds=0.1, prefill_seconds=0.1), [1], first_s=0.5)
    computed = Answer(PrefixReport(prefill_seconds=2.0), [1], first_s=2.5)
    done = Round(4.0, 1.5, 0.1, 1_000, resumed, resumed, computed)
    assert done.prefill_ratio == pytest.approx(10)
    assert done.wall_ratio == pytest.approx(5)
    assert done.wall_ratio_with_start == pytest.approx(2)


@pytest.mark.slow
def test_the_experiment_runs_on_real_processes_and_draws(tmp_path):
    plot = tmp_path / "resume.svg"
    command = [*BENCH, "resume", "--tokens", "200", "--rounds", "1", "--json", "--plot", str(plot)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(done.stdout)
    assert figures["n_restored"] >= 191
    assert figures["prefill_ratio"] > 0
    for step in ("$ kvferry node run", "kill -9", "serves at", "the same conversation goes on", "are the same"):
        assert step in done.stderr
    assert plot.read_text().lstrip().startswith("<?xml")
    assert {path.name for path in tmp_path.iterdir()} == {"resume.svg"}


def test_every_benchmark_has_a_command():
    listed = subprocess.run([*BENCH, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(name in listed for name in ("engine", "resume", "resume-kinds", "coordinator", "lcp-index"))


@pytest.mark.parametrize(
    ("hidden", "plot", "sentence"),
    [
        ("matplotlib.backend_bases", "x.svg", "the plot needs matplotlib"),
        ("", "x.mp3", "a picture ends with one of"),
        ("", "nowhere/x.svg", "no file can be made in the folder"),
    ],
)
def test_a_plot_that_cannot_be_is_told_before_the_experiment(tmp_path, monkeypatch, hidden, plot, sentence):
    if not hidden:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    else:
        monkeypatch.setitem(sys.modules, hidden, None)
    result = CliRunner().invoke(bench, ["resume", "--model", "no such model", "--plot", str(tmp_path / plot)])
    assert (result.exit_code, sentence in result.output) == (1, True), result.output
