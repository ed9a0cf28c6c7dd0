"""Routing by predicted time to first token beside sticky sessions, longest prefix first, and least loaded.

Four boards of a 2B model that differ by two, the same traces for every rule, several seeds each. Prints the mean time
to first token under each rule and the ratio; below 1 is sooner. Nothing here depends on the machine that runs it.

    python -m kvferry.bench.routing [--sessions 80] [--seeds 3]
"""

from __future__ import annotations

import random
import statistics
from typing import Final

import click

from kvferry.simulator.fleet_model import BOARD_2B
from kvferry.simulator.plan import FleetPlan, Planner
from kvferry.simulator.rules import RULES
from kvferry.simulator.trace import KINDS, drawn

RATES: Final[dict[str, tuple[float, ...]]] = {
    "chat": (0.05, 0.1, 0.15),
    "hot": (0.02, 0.05, 0.1),
    "bursts": (0.02, 0.05),
    "agents": (0.003, 0.006),
    "documents": (0.003, 0.006),
}
"""New sessions per second for four boards: from half idle to the edge of what they can answer at all."""


@click.command()
@click.option("--sessions", default=80, show_default=True)
@click.option("--seeds", default=3, show_default=True)
def main(sessions: int, seeds: int) -> None:
    """Print one line per trace."""
    others = [name for name in RULES if name != "predicted"]
    click.echo(f"{'trace':22}{'predicted':>11}" + "".join(f"{name:>24}" for name in others) + f"{'error':>8}")
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for kind, rates in RATES.items():
        for rate in rates:
            means, errors = compared(kind, rate, sessions, seeds)
            cells = []
            for name in others:
                ratio = means["predicted"] / means[name]
                ratios[name].append(ratio)
                cells.append(f"{means[name]:14.2f} s, {ratio:5.2f} x")
            click.echo(f"{kind + f' at {rate:g}/s':22}{means['predicted']:9.2f} s" + "".join(cells) + f"{errors:8.0%}")
    for name in others:
        click.echo(
            f"against {name}: geometric mean {statistics.geometric_mean(ratios[name]):.2f} x, "
            f"worst {max(ratios[name]):.2f} x"
        )


def compared(kind: str, rate: float, n_sessions: int, n_seeds: int) -> tuple[dict[str, float], float]:
    """Mean time to first token by rule, and the median error of the predictions."""
    means: dict[str, list[float]] = {name: [] for name in RULES}
    errors = []
    for seed in range(1, n_seeds + 1):
        trace = drawn(KINDS[kind], n_sessions, rate, random.Random(seed))
        for name, rule in RULES.items():
            outcome = Planner(FleetPlan(n_nodes=4, rates=BOARD_2B, spread=2.0), trace, rule(), seed).run()
            means[name].append(outcome.mean_s)
            if name == "predicted":
                errors.append(outcome.prediction_error)
    return {name: statistics.fmean(found) for name, found in means.items()}, statistics.median(errors)


if __name__ == "__main__":
    main()
