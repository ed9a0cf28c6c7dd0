"""The engine bench's arithmetic, without a peer: who takes turns, which setting counts, what the table says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvferry.bench import engine as bench
from kvferry.bench import limits, shapes
from kvferry.bench.engine_table import SAME_FILE, Judgement, Line, judged, markdown
from kvferry.bench.llama_bench import LlamaBench
from kvferry.bench.peer import PeerMissing
from kvferry.bench.workload import (
    Measured,
    Ours,
    Speed,
    Work,
    batch_task,
    decode_task,
    measure,
    prefill_task,
    ratio,
)
from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.files.open_model import open_model
from kvferry.engine.kv_cache import KvKind

SMALL = shapes.Shape(n_layers=2, hidden=64, ffn=96, n_heads=4, n_kv_heads=2, head_dim=32, vocab=41_000)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> Path:
    """A made-up model as the large one is made, and as small as its vocabulary allows."""
    path = tmp_path_factory.mktemp("shape") / "small.gguf"
    shapes.write_shape(path, SMALL)
    return path


class Recorder:
    """A runner that writes down what it is told to do, at a speed of its own."""

    def __init__(self, name: str, calls: list[str], speed: float = 1.0) -> None:
        self.name = name
        self._calls = calls
        self._speed = speed

    def can(self, task):
        return True

    def run(self, task):
        self._calls.append(f"{self.name}: {task.name}")
        return Speed(self._speed, self._speed)

    def close(self):
        pass


def test_the_engines_take_turns_and_the_first_round_does_not_count():
    calls: list[str] = []
    [[ours], [theirs]] = measure([[Recorder("a", calls)], [Recorder("b", calls)]], decode_task(9, 4), n_pairs=2)
    assert calls == ["a: decode at depth 9", "b: decode at depth 9"] * 3
    assert [len(ours.wall), len(theirs.wall)] == [2, 2]


def test_what_is_measured_beside_is_measured_in_every_round():
    calls: list[str] = []
    measure([[Recorder("a", calls)]], prefill_task(1), 2, lambda: calls.append("read"))
    assert calls == ["read", "a: prefill 1"] * 3


def test_a_setting_that_is_clearly_slower_is_dropped_after_the_first_round_and_a_close_one_is_not():
    calls: list[str] = []
    settings = [Recorder("slow", calls, 5.0), Recorder("close", calls, 9.5), Recorder("best", calls, 10.0)]
    [group] = measure([settings], prefill_task(8), n_pairs=2)
    assert [measured.name for measured in group] == ["close", "best"]
    assert [call.split(":")[0] for call in calls] == ["slow", "close", "best", *["close", "best"] * 2]


def test_a_ratio_is_the_median_of_the_pairs_own_ratios():
    assert ratio([10, 40, 30], [10, 10, 10]) == 3


def figures(speed: float) -> Measured:
    return Measured("", [speed] * 3, [2 * speed] * 3)


def test_the_table_shows_ratios_shares_and_what_a_peer_cannot_do():
    lines = [
        Line("prefill 128", figures(600), {"q4_0": figures(20)}, 0.415, "the integer peak"),
        Line("decode, batch of 8", figures(60), {}),
    ]
    assert markdown(lines, ["q4_0"], "wall")[2:] == [
        "| prefill 128 | 600 | 20.0 | 30.00 | 42% of the integer peak |",
        "| decode, batch of 8 | 60.0 | - | - | - |",
    ]
    assert "| 1200 | 40.0 |" in markdown(lines, ["q4_0"], "cpu")[2]


def test_what_is_asked_for_is_judged_against_the_same_file_and_the_fastest_one():
    peers = {SAME_FILE: figures(20), "q4_0": figures(50), "q8_0": figures(30)}
    line = Line("prefill 512", figures(91), peers)
    same, fastest = judged([line], 1, "wall")
    assert (same.asked, same.found, same.is_met) == (4.5, 4.55, True)
    assert (fastest.asked, fastest.found, fastest.is_met) == (2.0, 1.82, False)
    assert str(fastest) == "prefill 512, 1 thread, its fastest: 1.82, asked for 2: SHORT"
    assert [judgement.asked for judgement in judged([line], 2, "wall")] == [1.8]
    assert judged([replace(line, task="prefill 3")], 1, "wall") == []


def test_our_runner_does_what_a_task_says(small_file):
    ours = Ours(small_file, 1, KvKind.F16)
    for task in (prefill_task(40), decode_task(33, 3), decode_task(0, 2), batch_task(3, 2)):
        speed = ours.run(task)
        assert 0 < speed.wall < 1e7
        assert 0 < speed.cpu < 1e7
    assert (ours.engine.pool.n_blocks - ours.engine.pool.n_free_blocks) == 0
    ours.run(decode_task(33, 3))
    assert (ours.engine.pool.n_blocks - ours.engine.pool.n_free_blocks) == 2  # the rows to go on from are kept
    ours.close()


def test_the_cost_of_a_token_is_counted_from_the_packed_weights(small_file):
    work = Work.of(small_file)
    c = SMALL
    per_layer = 2 * c.hidden * c.n_heads * c.head_dim + 2 * c.hidden * c.n_kv_heads * c.head_dim + 3 * c.hidden * c.ffn
    assert work.products == c.n_layers * per_layer
    norms = 4 * (c.hidden + c.n_layers * 2 * (c.hidden + c.head_dim))
    head = c.hidden * -(-c.vocab // 32) * 32 * 34 / 32
    assert work.weight_bytes == work.products * 20 / 32 + norms + head


def test_a_made_up_model_is_one_that_computes(small_file):
    assert open_model(small_file).config.architecture == "qwen3"
    engine = Engine.load(small_file, EngineOptions(n_threads=1, kv_bytes=1 << 20, context_length=64))
    sequence = engine.new_sequence()
    logits = engine.forward([bench_chunk(sequence)])[0]
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 100
    engine.close()


def bench_chunk(sequence):
    from kvferry.engine.engine import Chunk

    return Chunk(sequence, np.arange(5, dtype=np.int32))


FAKE_LLAMA_BENCH = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *broken.gguf*) echo "failed to load model" >&2; exit 1;; esac
echo '[{"n_prompt": 512, "avg_ts": 123.5}]'
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Path:
    """What a made-up llama-bench was called with; it says what the real one says."""
    program = tmp_path / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text(FAKE_LLAMA_BENCH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def test_llama_bench_on_the_path_is_a_peer_too(calls):
    runner = LlamaBench(Path("m.gguf"), SAME_FILE, 2, flash=True)
    assert runner.run(prefill_task(512)) == Speed(123.5, 123.5)
    runner.run(decode_task(2048, 32))
    fixed = "-m m.gguf -t 2 -fa 1 -b 512 -ub 512 -r 1 -o json"
    assert calls.read_text().splitlines() == [f"{fixed} -p 512 -n 0 -d 0", f"{fixed} -p 0 -n 32 -d 2048"]
    assert not runner.can(batch_task(4, 8))


def test_what_llama_bench_cannot_do_is_said(calls):
    with pytest.raises(PeerMissing, match="ended with 1 and said: failed to load model"):
        LlamaBench(Path("broken.gguf"), SAME_FILE, 1, flash=False).run(prefill_task(1))


def test_without_a_peer_our_figures_are_printed_and_what_to_install(small_file, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bench, "library", missing)
    monkeypatch.setattr(limits, "_READ_BYTES", 1 << 24)
    words = ["--model", str(small_file), "--threads", "1", "--pairs", "1", "--task", "prefill128", "--task", "decode0"]
    done = CliRunner().invoke(bench.main, [*words, "--markdown", str(tmp_path / "table.md")])
    assert done.exit_code == 0, done.output
    assert "install the peer: pip install 'kvferry[bench]'" in done.output
    table = (tmp_path / "table.md").read_text()
    assert "| task | kvferry | of the machine |" in table
    assert "| prefill 128 |" in table
    assert "% of read bandwidth |" in table
    assert "Took 0 min" in table


def missing():
    raise PeerMissing(bench_hint())


def bench_hint():
    from kvferry.bench.peer import INSTALL_HINT

    return INSTALL_HINT


def test_the_floor_fails_a_run_whose_figures_are_below_it(small_file, monkeypatch):
    monkeypatch.setattr(bench, "find_peers", lambda *_: (lambda _: {}, lambda: None))
    monkeypatch.setattr(limits, "_READ_BYTES", 1 << 24)
    monkeypatch.setattr(bench, "gemm_judgement", lambda _: ("", Judgement("q4", 0.45, 0.40)))
    words = ["--model", str(small_file), "--threads", "1", "--pairs", "1", "--task", "decode0", "--floor"]
    assert CliRunner().invoke(bench.main, [*words, "0.95"]).exit_code == 1
    assert CliRunner().invoke(bench.main, [*words, "0.8"]).exit_code == 0


def test_the_limits_of_a_machine_are_plausible():
    probe = limits.ReadProbe(1 << 26)
    for n_threads in (1, 2):
        found = limits.measure_limits(probe, n_threads)
        assert 1e8 < found.read_bytes < 1e12
        assert 1e9 < found.float_ops < 1e13
        assert 1e8 < found.integer_ops < 1e14
    assert 1e8 < limits.gemm_ops((16, 256, 128)) < 1e14
