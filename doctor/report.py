"""Findings as a person reads them."""

from __future__ import annotations

import textwrap
from typing import Final

import click

from kvferry.doctor.finding import Finding, Verdict
from kvferry.terminal.words import say, shown

_COLOUR: Final = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def print_finding(finding: Finding) -> None:
    """A line, and what it means and what to do where there is something."""
    verdict = click.style(f"{finding.verdict.value:4}", fg=_COLOUR[finding.verdict])
    click.echo(f"{verdict}  {shown(f'{finding.check}: {finding.found}')}")
    for text in (finding.means, finding.advice):
        if text:
            whole = f"{text[:1].upper()}{text[1:]}."
            say(textwrap.fill(whole, 100, initial_indent="      ", subsequent_indent="      "))
