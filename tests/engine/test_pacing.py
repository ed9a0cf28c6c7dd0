"""Steps are sized by what steps took: a pretended machine tells the seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.pacing import LEAST_SCATTER, MIN_ROWS, MOST_SCATTER, RULER_EVERY, StepPacer


@dataclass
class Machine:
    """What a step takes on it, in seconds: so much whatever it does, per decode, and per prefill row."""

    fixed: float = 0.005
    decode: float = 0.002
    row: float = 0.001
    noise: float = 0.0

    def seconds(self, n_decodes: int, n_rows: int, chance: random.Random) -> float:
        plain = self.fixed + n_decodes * self.decode + n_rows * self.row
        return plain * (1 + self.noise * chance.random())


def prefill(pacer: StepPacer, machine: Machine, n_decodes: int, n_rows: int) -> list[tuple[int, float]]:
    """(rows, seconds) of all steps until a prompt of n_rows is done."""
    chance, steps = random.Random(0), []
    while n_rows > 0:
        n = min(pacer.rows(n_decodes), n_rows)
        seconds = machine.seconds(n_decodes, n, chance)
        pacer.learn(n_decodes, n, seconds)
        steps.append((n, seconds))
        n_rows -= n
    return steps


@pytest.mark.parametrize("machine", [Machine(), Machine(fixed=0.05, row=0.02), Machine(fixed=0.004, row=0.0001)])
@pytest.mark.parametrize("n_decodes", [1, 4, 16])
def test_a_step_beside_decodes_takes_what_the_ratio_allows(machine: Machine, n_decodes: int) -> None:
    pacer = StepPacer(target_ratio=2.5)
    undisturbed = machine.seconds(n_decodes, 0, random.Random())
    steps = prefill(pacer, machine, n_decodes, 4000)
    assert all(seconds <= 2.501 * undisturbed or n <= MIN_ROWS for n, seconds in steps)
    settled = [n for n, _ in steps[16:-1] if n]
    wanted = min(max(int(1.5 * undisturbed / machine.row), MIN_ROWS), 256)
    assert all(wanted - 1 <= n <= wanted for n in settled)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
def test_the_whole_budget_is_used_but_for_what_steps_scatter(noise: float) -> None:
    machine = Machine(noise=noise)
    steps = prefill(StepPacer(target_ratio=2.5), machine, 4, 20_000)[100:]
    undisturbed = machine.seconds(4, 0, random.Random()) if not noise else 0.013 * (1 + noise / 2)
    ratios = sorted(seconds / undisturbed for n, seconds in steps if n)
    assert ratios[int(0.98 * len(ratios))] <= 2.5 * 1.05
    assert ratios[len(ratios) // 2] >= 2.5 / (1 + noise) * 0.97


def test_a_machine_that_is_taken_away_now_and_then_does_not_halt_a_prompt() -> None:
    pacer, machine, chance = StepPacer(target_ratio=2.5), Machine(), random.Random(1)
    prefill(pacer, machine, 4, 450)
    for _ in range(200):
        n = pacer.rows(4)
        seconds = machine.seconds(4, n, chance) * (5 if chance.random() < 0.1 else 1)
        pacer.learn(4, n, seconds)
    assert pacer.rows(4) >= (2.5 / MOST_SCATTER - 1) * 0.013 / 0.001 - 1


@pytest.mark.parametrize(("seconds", "expected"), [(0.0195, 8), (0.0205, 8), (0.024, 14), (0.028, 16), (0.012, 5)])
def test_a_tile_is_filled_since_part_of_its_time_goes_whatever_it_holds(seconds: float, expected: int) -> None:
    """A tile takes 6 ms and each row one more: 8 rows 14, 9 rows 21, 14 rows 26, 16 rows 28."""
    pacer = StepPacer(target_ratio=1.1 * LEAST_SCATTER + 1, tile_rows=8)
    for _ in range(2):
        pacer.learn(4, 0, seconds)
    for _ in range(40):
        n = pacer.rows(4)
        if n == 0:
            pacer.learn(4, 0, seconds)
            continue
        pacer.learn(4, n, seconds + 0.006 * -(-n // 8) + 0.001 * n)
    assert abs(pacer.rows(4) - expected) <= 1


@pytest.mark.parametrize("ratio", [2.1, 2.3, 2.5])
def test_no_row_is_left_out_that_would_cost_nothing(ratio: float) -> None:
    """Attention computes with 4 rows at a time: 5 rows take as long as 8."""
    pacer = StepPacer(target_ratio=ratio, tile_rows=16, pass_rows=4)
    taken = []
    for _ in range(400):
        n = pacer.rows(4)
        pacer.learn(4, n, 0.012 + (0.004 * -(-n // 16) + 0.001 * 4 * -(-n // 4) if n else 0.0))
        taken.append(n)
    assert {n % 4 for n in taken} == {0}
    assert max(taken) >= 8


def test_the_time_of_sessions_that_grow_is_followed() -> None:
    """An undisturbed step takes 10 ms at first and 20 after 800 steps; a row takes one more."""
    pacer = StepPacer(target_ratio=2.5)
    for i in range(800):
        n = pacer.rows(4)
        pacer.learn(4, n, 0.010 + 0.0000125 * i + 0.001 * n)
    assert pacer.rows(4) >= 0.9 * 1.5 * 20


def test_an_undisturbed_step_is_measured_first_and_again_and_again() -> None:
    steps = prefill(StepPacer(), Machine(), 4, 4000)
    rulers = [i for i, (n, _) in enumerate(steps) if n == 0]
    assert rulers == [i for i in range(len(steps)) if i % (RULER_EVERY + 2) < 2]


def test_a_step_right_after_a_prompts_rows_is_no_measure() -> None:
    """It finds other rows in the caches than its own."""
    pacer, machine = StepPacer(target_ratio=2.5), Machine()
    prefill(pacer, machine, 4, 450)
    before = pacer.rows(4)
    for _ in range(10):
        pacer.learn(4, 0, 3 * machine.seconds(4, 0, random.Random(0)))
        pacer.learn(4, before, machine.seconds(4, before, random.Random(0)))
    assert pacer.rows(4) == before


def test_two_steps_that_were_held_up_change_nothing() -> None:
    pacer, machine, chance = StepPacer(), Machine(), random.Random(0)
    prefill(pacer, machine, 4, 450)
    before = pacer.rows(4)
    for _ in range(2):
        pacer.learn(4, before, 10 * machine.seconds(4, before, chance))
    assert pacer.rows(4) == before


def test_rows_follow_the_depth_of_a_prompt_and_the_heat_of_a_board() -> None:
    pacer = StepPacer()
    prefill(pacer, Machine(), 4, 450)
    shallow = pacer.rows(4)
    prefill(pacer, Machine(row=0.004), 4, 450)
    assert pacer.rows(4) <= shallow / 3
    prefill(pacer, Machine(fixed=0.02, decode=0.008, row=0.004), 4, 4000)  # all four times slower
    assert abs(pacer.rows(4) - shallow) <= 1


@pytest.mark.parametrize("row", [0.0001, 0.002, 0.05])
def test_a_step_without_decodes_ends_within_the_time_a_stop_may_take(row: float) -> None:
    steps = prefill(StepPacer(step_seconds=0.5), Machine(row=row, fixed=0.0), 0, 2000)
    assert all(seconds <= 0.501 for _, seconds in steps[1:])
    assert max(n for n, _ in steps[1:]) == min(int(0.5 / row), 256)


@given(
    steps=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 256), st.floats(0, 100)), max_size=60),
    n_decodes=st.integers(0, 16),
)
def test_whatever_was_measured_a_prompt_gets_on_and_no_step_is_too_large(
    steps: list[tuple[int, int, float]], n_decodes: int
) -> None:
    pacer = StepPacer(max_rows=100)
    for step in steps:
        pacer.learn(*step)
    for _ in range(2):
        pacer.learn(n_decodes, 0, 0.01)
    assert MIN_ROWS <= pacer.rows(n_decodes) <= 100


@pytest.mark.parametrize("fields", [{"target_ratio": 1.0}, {"step_seconds": 0.0}, {"max_rows": 0}])
def test_a_pace_that_gets_nowhere_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no pace"):
        StepPacer(**fields)
