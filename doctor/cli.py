"""`kvferry doctor`: all checks of all rooms, one after the other, each finding as soon as it is known."""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import click
from pydantic import ByteSize, TypeAdapter, ValidationError

from kvferry.doctor.finding import KV_BYTES, Check, Finding, Subject, Verdict, fail
from kvferry.doctor.report import print_finding
from kvferry.terminal.output import json_option, print_json
from kvferry.terminal.words import say

GROUP: Final = "kvferry.doctor_checks"
_ORDER: Final = ("machine", "store", "certificates", "engine")
"""The quick ones first; rooms that are not in it come last."""


class Size(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on only
    """512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        try:
            return int(TypeAdapter(ByteSize).validate_python(value))
        except ValidationError:
            self.fail(f"{value!r} is no size: give a number and a unit, such as 512MiB", param, ctx)


@click.command(epilog="Example: kvferry doctor --config /etc/kvferry/node.toml")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="A node's TOML file says the rest.")
@click.option("--model", help="Look at this model's files, and whether it fits the memory.")
@click.option("--store", metavar="PLACE", help="Look at this store: rates, mount options, room.")
@click.option(
    "--tls-dir",
    type=click.Path(path_type=Path),
    envvar="KVFERRY_TLS_DIR",
    show_envvar=True,
    help="Look at the certificates in this folder.",
)
@click.option(
    "--listen", multiple=True, metavar="HOST:PORT", help="Say whether it is free, or who has it.  [repeatable]"
)
@click.option("--kv-memory", type=Size(), help="What the node shall have for rows.  [default: 1GiB]")
@click.option("--quick", is_flag=True, help="Leave out what takes seconds: rates, golden bits, hashes.")
@json_option
def doctor(config_file: Path | None, as_json: bool, **asked: Any) -> None:
    """Examine this machine: what is odd, what it means, what to do.

    Ends with 1 when something does not work, with 0 when all is well or merely worth a look.
    """
    findings = []
    for finding in examine(_subject(config_file, asked)):
        findings.append(finding)
        if not as_json:
            print_finding(finding)
    counts = Counter(finding.verdict for finding in findings)
    if as_json:
        print_json({"ok": not counts[Verdict.FAIL], "findings": findings})
    else:
        say(f"{counts[Verdict.OK]} ok, {counts[Verdict.WARN]} to look at, {counts[Verdict.FAIL]} failed")
    if counts[Verdict.FAIL]:
        sys.exit(1)


def examine(subject: Subject) -> Iterator[Finding]:
    """All rooms' findings. A check that breaks is a finding too."""
    points = sorted(
        entry_points(group=GROUP),
        key=lambda point: (_ORDER.index(point.name) if point.name in _ORDER else len(_ORDER), point.name),
    )
    for point in points:
        try:
            check: Check = point.load()
            yield from check(subject)
        except Exception as error:  # noqa: BLE001 - the others are still to be heard
            yield fail(
                point.name,
                f"{type(error).__name__}: {error}",
                means="the check itself broke, so nothing is known about this",
                advice="reinstall kvferry, or report it",
            )


def _subject(config_file: Path | None, asked: dict[str, Any]) -> Subject:
    given = {name: value for name, value in asked.items() if value not in (None, ())}
    from_file = {} if config_file is None else _node_settings(config_file)
    told = {**from_file, **given}
    return Subject(
        model=told.get("model"),
        store=told.get("store"),
        tls_dir=Path(told["tls_dir"]) if "tls_dir" in told else None,
        listen=tuple(told.get("listen", ())),
        kv_bytes=told.get("kv_memory", KV_BYTES),
        quick=told["quick"],
    )


def _node_settings(file: Path) -> dict[str, Any]:
    """What of a node's settings matters here; `kvferry config check` judges the rest."""
    try:
        with file.open("rb") as opened:
            found = tomllib.load(opened)
        listens = [found[name] for name in ("listen", "metrics") if name in found]
        told: dict[str, Any] = {name: str(found[name]) for name in ("model", "store", "tls_dir") if name in found}
        if "kv_memory" in found:
            told["kv_memory"] = TypeAdapter(ByteSize).validate_python(found["kv_memory"])
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise click.UsageError(
            f"{file} cannot be used: {error}; `kvferry config check node --config {file}` says more"
        ) from error
    return {**told, "listen": tuple(map(str, listens))}
