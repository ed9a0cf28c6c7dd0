"""Whose settings there are: each process's class and the command that starts it, named by entry points, so that no
room is imported for another one's sake."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from kvferry.settings.model import Settings
from kvferry.settings.sources import Given, Origin

GROUP: Final = "kvferry.settings"
_COMMANDS: Final = "kvferry.commands"
_FILE_PARAMETERS: Final = ("config_file", "config")


def role_names() -> list[str]:
    """Sorted."""
    return sorted(point.name for point in entry_points(group=GROUP))


def settings_of(role: str) -> type[Settings]:
    """Imports the role's room, but none of what it runs with."""
    (point,) = entry_points(group=GROUP, name=role)
    found: type[Settings] = point.load()
    return found


def run_command(role: str) -> click.Command:
    """`kvferry ROLE run`."""
    (point,) = entry_points(group=_COMMANDS, name=role)
    group: click.Group = point.load()
    return group.commands["run"]


def flags_of(role: str) -> dict[str, str]:
    """The flag of each setting that has one, by the setting's name."""
    options = {parameter.name: parameter.opts[0] for parameter in run_command(role).params}
    return {name: options[name] for name in settings_of(role).model_fields if name in options}


def read_run_options(role: str, arguments: list[str]) -> tuple[Given, Path | None]:
    """What the options of `kvferry ROLE run ARGUMENTS` say, and the file of --config.

    Raises click.UsageError as that command would.
    """
    given = Given()
    with run_command(role).make_context(f"kvferry {role} run", list(arguments)) as context:
        file = next((context.params[name] for name in _FILE_PARAMETERS if context.params.get(name)), None)
        options = {parameter.name: parameter for parameter in context.command.params}
        for name in settings_of(role).model_fields.keys() & context.params.keys():
            value, source = context.params[name], context.get_parameter_source(name)
            if value in (None, ()) or source is ParameterSource.DEFAULT:  # not what somebody said
                continue
            variable = options[name].envvar
            if source is ParameterSource.ENVIRONMENT and isinstance(variable, str):
                given.add(name, value, Origin("environment", variable))
            else:
                given.add(name, value, Origin("flag", options[name].opts[0]))
    return given, file
