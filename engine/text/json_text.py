"""JSON that others wrote, a model among them: arguments of calls, and schemas. What is read here can be written again,
copied and walked through by recursion."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

NESTING_MAX: Final = 64
"""Objects and lists in each other. Published schemas have 20 at most; recursion ends at a few hundred."""

_TOO_DEEP: Final = f"nested more than {NESTING_MAX} deep"


def read_object(text: str) -> dict[str, Any]:
    """Raises ValueError, whose words go on from "it is", for no JSON object, or one that is nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - what is wrong is the text
    _check_nesting(value)
    if "\\u" in text:
        _check_characters(value)
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is none of its numbers")


def _check_nesting(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(NESTING_MAX):
        level = [inner for outer in level for inner in _parts(outer) if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _parts(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def _check_characters(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("no text: half of a surrogate pair is no character") from error
