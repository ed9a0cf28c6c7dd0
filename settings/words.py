"""Sentences about settings that are wrong: what, where it was given, what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvferry.settings.fields import size_text

_OUT_OF_BOUNDS: Final = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_WRONG_KIND: Final = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a text",
    "path_type": "a path",
    "tuple_type": "a list",
    "string_too_short": "given, or left out",
    "too_short": "given, or left out",
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def problem_text(error: Mapping[str, Any], label: str, *, is_size: bool) -> str:
    """One of pydantic's errors as a sentence that begins with ``label``, where the value was given."""
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return f"{label} is missing"
    if kind.startswith("value_error"):
        return f"{label} {error['msg'].removeprefix('Value error, ')}"
    return f"{label} {value!r} {_fault(error, is_size=is_size)}"


def _fault(error: Mapping[str, Any], *, is_size: bool) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind.startswith("byte_size"):
        return "is no size: give a positive number and a unit, such as 512MiB"
    if kind in _OUT_OF_BOUNDS:
        key, words = _OUT_OF_BOUNDS[kind]
        if is_size:
            return f"is too small: at least {size_text(int(context[key]))}"
        return f"must be {words} {context[key]:g}"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind in _WRONG_KIND:
        return f"must be {_WRONG_KIND[kind]}"
    message = error["msg"]
    return f"is wrong: {message[0].lower()}{message[1:]}"


def all_problems(role: str, problems: list[str]) -> str:
    """One sentence for one problem, a list for several."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{len(problems)} settings of the {role} are not right:", *problems])
