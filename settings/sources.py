"""Where settings come from, and which of several wins: flags, then the environment, then the TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError

from kvferry.settings.fields import flag_of
from kvferry.settings.words import did_you_mean

MAX_FILE_BYTES: Final = 1 << 20
"""Of a settings file: what is larger is another file that was named by mistake, or a device without an end."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whence a value is. ``name``: what a person changes: a flag, a variable, or a file's key."""

    kind: Literal["flag", "environment", "file", "default"]
    name: str


@dataclass(slots=True)
class Given:
    """All that was given: the winning values by name, whence each is, and what is wrong with the sources themselves."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any, origin: Origin) -> None:
        """A stronger source's word."""
        self.values[name], self.origins[name] = value, origin


def collect(model: type[BaseSettings], role: str, flags: Mapping[str, Any], file: Path | None) -> Given:
    """From all sources. A flag that is None was not given."""
    given = Given()
    if file is not None:
        _read_file(given, model, role, file)
    _read_environment(given, model, role)
    for name, value in flags.items():
        if value is not None:
            given.add(name, value, Origin("flag", flag_of(name)))
    return given


def variable_of(model: type[BaseSettings], name: str) -> str:
    """The environment's name of a setting."""
    alias = model.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else f"{_prefix(model)}{name.upper()}"


def _prefix(model: type[BaseSettings]) -> str:
    return model.model_config["env_prefix"] or ""


def _read_file(given: Given, model: type[BaseSettings], role: str, file: Path) -> None:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            given.problems.append(
                f"the configuration file {file} has more than {MAX_FILE_BYTES >> 20} MiB: name another"
            )
            return
        found = tomllib.loads(data.decode())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        given.problems.append(f"the configuration file {file} cannot be read: {reason}")
        return
    except UnicodeDecodeError as error:
        given.problems.append(f"the configuration file {file} is not TOML: byte {error.start} is not UTF-8")
        return
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        given.problems.append(f"the configuration file {file} is not TOML: {error}")
        return
    for name, value in found.items():
        if name in model.model_fields:
            given.add(name, value, Origin("file", f"{name} in {file.name}"))
        else:
            hint = did_you_mean(name.replace("-", "_"), model.model_fields)
            given.problems.append(f"{name} in {file.name} is no setting of a {role}{hint}")


def _read_environment(given: Given, model: type[BaseSettings], role: str) -> None:
    variables = {variable_of(model, name): name for name in model.model_fields}
    for variable in sorted(os.environ):
        if variable.startswith(_prefix(model)) and variable not in variables:
            hint = did_you_mean(variable, variables)
            given.problems.append(f"{variable} in the environment is no setting of a {role}{hint}")
    try:
        found = EnvSettingsSource(model)()
    except SettingsError as error:
        given.problems.append(f"the environment cannot be used: {error}")
        return
    for variable, name in variables.items():
        if name in found:
            given.add(name, found[name], Origin("environment", variable))
        elif variable in found:  # a name of its own, see validation_alias
            given.add(name, found[variable], Origin("environment", variable))
