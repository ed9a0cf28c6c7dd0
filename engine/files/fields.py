"""Reading figures out of a file's key-value part: each by name and type, each refusal naming the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from kvferry.engine.errors import ModelInvalid
from kvferry.engine.files.regular import exists, fault_of

_T = TypeVar("_T")

JSON_BYTES_MAX: Final = 1 << 26  # the largest published tokenizer.json has 35 MB
CONFIG_BYTES_MAX: Final = 1 << 20  # a config.json has some 2 KB
_LIST_ITEMS_MAX: Final = 1 << 12  # of a list of figures; the longest has one entry for each layer


class Fields:
    """Values by key, with the file's name for the refusals. Absent and null are the same."""

    def __init__(self, where: object, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int:
            raise self._wrong_type(key, "int", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float, or an integer that stands for one."""
        value = self._value(key, default)
        if type(value) is int and abs(value) < 1 << 53:
            return float(value)
        if type(value) is not float:
            raise self._wrong_type(key, "float", value)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._wrong_type(key, "bool", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if type(value) is not str:
            raise self._wrong_type(key, "str", value)
        return value

    def integers(self, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        return self._items(key, int, default)

    def numbers(self, key: str, default: tuple[float, ...] | None = None) -> tuple[float, ...]:
        value = self._value(key, default)
        if isinstance(value, list | tuple) and all(type(item) in {int, float} for item in value):
            return tuple(Fields(self.where, {key: item}).number(key) for item in value[:_LIST_ITEMS_MAX])
        raise self._wrong_type(key, "list of float", value)

    def flags(self, key: str, default: tuple[bool, ...] | None = None) -> tuple[bool, ...]:
        return self._items(key, bool, default)

    def part(self, key: str) -> Fields:
        """A nested object; empty when it is not there."""
        value = self.values.get(key)
        if value is None:
            return Fields(self.where, {})
        if not isinstance(value, dict):
            raise self._wrong_type(key, "object", value)
        return Fields(self.where, value)

    def _items(self, key: str, kind: type[_T], default: tuple[_T, ...] | None) -> tuple[_T, ...]:
        value = self._value(key, default)
        if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
            raise self._wrong_type(key, f"list of {kind.__name__}", value)
        if len(value) > _LIST_ITEMS_MAX:
            raise ModelInvalid(f"{self.where}: {key!r} has {len(value)} items, more than {_LIST_ITEMS_MAX}")
        return tuple(value)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelInvalid(f"{self.where}: {key!r} is missing")
        return default

    def _wrong_type(self, key: str, expected: str, value: object) -> ModelInvalid:
        return ModelInvalid(f"{self.where}: {key!r} is of type {type(value).__name__}, expected {expected}")


def read_bytes(path: Path, n_bytes_max: int) -> bytes:
    """A whole file of limited size. Raises ModelInvalid."""
    fault = fault_of(path)
    if fault is not None and exists(path):
        raise ModelInvalid(f"{path} {fault}")
    try:
        with path.open("rb") as file:
            body = file.read(n_bytes_max + 1)
    except FileNotFoundError as error:
        raise ModelInvalid(f"{path.parent} has no {path.name}, so it is not a whole model; fetch it again") from error
    except OSError as error:
        raise ModelInvalid(f"{path} cannot be read: {error.strerror}") from error
    if len(body) > n_bytes_max:
        raise ModelInvalid(f"{path} is larger than the limit of {n_bytes_max} bytes")
    return body


def parse_json(path: Path, body: bytes) -> dict[str, Any]:
    """A JSON object. Raises ModelInvalid."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ModelInvalid(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path} is not a JSON object")
    return value


def read_json(path: Path, n_bytes_max: int = CONFIG_BYTES_MAX) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ModelInvalid."""
    return parse_json(path, read_bytes(path, n_bytes_max))


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The same; an empty object when there is no such file."""
    return read_json(path) if path.is_file() else {}
