"""Server-sent events, with ids by which a reader that lost its connection goes on (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.gateway.errors import invalid

DONE: Final = b"data: [DONE]\n\n"

KEEP_ALIVE: Final = b": still working\n"
"""For proxies that close what is silent. A comment has no empty line after it: with one, readers that have an event's
id, OpenAI's Python client among them, take it for an event without data."""

KEEP_ALIVE_SECONDS: Final = 10.0

MAX_DIGITS: Final = 9
"""Of an event's number: no answer has a thousand million tokens."""

LAST_EVENT_ID: Final = "last-event-id"
"""The header in which a reader says what it has."""

HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""A proxy that collects a stream before it passes it on makes it none."""

_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(data: Any) -> str:
    """In one line."""
    return _encoder.encode(data)


def encode(data: dict[str, Any], *, event_id: str = "", event: str = "") -> bytes:
    """One event; its data are one line of JSON."""
    head = f"event: {event}\n" if event else ""
    tail = f"id: {event_id}\n" if event_id else ""
    return f"{head}data: {to_json(data)}\n{tail}\n".encode()


def comment(text: str) -> bytes:
    """A line for whoever looks at the stream itself."""
    return f": {' '.join(text.split())}\n".encode()


def event_id(request_id: str, seen: Sequence[int]) -> str:
    """`seen`: of each answer, how far its reader has come."""
    return f"{request_id}:{','.join(map(str, seen))}"


def parse_number(text: str) -> int | None:
    """Of an event; None for what is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


def parse_event_id(value: str) -> tuple[str, tuple[int, ...]]:
    """The request, and how far the reader of each answer had come. Raises ApiError."""
    request_id, colon, indices = value.rpartition(":")
    numbers = [number for part in indices.split(",") if (number := parse_number(part)) is not None]
    if not colon or not request_id or len(numbers) != indices.count(",") + 1:
        raise invalid(f"Last-Event-ID {value!r} is none of this API's: send the last id that the stream had", None)
    return request_id, tuple(numbers)


class EventStream(Response):
    """Sends frames as they come, a comment whenever none came for a while, and closes them when the reader is gone.

    A reader that is slow holds its own frames back, which are not made before he takes them, and nobody else's.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncGenerator[bytes], first: bytes = b"", keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    ) -> None:
        super().__init__(headers=dict(HEADERS))
        del self.headers["content-length"]
        self._frames, self._first = frames, first
        self._keep_alive_seconds = keep_alive_seconds
        self._sent_at = 0.0

    @classmethod
    async def begun(cls, frames: AsyncGenerator[bytes]) -> EventStream:
        """The status is told with the first frame: until then an error still has one of its own, and is raised."""
        return cls(frames, await anext(frames, b""))

    @property
    def is_empty(self) -> bool:
        """Of one that has begun: it had no frame."""
        return not self._first

    async def aclose(self) -> None:
        """For one that is not sent."""
        await self._frames.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        del scope
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        tasks = [asyncio.create_task(job) for job in (self._send(send), left(receive), self._keep_alive(send))]
        sending = tasks[0]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._frames.aclose()
        if not sending.cancelled():
            sending.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        if self._first:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            self._sent_at = now()

    async def _keep_alive(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        self._sent_at = now()
        while True:
            wait_s = self._sent_at + self._keep_alive_seconds - now()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._sent_at = now()


async def left(receive: Receive) -> None:
    """Returns when the reader is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
