"""What the page asks for: its files under /assets, and what it shows under /dashboard."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from kvferry.client import SessionDetails
from kvferry.gateway import sse
from kvferry.gateway.bearer import given_token
from kvferry.gateway.browsers import Endpoint
from kvferry.gateway.context import context_of
from kvferry.gateway.dashboard.chatting import chat
from kvferry.gateway.dashboard.drill_reports import list_reports, read_report
from kvferry.gateway.dashboard.guard import guarded
from kvferry.gateway.dashboard.killing import kill
from kvferry.gateway.errors import ApiError

STATIC: Final = Path(__file__).parent / "static"

KINDS: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

PAGES: Final = {path.name: KINDS[path.suffix] for path in STATIC.iterdir() if path.suffix in KINDS}

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

MAX_SESSIONS: Final = 100


async def page(request: Request) -> Response:
    """GET / and the files that belong to it."""
    name = request.path_params.get("name", "index.html")
    if name not in PAGES:
        raise ApiError(404, f"the dashboard has no file {name}", code="unknown_url")
    return FileResponse(STATIC / name, media_type=PAGES[name], headers=HEADERS)


async def cluster(request: Request) -> Response:
    """GET /dashboard/cluster: with ?history=1 what the nodes did in the last minutes, else only now."""
    context = context_of(request)
    status = await context.client.status()
    history = context.dashboard.history
    history.add(status.nodes)
    samples = history.all() if request.query_params.get("history") else history.latest()
    return JSONResponse(
        {**dataclasses.asdict(status), "can_kill": context.dashboard.may_kill, "history": samples}
        | {"has_drills": context.dashboard.drill_reports is not None}
    )


async def sessions(request: Request) -> Response:
    """GET /dashboard/sessions: the latest ones."""
    found = await context_of(request).client.list_sessions(limit=MAX_SESSIONS)
    return JSONResponse([dataclasses.asdict(session) for session in found])


async def session(request: Request) -> Response:
    """GET /dashboard/sessions/ID: its turns and where its rows lie, without anybody's words."""
    asked = context_of(request).client.session(request.path_params["session_id"])
    details, places = await asyncio.gather(asked.details(), asked.locate())
    return JSONResponse({**_session_json(details), "places": dataclasses.asdict(places)})


def _session_json(details: SessionDetails) -> dict[str, Any]:
    turns = []
    for turn in details.turns:
        shown = dataclasses.asdict(dataclasses.replace(turn, messages=(), answer="", parsed=None))
        del shown["messages"], shown["answer"], shown["parsed"]
        turns.append(shown)
    return {"session": dataclasses.asdict(details.session), "turns": turns}


async def turns(request: Request) -> Response:
    """GET /dashboard/turns: a stream of turns, each whenever it changes."""
    watcher = context_of(request).dashboard.watchers.of(given_token())

    async def frames() -> AsyncGenerator[bytes]:
        async with aclosing(watcher.subscribe()) as traces:
            async for trace in traces:
                yield sse.encode(trace)

    return sse.EventStream(frames())


async def store(request: Request) -> Response:
    """GET /dashboard/store: the tree of stored prefixes, or with ?below=ID what is below one; and who lies there."""
    context = context_of(request)
    found = await context.dashboard.whereabouts.in_store()  # first: what is saved meanwhile is in the tree then
    tree = await context.client.snapshots(below=request.query_params.get("below", ""))
    return JSONResponse({**dataclasses.asdict(tree), "sessions": found})


async def drills(request: Request) -> Response:
    """GET /dashboard/drills: the reports of the folder, the newest first."""
    folder = context_of(request).dashboard.drill_reports
    return JSONResponse([] if folder is None else await asyncio.to_thread(list_reports, folder))


async def drill(request: Request) -> Response:
    """GET /dashboard/drills/NAME: one of them."""
    folder, name = context_of(request).dashboard.drill_reports, request.path_params["name"]
    report = None if folder is None else await asyncio.to_thread(read_report, folder, name)
    if report is None:
        raise ApiError(404, "there is no such drill report", code="unknown_report")
    return JSONResponse(report)


def _route(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
    return Route(path, guarded(endpoint), methods=[method])


ROUTES: Final = [
    _route("/", page),
    _route("/assets/{name}", page),
    _route("/dashboard/cluster", cluster),
    _route("/dashboard/sessions", sessions),
    _route("/dashboard/sessions/{session_id}", session),
    _route("/dashboard/turns", turns),
    _route("/dashboard/store", store),
    _route("/dashboard/drills", drills),
    _route("/dashboard/drills/{name}", drill),
    _route("/dashboard/chat", chat, "POST"),
    _route("/dashboard/nodes/{node_id}/kill", kill, "POST"),
]
