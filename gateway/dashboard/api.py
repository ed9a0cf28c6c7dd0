"""What the page asks for, under /dashboard."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import psutil
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from kvferry.client import (
    AsyncTurn,
    ClientError,
    Finished,
    NodeInfo,
    NodeLost,
    Placed,
    SessionDetails,
    Token,
    TurnEvent,
)
from kvferry.gateway import sse
from kvferry.gateway.bearer import given_token
from kvferry.gateway.body import read_body
from kvferry.gateway.context import context_of
from kvferry.gateway.errors import ApiError, api_error_of

STATIC: Final = Path(__file__).parent / "static"

PAGES: Final = {"index.html": "text/html", "app.js": "text/javascript", "timeline.js": "text/javascript",
                "chat.js": "text/javascript", "style.css": "text/css"}  # fmt: skip

HEADERS: Final = {
    "content-security-policy": "default-src 'self'; style-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

MAX_SESSIONS: Final = 100


class ChatTurn(BaseModel):
    """A turn that a person asks for on the page."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(min_length=1, max_length=100_000)
    session_id: str | None = None
    model: str | None = None
    max_tokens: int = Field(default=512, ge=1, le=100_000)
    temperature: float = Field(default=0.7, ge=0, le=100)


async def page(request: Request) -> Response:
    """GET / and the files that belong to it."""
    name = request.path_params.get("name", "index.html")
    if name not in PAGES:
        raise ApiError(404, f"the dashboard has no file {name}", code="unknown_url")
    return FileResponse(STATIC / name, media_type=PAGES[name], headers=HEADERS)


async def cluster(request: Request) -> Response:
    """GET /dashboard/cluster."""
    context = context_of(request)
    status = dataclasses.asdict(await context.client.status())
    return JSONResponse({**status, "can_kill": context.may_kill})


async def sessions(request: Request) -> Response:
    """GET /dashboard/sessions: the latest ones."""
    found = await context_of(request).client.list_sessions(limit=MAX_SESSIONS)
    return JSONResponse([dataclasses.asdict(session) for session in found])


async def session(request: Request) -> Response:
    """GET /dashboard/sessions/ID: its turns, without anybody's words."""
    details = await context_of(request).client.session(request.path_params["session_id"]).details()
    return JSONResponse(_session_json(details))


def _session_json(details: SessionDetails) -> dict[str, Any]:
    turns = []
    for turn in details.turns:
        shown = dataclasses.asdict(dataclasses.replace(turn, messages=(), answer="", parsed=None))
        del shown["messages"], shown["answer"], shown["parsed"]
        turns.append(shown)
    return {"session": dataclasses.asdict(details.session), "turns": turns}


async def turns(request: Request) -> Response:
    """GET /dashboard/turns: a stream of turns, each whenever it changes."""
    watcher = context_of(request).watchers.of(given_token())

    async def frames() -> AsyncGenerator[bytes]:
        async with aclosing(watcher.subscribe()) as traces:
            async for trace in traces:
                yield sse.encode(trace)

    return sse.EventStream(frames())


async def chat(request: Request) -> Response:
    """POST /dashboard/chat: a turn, with what happens to it on the way."""
    context = context_of(request)
    asked = await read_body(request, ChatTurn)
    client = context.client
    session = client.session(asked.session_id) if asked.session_id else await client.create_session(model=asked.model)
    turn = session.generate(
        asked.text, max_tokens=asked.max_tokens, temperature=asked.temperature, seed=context.new_seed()
    )
    return sse.EventStream(_chat_events(turn))


async def _chat_events(turn: AsyncTurn) -> AsyncGenerator[bytes]:
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


async def kill(request: Request) -> Response:
    """POST /dashboard/nodes/ID/kill: SIGKILL, for a cluster that was started here to be broken."""
    context = context_of(request)
    node_id = request.path_params["node_id"]
    if not context.may_kill:
        raise ApiError(403, "nodes are killed from here on local clusters only: kvferry up", code="not_allowed")
    if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        raise ApiError(403, "another site may not kill nodes", code="not_allowed")
    node = next((node for node in await context.client.nodes() if node.node_id == node_id), None)
    if node is None:
        raise ApiError(404, f"there is no node {node_id}", code="unknown_node")
    _kill(node)
    return JSONResponse({"killed": node_id, "pid": node.pid})


def _kill(node: NodeInfo) -> None:
    """Only a process that the one which started us has started, and that says it is this node."""
    try:
        process = psutil.Process(node.pid)
        is_ours = process.ppid() == os.getppid() and node.node_id in process.cmdline()
    except psutil.Error:
        is_ours = False
    if not is_ours:
        raise ApiError(409, f"{node.node_id} (pid {node.pid}) is no process of this cluster", code="not_ours")
    os.kill(node.pid, signal.SIGKILL)


ROUTES: Final = [
    Route("/", page),
    Route("/assets/{name}", page),
    Route("/dashboard/cluster", cluster),
    Route("/dashboard/sessions", sessions),
    Route("/dashboard/sessions/{session_id}", session),
    Route("/dashboard/turns", turns),
    Route("/dashboard/chat", chat, methods=["POST"]),
    Route("/dashboard/nodes/{node_id}/kill", kill, methods=["POST"]),
]
