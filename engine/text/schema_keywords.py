"""Which keywords a JSON schema may have: llguidance refuses those it knows but cannot follow, and passes over others.

A schema whose ``maxLenght`` is passed over would be met by answers that its author did not want.
"""

from __future__ import annotations

from typing import Any, Final

_OF_SCHEMAS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})  # a list of schemas
_OF_NAMES: Final = frozenset({"$defs", "definitions", "patternProperties", "properties"})  # schemas by name
_OF_A_SCHEMA: Final = frozenset({"additionalItems", "additionalProperties", "items"})  # items: a list as well
_RULES: Final = frozenset({
    "$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength",
    "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern",
    "required", "type",
})  # fmt: skip
_NOTES: Final = frozenset({
    "$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "deprecated",
    "description", "example", "examples", "id", "readOnly", "title", "writeOnly",
})  # fmt: skip
_REFUSED_BY_LLGUIDANCE: Final = frozenset({
    "contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
})  # fmt: skip
_KNOWN: Final = _OF_SCHEMAS | _OF_NAMES | _OF_A_SCHEMA | _RULES | _NOTES | _REFUSED_BY_LLGUIDANCE


def unknown_keywords(schema: dict[str, Any]) -> list[str]:
    """The keywords that stand where a keyword does and are none, in order. ``x-...`` is anybody's own."""
    found: set[str] = set()
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        found |= {name for name in part.keys() - _KNOWN if not name.startswith("x-")}
        waiting += [part[name] for name in part.keys() & (_OF_SCHEMAS | _OF_A_SCHEMA)]
        waiting += [schemas for name in part.keys() & _OF_NAMES for schemas in _values(part[name])]
    return sorted(found)


def _values(by_name: Any) -> list[Any]:
    return list(by_name.values()) if isinstance(by_name, dict) else []
