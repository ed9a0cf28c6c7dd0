"""`kvferry drill list`, `explain` and `run`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from kvferry.client.commands.options import connect
from kvferry.drills.cluster import default_threads_per_node
from kvferry.drills.drill_report import as_text, check_reports_folder, default_reports, headline, write_report
from kvferry.drills.errors import DrillError, DrillImpossible
from kvferry.drills.journal import Journal, clean_up_after_others
from kvferry.drills.model import DEFAULT_MODEL, get_ready
from kvferry.drills.runner import Outcome, run_scenario
from kvferry.drills.scenarios import SCENARIOS, Injection, Scenario
from kvferry.drills.targets.base import Target
from kvferry.drills.verdict import Ruling
from kvferry.terminal.completing import completes
from kvferry.terminal.interrupts import stop_signals_interrupt
from kvferry.terminal.output import json_option, print_json
from kvferry.terminal.words import say as tell
from kvferry.trust.files import reason_of
from kvferry.trust.options import credential_options

BROKEN_EXIT: Final = 1
IMPOSSIBLE_EXIT: Final = 2
INTERRUPTED_EXIT: Final = 130

DEMO_NAME: Final = "demo"
DEMO: Final = "Three turns; the serving node is killed in the second, everything is restarted before the third."
"""A command of its own, listed with the drills; it has no limits but that every token is the same."""


def say(line: str) -> None:
    """To whoever watches, if anybody still does; the result alone goes to standard output."""
    with suppress(OSError):  # the terminal is closed, or the disk of the log full: no reason to end here
        tell(line, err=True)


def list_scenarios(*, as_json: bool) -> None:
    """One line each, or JSON, after putting right what a drill that was killed left behind."""
    failures = clean_up_after_others(say)
    told = {DEMO_NAME: DEMO} | {scenario.name: scenario.hypothesis for scenario in SCENARIOS.values()}
    if as_json:
        print_json([{"name": name, "hypothesis": hypothesis} for name, hypothesis in told.items()])
    else:
        for name, hypothesis in told.items():
            click.echo(f"{name:17} {hypothesis}")
    for failure in failures:
        say(f"could not be undone: {failure}")


@click.command(epilog="Example: kvferry drill explain kill")
@click.argument("name", type=click.Choice([DEMO_NAME, *SCENARIOS]))
@json_option
def explain(name: str, as_json: bool) -> None:
    """Tell what a drill does, what it proves, and what it is held to."""
    if name == DEMO_NAME:
        _explain_demo(as_json=as_json)
        return
    scenario = SCENARIOS[name]
    if as_json:
        print_json(scenario)
        return
    click.echo(f"{scenario.name}: {scenario.hypothesis}\n\nWhat it proves: {scenario.proves}\n")
    click.echo(
        f"{scenario.n_conversations} conversations of {scenario.n_turns} turns; {scenario.needs_nodes} nodes or more."
    )
    for injection in scenario.injections:
        click.echo(
            f"In answer {injection.turn}, after {injection.after_tokens} tokens: {injection.what.value}, "
            f"{injection.where.value}; undone {_until(injection)}."
        )
    limits = scenario.limits
    click.echo("\nHeld to: 0 tokens lost, duplicated or differing")
    click.echo(f"         longest pause at most {limits.longest_pause_s:g} s, whole again in {limits.recovery_s:g} s")
    if limits.detection_s is not None:
        click.echo(f"         detected within {limits.detection_s:g} s")
    if limits.failovers_at_least:
        click.echo(f"         failovers at least {limits.failovers_at_least}")
    if limits.failovers_at_most is not None:
        click.echo(f"         failovers at most {limits.failovers_at_most}")
    if limits.refused_files_at_least:
        click.echo(f"         files refused at least {limits.refused_files_at_least}")
    if limits.failed_saves_at_least:
        click.echo(f"         saves that fail for lack of room at least {limits.failed_saves_at_least}")


def _explain_demo(*, as_json: bool) -> None:
    if as_json:
        print_json({"name": DEMO_NAME, "hypothesis": DEMO})
        return
    click.echo(f"{DEMO_NAME}: {DEMO}\n")
    click.echo("What it proves: a conversation outlives its node, and then the whole cluster.\n")
    click.echo("Held to: 0 tokens lost, duplicated or differing\n\nkvferry drill demo does it, on this machine.")


def _until(injection: Injection) -> str:
    after = f"after {injection.hold_s:g} s"
    return after if injection.until_turn is None else f"when answer {injection.until_turn} begins, or {after}"


@click.command(epilog="Example: kvferry drill run kill --json")
@click.argument("name", type=click.Choice([*SCENARIOS, "all"]))
@click.option("--target", "where", default="local", show_default=True, help="local, netns or inventory=FILE.")
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    shell_complete=completes("models"),
    show_default=True,
    help="Of a cluster made for the drill.",
)
@click.option("--nodes", "n_nodes", type=click.IntRange(2, 16), default=3, show_default=True, help="The same.")
@click.option("--threads-per-node", type=click.IntRange(min=1), default=None, help="The same. Default: half the CPUs.")
@click.option(
    "--report",
    "report_folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Reports go here, each into a folder of its own. Default: a folder of the user's data directory.",
)
@click.option("--allow-power-cut", is_flag=True, help="Boards of an inventory may be rebooted without warning.")
@credential_options
@click.option("--json", "is_json", is_flag=True, help="Print the report for programs instead.")
def run(
    name: str,
    where: str,
    model: str,
    n_nodes: int,
    threads_per_node: int | None,
    report_folder: Path | None,
    allow_power_cut: bool,
    is_json: bool,
) -> None:
    """Disturb a cluster, and judge whether it held. `all`: every drill, one after the other.

    Exit code 0: the hypothesis held, or this target cannot do it (skipped); 1: it did not hold; 2: the drill could not
    be done. Ctrl-C undoes everything first; after a kill -9 a reaper does, and the next drill looks again.
    """
    chosen = list(SCENARIOS.values()) if name == "all" else [SCENARIOS[name]]
    folder = report_folder or default_reports()
    _check(folder)
    failures = clean_up_after_others(say)
    n_threads = threads_per_node or default_threads_per_node()
    make = _maker(where, model, n_nodes, n_threads, allow_power_cut=allow_power_cut)
    worst = 0
    for scenario in chosen:
        worst = max(worst, _run_one(scenario, make, folder, is_json))
        if worst == INTERRUPTED_EXIT:
            break
    for failure in failures:
        say(f"could not be undone: {failure}")
    sys.exit(worst)


Maker = Callable[[Journal], Target]


def _maker(where: str, model: str, n_nodes: int, n_threads: int, *, allow_power_cut: bool) -> Maker:
    """How the target is made, once there is a journal. Raises DrillImpossible, UsageError."""
    if where in {"local", "netns"}:
        from kvferry.drills.targets import boards
        from kvferry.drills.targets.local import LocalTarget
        from kvferry.drills.targets.netns import NetnsTarget
        from kvferry.drills.targets.processes import OwnClusterOptions

        options = OwnClusterOptions(model=model, n_nodes=n_nodes, threads_per_node=n_threads)
        if where == "local":
            get_ready(model)
            return lambda journal: LocalTarget(journal, options)
        if boards.why_not() is None and boards.INSIDE not in os.environ:
            get_ready(model)  # there is no network where we go
            boards.enter()
        return lambda journal: NetnsTarget(journal, options)
    kind, _, file = where.partition("=")
    if kind == "inventory" and file:
        from kvferry.drills.targets.inventory import InventoryTarget

        inventory = Path(file)
        if not inventory.exists():
            raise click.UsageError(f"There is no inventory {file}.")
        return lambda journal: InventoryTarget(journal, inventory, connect, allow_power_cut=allow_power_cut)
    raise click.UsageError(f"There is no target {where!r}: local, netns or inventory=FILE.")


def _run_one(scenario: Scenario, make: Maker, folder: Path, is_json: bool) -> int:
    """The exit code."""
    started = time.time()
    logs = Path(tempfile.mkdtemp(prefix="kvferry-drill-logs-"))
    journal: Journal | None = None
    try:
        with stop_signals_interrupt(), Journal.begin(scenario.name) as journal:
            target = make(journal)
            try:
                outcome = run_scenario(scenario, target, started, say)
            finally:
                target.keep_logs(logs)
        left_behind = target.left_behind()
        place = keep_report(outcome, folder, left_behind, logs)
    except KeyboardInterrupt:
        say("interrupted" if _tell_what_stays(journal) else "interrupted; what the drill did has been undone")
        return INTERRUPTED_EXIT
    except DrillError as error:
        _tell_what_stays(journal)
        say(f"error: {error}")
        return IMPOSSIBLE_EXIT
    finally:
        shutil.rmtree(logs, ignore_errors=True)
    _tell(outcome, place, left_behind, is_json)
    return BROKEN_EXIT if outcome.ruling is Ruling.BROKEN or left_behind else 0


def _tell_what_stays(journal: Journal | None) -> bool:
    """Whether something does; the reaper has tried as well by now."""
    if journal is None or not journal.folder.exists():
        return False
    for failure in journal.failures:
        say(f"could not be undone: {failure}")
    say(
        f"not everything has been undone: the next drill tries again (what is left is written down in {journal.folder})"
    )
    return True


def _check(reports: Path) -> None:
    """Ends the command when no report could be kept there: after minutes of a drill it is late to find out."""
    try:
        check_reports_folder(reports)
    except OSError as error:
        say(f"error: no report can be written to {reports} ({reason_of(error)}): name another folder with --report")
        sys.exit(IMPOSSIBLE_EXIT)


def keep_report(outcome: Outcome, folder: Path, left_behind: list[str], logs: Path) -> Path:
    """The report, and the logs of a cluster that broke. What was found is told even where it cannot be kept.

    Raises DrillImpossible.
    """
    try:
        place = write_report(outcome, folder, left_behind)
        if outcome.ruling is Ruling.BROKEN:
            shutil.copytree(logs, place / "logs")
    except OSError as error:
        _tell_text(outcome, left_behind)
        reason = reason_of(error) if error.strerror else "not all files could be written"
        raise DrillImpossible(f"the report cannot be kept in {folder} ({reason}); all that is left is above") from error
    return place


def _tell_text(outcome: Outcome, left_behind: list[str]) -> None:
    tell(as_text(outcome))
    for thing in left_behind:
        tell(f"LEFT BEHIND: {thing}")


def _tell(outcome: Outcome, place: Path, left_behind: list[str], is_json: bool) -> None:
    if is_json:
        click.echo((place / "report.json").read_text(), nl=False)
        return
    _tell_text(outcome, left_behind)
    tell(f"\n{headline(outcome)}\nreport: {place / 'report.html'}")
