"""Replayed traces: routing by prediction beside the rules that others use, and the planner's own arithmetic."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.simulator.cli import simulate
from kvferry.simulator.fleet_model import BOARD_2B, Job, ModelBoard, SharedStore
from kvferry.simulator.plan import FleetPlan, Outcome, Planner
from kvferry.simulator.rules import RULES
from kvferry.simulator.trace import KINDS, BadTrace, drawn, read_trace, written


def outcomes(kind: str, rate: float, n_sessions: int, seeds: tuple[int, ...]) -> dict[str, list[Outcome]]:
    """The same traces under every rule, on four boards that differ by two."""
    found: dict[str, list[Outcome]] = {}
    for seed in seeds:
        trace = drawn(KINDS[kind], n_sessions, rate, random.Random(seed))
        for name, rule in RULES.items():
            fleet = FleetPlan(n_nodes=4, rates=BOARD_2B, spread=2.0)
            found.setdefault(name, []).append(Planner(fleet, trace, rule(), seed).run())
    return found


def mean_s(runs: list[Outcome]) -> float:
    return statistics.fmean(run.mean_s for run in runs)


def test_chats_with_shared_prompts_wait_a_fifth_less_than_under_any_other_rule() -> None:
    found = outcomes("hot", 0.05, n_sessions=60, seeds=(1, 2))
    for name in ("sticky", "longest prefix", "least loaded"):
        assert mean_s(found["predicted"]) <= 0.8 * mean_s(found[name]), name
    assert max(run.prediction_error for run in found["predicted"]) <= 0.2


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_kind_of_traffic_is_much_worse_off_than_under_the_best_other_rule(kind: str) -> None:
    found = outcomes(kind, 0.01, n_sessions=40, seeds=(1, 2))
    best = min(mean_s(runs) for name, runs in found.items() if name != "predicted")
    assert mean_s(found["predicted"]) <= 1.05 * best


def test_every_turn_is_answered_once_under_every_rule() -> None:
    trace = drawn(KINDS["bursts"], 20, 0.05, random.Random(3))
    for rule in RULES.values():
        outcome = Planner(FleetPlan(n_nodes=3, rates=BOARD_2B), trace, rule()).run()
        assert len(outcome.first_token_s) == sum(len(s.turns) for s in trace)
        assert outcome.n_tokens == outcome.n_resident + outcome.n_restored + outcome.n_computed
        assert sum(outcome.turns_by_node.values()) == len(outcome.first_token_s)


def job(n_tokens: int, session: int = 1, now_s: float = 0.0) -> Job:
    return Job(session, 0, 0, n_tokens, 10, now_s, recompute=False)


def run_alone(board: ModelBoard, new: Job, now_s: float) -> Job:
    board.advance(now_s)
    board.submit(new, now_s)
    while not new.ends_s or board.decoding:
        board.advance(board.next_s())
    return new


def test_a_board_takes_as_long_as_its_rates_say() -> None:
    board = ModelBoard("n", BOARD_2B, SharedStore(1e9))
    first = run_alone(board, job(300), 0.0)
    assert first.first_token_s == pytest.approx(BOARD_2B.prefill_seconds(0, 300))
    assert first.ends_s - first.first_token_s == pytest.approx(10 / BOARD_2B.decode_tokens_per_s)
    again = run_alone(board, job(400, now_s=100.0), 100.0)
    assert again.n_resident == 309
    assert again.first_token_s - 100.0 == pytest.approx(BOARD_2B.prefill_seconds(309, 400))


def test_another_board_reads_what_the_first_one_saved() -> None:
    store = SharedStore(1e9)
    run_alone(ModelBoard("a", BOARD_2B, store), job(300), 0.0)
    moved = run_alone(ModelBoard("b", BOARD_2B, store), job(400, now_s=100.0), 100.0)
    assert (moved.n_resident, moved.n_restored, moved.n_computed) == (0, 309, 91)
    assert store.n_bytes_read == 309 * BOARD_2B.bytes_per_row


def test_two_prefills_share_the_engine() -> None:
    board = ModelBoard("n", BOARD_2B, SharedStore(1e9))
    both = job(300, session=1), job(300, session=2)
    for one in both:
        board.submit(one, 0.0)
    while any(not one.first_token_s for one in both):
        board.advance(board.next_s())
    assert [one.first_token_s for one in both] == [pytest.approx(2 * BOARD_2B.prefill_seconds(0, 300))] * 2


def test_a_system_prompt_that_two_turns_begin_with_is_computed_once() -> None:
    board = ModelBoard("n", BOARD_2B, SharedStore(1e9))
    first, second = (Job(n, 0, 500, 600, 10, 0.0, recompute=False) for n in (1, 2))
    for one in (first, second):
        board.submit(one, 0.0)
    while not second.first_token_s:
        board.advance(board.next_s())
    assert (first.n_computed, second.n_computed) == (600, 100)
    assert first.first_token_s == pytest.approx(BOARD_2B.prefill_seconds(0, 600))


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = drawn(KINDS["chat"], 5, 1.0, random.Random(1))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(written(trace)))
    assert read_trace(path) == trace
    path.write_text('{"start_s": 1}\n')
    with pytest.raises(BadTrace, match="line 1 of the trace"):
        read_trace(path)


def test_the_command_predicts_a_fleet(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(written(drawn(KINDS["chat"], 6, 1.0, random.Random(1)))))
    result = CliRunner().invoke(simulate, ["--nodes", "3", "--trace", str(path), "--compare"], catch_exceptions=False)
    assert result.exit_code == 0
    for word in ("predicted: first token mean", "sticky: ", "least loaded: ", "p99", "GB read", "off by"):
        assert word in result.output
    assert CliRunner().invoke(simulate, ["--trace", "nowhere"]).exit_code == 2


TURN = "[[5, 5, 0]]"


@pytest.mark.parametrize(
    "trace",
    [
        b"",
        b"\n \n",
        b"\x81\xff",
        b"[1,2",
        b"3",
        b'{"start_s": 0, "system": 0, "system_tokens": 0, "turns": [[1e400, 5, 0]]}',
        *(
            f'{{"start_s": {start}, "system": 0, "system_tokens": {system}, "turns": {turns}}}'.encode()
            for start, system, turns in (
                ("NaN", 0, TURN),
                ("-1", 0, TURN),
                ("1e300", 0, TURN),
                ("0", -1, TURN),
                ("0", 10**9, TURN),
                ("0", 0, "[]"),
                ("0", 0, "[[0, 5, 0]]"),
                ("0", 0, "[[5, 5, Infinity]]"),
                ("0", 0, "[[5, 5]]"),
            )
        ),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, trace: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(trace)
    with pytest.raises(BadTrace, match=r"line 1 of the trace|trace\.jsonl (has no session|cannot be read)"):
        read_trace(path)


@pytest.mark.parametrize("option", ["--prefill", "--decode", "--read", "--store", "--rate", "--spread", "--row-bytes"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e-300"])
def test_a_rate_that_no_board_has_is_refused(option: str, value: str) -> None:
    result = CliRunner().invoke(simulate, ["--sessions", "1", option, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output
