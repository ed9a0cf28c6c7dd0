"""`kvferry config`: look at a process's settings, check them, or begin a file of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from kvferry.settings.fields import NOT_SET, describe, toml_value
from kvferry.settings.model import Settings
from kvferry.settings.roles import flags_of, read_run_options, role_names, settings_of
from kvferry.settings.sources import Given, collect
from kvferry.settings.template import template
from kvferry.terminal.output import json_option, print_json, print_table
from kvferry.terminal.words import say

_AS_RUN = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


class _Role(click.Choice[str]):
    """Names of entry points, looked up when they are needed."""

    def __init__(self) -> None:
        super().__init__(role_names())


def _role_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """ROLE, and the options that its `run` takes."""
    command = click.argument("run_options", nargs=-1, type=click.UNPROCESSED)(command)
    return click.argument("role", type=_Role())(command)


@click.group()
def config() -> None:
    """Show, check or begin the settings of a node, a coordinator or a gateway."""


@config.command(
    context_settings=_AS_RUN, epilog="Example: kvferry config show node --config node.toml --kv-memory 2GiB"
)
@_role_arguments
@json_option
def show(role: str, run_options: tuple[str, ...], as_json: bool) -> None:
    """Show every setting's value and where it comes from.

    ROLE takes the options of `kvferry ROLE run` behind it. Ends with 1 when something is not right.
    """
    as_json, model, given = _given(role, run_options, as_json)
    settings, problems = model.judge(given, here=True)
    rows = [_facts(model, settings, given, name) for name in model.model_fields]
    if as_json:
        print_json({"role": role, "settings": rows, "problems": problems})
    else:
        print_table(
            ["setting", "value", "from", "by"],
            [[row["name"], row["value"], row["from"], row["by"]] for row in rows],
            "There are no settings.",
        )
    _end(role, problems, quiet=as_json)


@config.command(context_settings=_AS_RUN, epilog="Example: kvferry config check coordinator --config c.toml")
@_role_arguments
@json_option
def check(role: str, run_options: tuple[str, ...], as_json: bool) -> None:
    """Say everything that is wrong with the settings, at once. Ends with 1 when something is.

    ROLE takes the options of `kvferry ROLE run` behind it.
    """
    as_json, model, given = _given(role, run_options, as_json)
    problems = model.judge(given, here=True)[1]
    if as_json:
        print_json({"role": role, "ok": not problems, "problems": problems})
    elif not problems:
        say(f"{role}: {len(given.origins)} settings given, {len(model.model_fields)} in all; they can be used")
    _end(role, problems, quiet=as_json)


@config.command(
    context_settings=_AS_RUN, epilog="Example: kvferry config init node --model smollm2-135m > /etc/kvferry/node.toml"
)
@_role_arguments
def init(role: str, run_options: tuple[str, ...]) -> None:
    """Print a TOML file with every setting, its default, its unit and the reason for it, as comments.

    ROLE takes the options of `kvferry ROLE run` behind it; those that are given are set in the file.
    """
    given, file = read_run_options(role, list(run_options))
    if file is not None:
        raise click.UsageError("init begins a file, it does not read one: leave --config out")
    say(template(settings_of(role), flags_of(role), given.values), nl=False)


def _given(role: str, run_options: tuple[str, ...], as_json: bool) -> tuple[bool, type[Settings], Given]:
    """--json may stand before ROLE or among the options behind it."""
    options = [option for option in run_options if option != "--json"]
    said, file = read_run_options(role, options)
    model = settings_of(role)
    given = collect(model, role, said.values, file)
    given.origins |= said.origins
    return as_json or len(options) < len(run_options), model, given


def _facts(model: type[Settings], settings: Settings | None, given: Given, name: str) -> dict[str, str]:
    origin = model.origin(name, given)
    if settings is not None:
        value = getattr(settings, name)
        text = NOT_SET if value is None else toml_value(value)
    elif name in given.values:
        text = toml_value(given.values[name])
    else:
        text = describe(name, model.model_fields[name]).default or NOT_SET
    by = "" if origin.kind == "default" else origin.name
    return {"name": name, "value": text, "from": origin.kind, "by": by}


def _end(role: str, problems: list[str], *, quiet: bool) -> None:
    if not problems:
        return
    if not quiet:
        n = f"{len(problems)} settings of the {role} are" if len(problems) > 1 else f"one setting of the {role} is"
        say(f"error: {n} not right:", err=True)
        for problem in problems:
            say(f"  {problem}", err=True)
    sys.exit(1)
