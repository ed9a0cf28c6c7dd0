"""The file that `kvferry config init` writes: every setting, what it means, its default, its unit, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvferry.settings.fields import Described, describe, toml_value
from kvferry.settings.model import Settings

_WIDTH: Final = 100


def template(model: type[Settings], flags: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """TOML. Settings of ``values`` are set, the others are comments that show the default, or an example.

    ``flags``: of `kvferry ROLE run`, by setting.
    """
    head = (
        f"# Settings of a kvferry {model.role}. Lines like #NAME = VALUE are defaults, or examples where it says so.\n"
        f"# Check it with: kvferry config check {model.role} --config FILE"
    )
    return "\n\n".join([head, *(_entry(model, name, flags, values) for name in model.model_fields)]) + "\n"


def _entry(model: type[Settings], name: str, flags: Mapping[str, str], values: Mapping[str, Any]) -> str:
    told = describe(name, model.model_fields[name])
    ways = ", ".join(way for way in (flags.get(name), model.variable(name)) if way)
    lines = [*_comment(told, ways)]
    if name in values:
        lines.append(f"{name} = {toml_value(values[name])}")
    else:
        lines.append(f"#{name} = {told.default or told.example}")
    return "\n".join(lines)


def _comment(told: Described, ways: str) -> Iterator[str]:
    if told.is_required:
        default = "Required; an example stands here"
    else:
        default = f"Default: {told.default}" if told.default else "Not set unless you do; an example stands here"
    unit = f" Unit: {told.unit}." if told.unit else ""
    for text in (f"{sentence(told.what)}", f"{default}.{unit} Also {ways}.", f"Why: {told.why}."):
        yield from textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="#   ")


def sentence(text: str) -> str:
    """Half a sentence as a whole one. A name at its beginning stays as it is."""
    first = text.split(" ", maxsplit=1)[0]
    is_name = "_" in first or any(letter.isdigit() for letter in first)
    return f"{text}." if is_name else f"{text[:1].upper()}{text[1:]}."
