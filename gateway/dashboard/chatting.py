"""The chat page's turns: an answer with what happens to it on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from kvferry.client import AsyncTurn, ClientError, Finished, NodeLost, Placed, Token, TurnEvent
from kvferry.gateway import sse
from kvferry.gateway.body import read_body
from kvferry.gateway.context import context_of
from kvferry.gateway.errors import api_error_of


class ChatTurn(BaseModel):
    """A turn that a person asks for on the page."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(min_length=1, max_length=100_000)
    session_id: str | None = None
    model: str | None = None
    max_tokens: int = Field(default=512, ge=1, le=100_000)
    temperature: float = Field(default=0.7, ge=0, le=100)


async def chat(request: Request) -> Response:
    """POST /dashboard/chat."""
    context = context_of(request)
    asked = await read_body(request, ChatTurn)
    client = context.client
    session = client.session(asked.session_id) if asked.session_id else await client.create_session(model=asked.model)
    turn = session.generate(
        asked.text, max_tokens=asked.max_tokens, temperature=asked.temperature, seed=context.new_seed()
    )
    return sse.EventStream(_events(turn))


async def _events(turn: AsyncTurn) -> AsyncGenerator[bytes]:
    yield sse.encode({"kind": "session", "session_id": turn.session_id, "turn_id": turn.turn_id})
    try:
        async with turn:
            async for event in turn:
                if (told := _told(event)) is not None:
                    yield sse.encode(told)
    except ClientError as error:
        yield sse.encode({"kind": "error", **api_error_of(error).body()["error"]})


def _told(event: TurnEvent) -> dict[str, Any] | None:
    match event:
        case Token():
            return {"kind": "token", "text": event.text, "index": event.sequence}
        case Placed():
            return {"kind": "placed", "node_id": event.node_id, "first_index": event.first_index}
        case NodeLost():
            return {"kind": "node_lost", "node_id": event.node_id, "cause": event.cause, "n_tokens": event.n_tokens}
        case Finished():
            return {"kind": "finished", **dataclasses.asdict(dataclasses.replace(event, answer=None))}
    return None
