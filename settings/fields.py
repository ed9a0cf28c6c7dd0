"""One setting, as it is declared, and what can be said about it: default, unit, reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ByteSize, Field
from pydantic.fields import FieldInfo

NOT_SET: Final = "not set"


def setting(
    default: Any = ..., *, what: str, why: str, unit: str = "", example: Any = None, **rules: Any
) -> Any:  # as pydantic's own Field
    """A field of a Settings class.

    ``what``: what it says, half a sentence. ``why``: the reason for its default, or for setting it. ``unit``: of the
    number. ``example``: for the file that `config init` writes, where there is no default. ``rules``: pydantic's.
    """
    if "default_factory" not in rules:
        rules["default"] = default
    return Field(description=what, json_schema_extra={"why": why, "unit": unit, "example": example}, **rules)


@dataclass(frozen=True, slots=True)
class Described:
    """A setting for people. ``default`` is as it stands in a TOML file; None where there is none."""

    name: str
    what: str
    why: str
    unit: str
    default: str | None
    example: str
    is_required: bool


def flag_of(name: str) -> str:
    """--kv-memory of kv_memory."""
    return f"--{name.replace('_', '-')}"


def describe(name: str, field: FieldInfo) -> Described:
    """What is declared about a field; empty words where nothing is."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    if field.default_factory is not None:
        default: str | None = toml_value(field.get_default(call_default_factory=True, validated_data={}))
    else:
        default = None if field.is_required() or field.default is None else toml_value(field.default)
    example = extra.get("example")
    return Described(
        name=name,
        what=field.description or "",
        why=str(extra.get("why") or ""),
        unit=str(extra.get("unit") or ""),
        default=default,
        example=toml_value(example) if example is not None else default or '""',
        is_required=field.is_required(),
    )


def toml_value(value: Any) -> str:
    """A value as a TOML file has it. Sizes have the unit in which they are whole."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, ByteSize):
        return json.dumps(size_text(value))
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    return str(value)


def size_text(n_bytes: int) -> str:
    """1GiB, 512MiB, or bytes where no unit is whole."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n_bytes and n_bytes % (1 << power) == 0:
            return f"{n_bytes >> power}{unit}"
    return f"{int(n_bytes)}B"
