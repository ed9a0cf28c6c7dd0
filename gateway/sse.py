"""Server-sent events, with ids by which a reader that lost its connection goes on (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from kvferry.gateway.errors import invalid

DONE: Final = b"data: [DONE]\n\n"

KEEP_ALIVE: Final = b": still working\n"
"""For proxies that close what is silent. A comment has no empty line after it: with one, readers that have an event's
id, OpenAI's Python client among them, take it for an event without data."""

KEEP_ALIVE_SECONDS: Final = 10.0

HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""A proxy that collects a stream before it passes it on makes it none."""

_SEPARATORS: Final = (",", ":")


def encode(data: dict[str, Any], *, event_id: str = "", event: str = "") -> bytes:
    """One event; its data are one line of JSON."""
    body = json.dumps(data, ensure_ascii=False, separators=_SEPARATORS)
    head = f"event: {event}\n" if event else ""
    tail = f"id: {event_id}\n" if event_id else ""
    return f"{head}data: {body}\n{tail}\n".encode()


def comment(text: str) -> bytes:
    """A line for whoever looks at the stream itself."""
    return f": {' '.join(text.split())}\n".encode()


def event_id(request_id: str, seen: Sequence[int]) -> str:
    """`seen`: of each answer, how far its reader has come."""
    return f"{request_id}:{','.join(map(str, seen))}"


def parse_event_id(value: str) -> tuple[str, tuple[int, ...]]:
    """The request, and how far the reader of each answer had come. Raises ApiError."""
    request_id, colon, indices = value.rpartition(":")
    parts = indices.split(",")
    if not colon or not request_id or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise invalid(f"Last-Event-ID {value!r} is none of this API's: send the last id that the stream had", "id")
    return request_id, tuple(map(int, parts))
