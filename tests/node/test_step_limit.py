"""When a step takes so long that the engine must hang, by the steps that this node makes."""

from __future__ import annotations

from kvferry.node.step_limit import N_STEPS, PATIENCE, StepLimit


def test_nothing_is_said_of_steps_that_were_never_seen() -> None:
    limit = StepLimit(512)
    assert limit.seconds(with_prompts=False) == limit.seconds(with_prompts=True) == 0.0
    limit.learn(4, 4, 0.05)
    assert limit.seconds(with_prompts=False) == PATIENCE * 0.05
    assert limit.seconds(with_prompts=True) == 0.0


def test_a_prompts_step_may_be_as_long_as_the_largest_one() -> None:
    limit = StepLimit(512)
    limit.learn(128, 3, 0.25)
    assert limit.seconds(with_prompts=True) == PATIENCE * 1.0


def test_ten_times_slower_than_ever_is_no_hang() -> None:
    limit = StepLimit(512)
    for _ in range(N_STEPS):
        limit.learn(1, 1, 0.1)
    assert limit.seconds(with_prompts=False) > 10 * 0.1


def test_a_slow_time_that_is_over_is_forgotten() -> None:
    limit = StepLimit(512)
    limit.learn(1, 1, 9.0)
    for _ in range(N_STEPS):
        limit.learn(1, 1, 0.1)
    assert limit.seconds(with_prompts=False) == PATIENCE * 0.1
