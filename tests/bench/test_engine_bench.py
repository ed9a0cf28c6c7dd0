"""The engine bench's arithmetic, without a peer: who takes turns, which setting counts, what the table says."""

from __future__ import annotations

import pytest

from kvferry.bench import engine as bench
from kvferry.bench.limits import measure_limits
from kvferry.bench.workload import Measured, Task, batch_task, decode_task, measure, prefill_task, ratio


class Recorder:
    """A runner that writes down what it is told to do."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self._calls = calls

    def prefill(self, tokens):
        self._calls.append(f"{self.name}: prefill {len(tokens)}")

    def prepare_decode(self, tokens):
        self._calls.append(f"{self.name}: depth {len(tokens)}")

    def decode(self, tokens):
        self._calls.append(f"{self.name}: decode {len(tokens)}")

    def prepare_batch(self, n_sequences):
        self._calls.append(f"{self.name}: {n_sequences} sequences")

    def decode_batch(self, tokens, n_sequences):
        self._calls.append(f"{self.name}: decode {len(tokens)} x {n_sequences}")

    def close(self):
        pass


def test_the_engines_take_turns_and_the_first_round_does_not_count():
    calls: list[str] = []
    results = measure([Recorder("a", calls), Recorder("b", calls)], decode_task(9, 4), n_pairs=2)
    assert calls == ["a: depth 9", "a: decode 4", "b: depth 9", "b: decode 4"] * 3
    assert [len(result.wall) for result in results] == [2, 2]


@pytest.mark.parametrize(
    ("task", "n_tokens", "call"),
    [(prefill_task(128), 128, "a: prefill 128"), (batch_task(4, 8), 32, "a: decode 8 x 4")],
    ids=["prefill", "batch"],
)
def test_a_task_counts_the_tokens_that_it_runs(task: Task, n_tokens, call):
    calls: list[str] = []
    measure([Recorder("a", calls)], task, n_pairs=1)
    assert task.n_tokens == n_tokens
    assert calls[-1] == call


def test_a_ratio_is_the_median_of_the_pairs_own_ratios():
    assert ratio([10, 40, 30], [10, 10, 10]) == 3


def test_the_peers_better_setting_is_the_one_compared_with(monkeypatch):
    slow, fast, ours = (Measured([s] * 3, [s] * 3) for s in (10.0, 20.0, 60.0))
    monkeypatch.setattr(bench, "measure", lambda *_: [ours, slow, fast])
    line = bench.run_task(prefill_task(128), None, {"q4_0": [None, None]}, 3)
    assert line.peers["q4_0"] is fast
    assert bench.markdown([line], ["q4_0"], is_wall=False)[-1] == "| prefill 128 | 60 (60) | 20 (20) | 3.00 |"


def test_the_limits_of_a_machine_are_plausible():
    limits = measure_limits()
    assert 1e8 < limits.read_bytes < 1e12
    assert 1e9 < limits.float_ops < 1e13
    assert 1e8 < limits.integer_ops < 1e14
