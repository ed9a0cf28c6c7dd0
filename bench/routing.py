"""Routing by predicted time to first token beside sticky sessions, longest prefix first, and least loaded.

Four boards of a 2B model that differ by two, the same traces for every rule, several seeds each. Prints the mean time
to first token under each rule and the ratio; below 1 is sooner. Nothing here depends on the machine that runs it.

    python -m kvferry.bench.routing [--sessions 80] [--seeds 3]
    python -m kvferry.bench.routing --steps [--unsteady]        three small boards, as in ``routing_real``
"""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
from collections.abc import Callable
from typing import Final

import click

from kvferry.bench import routing_real
from kvferry.bench.stepping_board import BOARD_135M, SteppingBoard
from kvferry.simulator.fleet_model import BOARD_2B, BoardRates, ModelBoard, SharedStore
from kvferry.simulator.plan import FleetPlan, Planner
from kvferry.simulator.rules import RULES
from kvferry.simulator.trace import KINDS, Kind, drawn

RATES: Final[dict[str, tuple[float, ...]]] = {
    "chat": (0.05, 0.1, 0.15),
    "hot": (0.02, 0.05, 0.1),
    "bursts": (0.02, 0.05),
    "agents": (0.003, 0.006),
    "documents": (0.003, 0.006),
}
"""New sessions per second for four boards: from half idle to the edge of what they can answer at all."""

STEPPING_RATES: Final[dict[str, tuple[float, ...]]] = {
    "chat": (0.6, 1.0),
    "hot": (0.6, 1.0),
    "bursts": (0.6, 1.2),
    "documents": (0.4, 0.8),
}
"""For three boards; the first of each is what ``routing_real`` asks of its nodes."""

FLEET: Final = FleetPlan(n_nodes=4, rates=BOARD_2B, spread=2.0)
STEPPING_FLEET: Final = FleetPlan(
    n_nodes=3, rates=BOARD_135M, each=tuple(BOARD_135M.scaled(c) for c in routing_real.CORES), store_bytes_per_s=1e9
)


@dataclasses.dataclass(frozen=True, slots=True)
class Boards:
    """What the traces are run on."""

    fleet: FleetPlan = FLEET
    make: Callable[[str, BoardRates, SharedStore], ModelBoard] = ModelBoard


@click.command()
@click.option("--sessions", default=80, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--steps", is_flag=True, help="Traffic and boards of routing_real, by the engine's steps.")
@click.option("--unsteady", is_flag=True, help="With --steps: boards are slower for some seconds now and then.")
def main(sessions: int, seeds: int, *, steps: bool, unsteady: bool) -> None:
    """Print one line per trace."""
    boards = Boards(STEPPING_FLEET, functools.partial(SteppingBoard, unsteady=unsteady)) if steps else Boards()
    others = [name for name in RULES if name != "predicted"]
    click.echo(f"{'trace':22}{'predicted':>11}" + "".join(f"{name:>24}" for name in others) + f"{'error':>8}")
    ratios: dict[str, list[float]] = {name: [] for name in others}
    kinds = {name: kind for name, (kind, _) in routing_real.KINDS.items()} if steps else KINDS
    for kind, rates in (STEPPING_RATES if steps else RATES).items():
        for rate in rates:
            means, errors = compared(kinds[kind], rate, sessions, seeds, boards)
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


def compared(kind: Kind, rate: float, n_sessions: int, n_seeds: int, boards: Boards) -> tuple[dict[str, float], float]:
    """Mean time to first token by rule, and the median error of the predictions."""
    means: dict[str, list[float]] = {name: [] for name in RULES}
    errors = []
    for seed in range(1, n_seeds + 1):
        trace = drawn(kind, n_sessions, rate, random.Random(seed))
        for name, rule in RULES.items():
            outcome = Planner(boards.fleet, trace, rule(), seed, boards.make).run()
            means[name].append(outcome.mean_s)
            if name == "predicted":
                errors.append(outcome.prediction_error)
    return {name: statistics.fmean(found) for name, found in means.items()}, statistics.median(errors)


if __name__ == "__main__":
    main()
