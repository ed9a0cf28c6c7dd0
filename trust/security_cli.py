"""`kvferry security check`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from kvferry.doctor.finding import Finding, Verdict, fail
from kvferry.doctor.report import print_finding
from kvferry.terminal.output import json_option, print_json
from kvferry.terminal.words import say


@click.group()
def security() -> None:
    """Find out what is open to others."""


@security.command(epilog="Example: kvferry security check /etc/kvferry --address 192.0.2.1:7070")
@click.argument("places", type=click.Path(path_type=Path), nargs=-1)
@click.option("--address", "addresses", multiple=True, metavar="HOST:PORT", help="Ask what runs there. [repeatable]")
@click.option("--strict", is_flag=True, help="End with 1 for what is merely worth a look as well.")
@json_option
def check(places: tuple[Path, ...], addresses: tuple[str, ...], strict: bool, as_json: bool) -> None:
    """Say what settings leave open, and what running servers tell a stranger.

    PLACES are settings files (TOML, or NAME.env with KVFERRY_… variables) of nodes, coordinators and gateways, or
    folders of them. Ends with 1 when something is open.
    """
    if not places and not addresses:
        raise click.UsageError("Name a settings file or a folder of them, or an --address.")
    findings = []
    for finding in _examine(places, addresses):
        findings.append(finding)
        if not as_json:
            print_finding(finding)
    counts = Counter(finding.verdict for finding in findings)
    is_good = not counts[Verdict.FAIL] and not (strict and counts[Verdict.WARN])
    if as_json:
        print_json({"ok": is_good, "findings": findings})
    else:
        say(f"{counts[Verdict.OK]} ok, {counts[Verdict.WARN]} to look at, {counts[Verdict.FAIL]} open")
    sys.exit(0 if is_good else 1)


def _examine(places: tuple[Path, ...], addresses: tuple[str, ...]) -> Iterator[Finding]:
    from kvferry.proto.address import parse_address
    from kvferry.trust.security_probe import findings_at
    from kvferry.trust.security_settings import findings_of, processes_in

    for place in places:
        try:
            processes = processes_in(place)
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{place} cannot be read as settings: {error}") from error
        if not processes:
            yield fail(str(place), "holds no settings", means="nothing was looked at", advice="name another place")
        for process in processes:
            yield from findings_of(process)
    for address in addresses:
        try:
            parse_address(address)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--address") from error
        yield from findings_at(address)
