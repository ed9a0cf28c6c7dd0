"""`kvferry simulate`: what a fleet would do, before it is bought. `kvferry storm`: what the coordinator survives."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from pathlib import Path
from typing import Any

import click

from kvferry.terminal.output import json_option, print_json
from kvferry.terminal.words import say


class Quantity(click.FloatRange):
    """A number within bounds; what is no number is within none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


TOKENS_PER_S = Quantity(0.01, 1e9)
BYTES_PER_S = Quantity(1e3, 1e15)


@click.command(epilog="Example: kvferry simulate --nodes 12 --trace agents --compare")
@click.option("--nodes", default=8, show_default=True, type=click.IntRange(1, 100_000), help="Boards.")
@click.option("--sessions", default=200, show_default=True, type=click.IntRange(1), help="Sessions, if they are drawn.")
@click.option(
    "--trace", default="chat", show_default=True, metavar="FILE|KIND",
    help="A file with one session a line (see simulator/trace.py), or a kind of traffic: "
    "chat, documents, agents, hot, bursts.",
)  # fmt: skip
@click.option(
    "--rate", default=0.01, show_default=True, type=Quantity(1e-6, 1e3),
    help="New sessions per second and board, if they are drawn.",
)  # fmt: skip
@click.option("--seed", default=1, show_default=True, help="Of boards and of drawn sessions.")
@click.option(
    "--prefill", type=TOKENS_PER_S, help="Prompt tokens per second of the fastest board. [default: a 2B model's]"
)
@click.option("--decode", type=TOKENS_PER_S, help="Answer tokens per second of one turn.")
@click.option("--read", type=BYTES_PER_S, help="Bytes per second that a board reads from the store.")
@click.option("--row-bytes", type=click.IntRange(1, 2**40), help="Bytes of one token's K and V.")
@click.option("--memory-rows", type=click.IntRange(1, 2**40), help="Tokens whose rows fit a board's memory.")
@click.option(
    "--store", "store_bytes_per_s", default=1.1e9, show_default=True, type=BYTES_PER_S,
    help="Bytes per second of the store.",
)  # fmt: skip
@click.option(
    "--spread", default=1.5, show_default=True, type=Quantity(1, 100), help="The fastest board over the slowest."
)
@click.option("--compare", is_flag=True, help="The same trace under the rules that others use as well.")
@json_option
def simulate(
    nodes: int, sessions: int, trace: str, rate: float, seed: int, prefill: float | None, decode: float | None,
    read: float | None, row_bytes: int | None, memory_rows: int | None, store_bytes_per_s: float, spread: float,
    *, compare: bool, as_json: bool,
) -> None:  # fmt: skip
    """Predict time to first token, reuse and bytes moved for a fleet, with the coordinator's own routing."""
    from kvferry.simulator.fleet_model import BOARD_2B
    from kvferry.simulator.plan import FleetPlan, Planner
    from kvferry.simulator.rules import RULES
    from kvferry.simulator.trace import KINDS, drawn, read_trace

    measured: dict[str, Any] = {
        "prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode, "read_bytes_per_s": read,
        "bytes_per_row": row_bytes, "memory_rows": memory_rows,
    }  # fmt: skip
    rates = dataclasses.replace(BOARD_2B, **{name: value for name, value in measured.items() if value is not None})
    fleet = FleetPlan(n_nodes=nodes, rates=rates, spread=spread, store_bytes_per_s=store_bytes_per_s)
    if trace in KINDS:
        plan = drawn(KINDS[trace], sessions, rate * nodes, random.Random(seed))  # noqa: S311 - a simulation
    elif Path(trace).is_file():
        plan = read_trace(Path(trace))
    else:
        raise click.BadParameter(f"{trace} is neither a file nor one of {', '.join(KINDS)}", param_hint="--trace")
    n_turns = sum(len(s.turns) for s in plan)
    if not as_json:
        say(f"{nodes} boards, {len(plan)} sessions, {n_turns} turns")
    outcomes = []
    for name in RULES if compare else ["predicted"]:
        began = time.perf_counter()
        outcome = Planner(fleet, plan, RULES[name](), seed).run()
        took_s = time.perf_counter() - began
        outcomes.append(outcome_facts(name, outcome, took_s))
        if not as_json:
            say(outcome_text(name, outcome, took_s))
    if as_json:
        print_json({"n_boards": nodes, "n_sessions": len(plan), "n_turns": n_turns, "rules": outcomes})


def outcome_facts(rule: str, outcome: Any, took_s: float) -> dict[str, Any]:
    """For a program."""
    return {
        "rule": rule,
        "first_token_seconds": {"mean": outcome.mean_s, **{f"p{p}": outcome.percentile_s(p) for p in (50, 90, 99)}},
        "n_tokens": outcome.n_tokens,
        "n_resident": outcome.n_resident,
        "n_restored": outcome.n_restored,
        "n_computed": outcome.n_computed,
        "n_bytes_read": outcome.n_bytes_read,
        "n_switches": outcome.n_switches,
        "span_seconds": outcome.span_s,
        "prediction_error": outcome.prediction_error if rule == "predicted" else None,
        "simulated_in_seconds": took_s,
    }


def outcome_text(rule: str, outcome: Any, took_s: float) -> str:
    """For a person."""
    n_turns = len(outcome.first_token_s)
    reused = (outcome.n_resident + outcome.n_restored) / outcome.n_tokens
    lines = [
        f"{rule}: first token mean {outcome.mean_s:.2f} s, "
        + ", ".join(f"p{p} {outcome.percentile_s(p):.2f} s" for p in (50, 90, 99)),
        (
            f"  {reused:.0%} of the prompt tokens reused ({outcome.n_resident / outcome.n_tokens:.0%} in memory, "
            f"{outcome.n_restored / outcome.n_tokens:.0%} from the store), {outcome.n_computed} computed"
        ),
        (
            f"  {outcome.n_bytes_read / 1e9:.1f} GB read from the store, "
            f"{outcome.n_bytes_read / max(outcome.span_s, 1e-9) / 1e6:.0f} MB/s over {outcome.span_s:.0f} s; "
            f"{outcome.n_switches} of {n_turns} turns went to another board than the one before"
        ),
        f"  {outcome.route_seconds / n_turns * 1e3:.2f} ms a decision; simulated in {took_s:.1f} s",
    ]
    if rule == "predicted":
        lines.append(f"  prediction off by {outcome.prediction_error:.0%} at the median")
    return "\n".join(lines)


@click.command(epilog="Example: kvferry storm --seeds 100")
@click.option("--seeds", default=1_000, show_default=True, type=click.IntRange(1), help="How many storms.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--processes", default=1, show_default=True, type=click.IntRange(1), help="Side by side.")
@json_option
def storm(seeds: int, first: int, processes: int, as_json: bool) -> None:
    """Break simulated clusters in every way, and check that no token is lost, doubled or another one."""
    from kvferry.simulator.storm import run_seeds

    began = time.perf_counter()
    tally = run_seeds(range(first, first + seeds), processes)
    took_s = time.perf_counter() - began
    if as_json:
        violations = [{"seed": verdict.seed, "problems": list(verdict.problems)} for verdict in tally.failed]
        print_json(
            {
                "n_storms": tally.n_seeds,
                "virtual_seconds": tally.virtual_s,
                "n_tokens": tally.n_tokens,
                "seconds": took_s,
                "sometimes": tally.sometimes,
                "never": list(tally.never),
                "violations": violations,
            }
        )
        raise SystemExit(1 if tally.failed else 0)
    say(
        f"{tally.n_seeds} storms, {tally.virtual_s / 3600:.1f} hours of clusters, {tally.n_tokens} tokens read, "
        f"in {took_s:.0f} s"
    )
    for name, n in sorted(tally.sometimes.items(), key=lambda item: -item[1]):
        say(f"  {n:6} times: {name}")
    for name in tally.never:
        say(f"  never: {name}")
    for verdict in tally.failed:
        say(f"seed {verdict.seed}: {'; '.join(verdict.problems)}")
    say(f"{len(tally.failed)} violations")
    if tally.failed:
        raise SystemExit(1)
