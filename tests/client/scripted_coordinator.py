"""A ChatService over real gRPC that does what a test wrote down: each Generate or Resume plays the next script."""
# ruff: noqa: N802 - the methods are named by the protocol

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from free_ports import free_port

from kvferry.proto import status
from kvferry.proto.channel import server_options
from kvferry.proto.v1 import chat_pb2, chat_pb2_grpc, common_pb2

TURN = "turn-1"

STORED = chat_pb2.StoredFile(name="kv3_0.kv", start=4, end=9, n_bytes=70, used_at_ms=5)


@dataclass(frozen=True)
class Refuse:
    """End the call with this error."""

    code: str
    retry_after_ms: int | None = None


@dataclass(frozen=True)
class Break:
    """End the call as a dying process does: UNAVAILABLE, without a code of ours."""


@dataclass(frozen=True)
class Hang:
    """Say nothing more until the client goes away."""


Step = chat_pb2.TurnEvent | Refuse | Break | Hang


def started(turn_id: str = TURN) -> chat_pb2.TurnEvent:
    return chat_pb2.TurnEvent(turn_id=turn_id, started=chat_pb2.TurnStarted(n_prompt_tokens=7, n_history_tokens=3))


def placed(node_id: str, epoch: int, first_index: int = 0, turn_id: str = TURN) -> chat_pb2.TurnEvent:
    placement = chat_pb2.Placement(
        node_id=node_id,
        epoch=epoch,
        first_index=first_index,
        candidates=[chat_pb2.CandidateNode(node_id=node_id, chosen=True, reason="the only one")],
        prefix=common_pb2.PrefixReport(n_tokens=7, n_resident=3, n_computed=4),
    )
    return chat_pb2.TurnEvent(turn_id=turn_id, epoch=epoch, sequence=first_index, placed=placement)


def token(index: int, turn_id: str = TURN) -> chat_pb2.TurnEvent:
    event = chat_pb2.TokenEvent(
        token_id=100 + index, text=f"w{index} ", token_bytes=f"w{index} ".encode(), is_content=True
    )
    return chat_pb2.TurnEvent(turn_id=turn_id, sequence=index, token=event)


def parts(index: int, text: str, *made: chat_pb2.AnswerPart) -> chat_pb2.TurnEvent:
    event = chat_pb2.TokenEvent(token_id=100 + index, text=text, parts=made)
    return chat_pb2.TurnEvent(turn_id=TURN, sequence=index, token=event)


def tokens(start: int, stop: int) -> list[chat_pb2.TurnEvent]:
    return [token(index) for index in range(start, stop)]


def node_lost(node_id: str, n_tokens: int) -> chat_pb2.TurnEvent:
    lost = chat_pb2.NodeLost(node_id=node_id, cause="broken_stream", detail="")
    return chat_pb2.TurnEvent(turn_id=TURN, sequence=n_tokens, node_lost=lost)


def finished(n_tokens: int, **fields: Any) -> chat_pb2.TurnEvent:
    fields.setdefault("reason", common_pb2.FINISH_REASON_END)
    tail = [chat_pb2.AnswerPart(content="!")]
    finish = chat_pb2.TurnFinished(n_answer_tokens=n_tokens, tail_text="!", tail_parts=tail, **fields)
    return chat_pb2.TurnEvent(turn_id=TURN, sequence=n_tokens, finished=finish)


@dataclass
class ScriptedCoordinator(chat_pb2_grpc.ChatServiceServicer):
    """`scripts` are played in order, one per stream; `refusals` are given first to the short calls, one per call."""

    scripts: list[list[Step]] = field(default_factory=list)
    refusals: list[Refuse] = field(default_factory=list)
    sessions: dict[str, chat_pb2.Session] = field(default_factory=dict)
    token_ids: dict[str, list[int]] = field(default_factory=dict)  # of sessions that have others than 1, 2, 3
    images: dict[str, chat_pb2.Image] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    n_streams_open: int = 0
    echo_turn_id: bool = False  # put the turn's name that the client chose into each event

    async def start(self) -> str:
        self._server = grpc.aio.server(options=server_options())
        chat_pb2_grpc.add_ChatServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(f"127.0.0.1:{self.port}") == self.port
        await self._server.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Generate(self, request, context) -> AsyncIterator[chat_pb2.GenerateResponse]:
        self.calls.append(request)
        async for event in self._play(request, context):
            yield chat_pb2.GenerateResponse(event=event)

    async def Resume(self, request, context) -> AsyncIterator[chat_pb2.ResumeResponse]:
        self.calls.append(request)
        async for event in self._play(request, context):
            yield chat_pb2.ResumeResponse(event=event)

    async def _play(self, request, context) -> AsyncIterator[chat_pb2.TurnEvent]:
        self.n_streams_open += 1
        try:
            for step in self.scripts.pop(0):
                match step:
                    case Refuse():
                        await self._refuse(step, context)
                    case Break():
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                    case Hang():
                        await asyncio.Event().wait()
                    case _:
                        event = chat_pb2.TurnEvent()
                        event.CopyFrom(step)
                        event.turn_id = request.turn_id if self.echo_turn_id else event.turn_id
                        yield event
        finally:
            self.n_streams_open -= 1

    async def _refuse(self, refusal: Refuse, context) -> None:
        context.set_trailing_metadata(status.trailing_metadata(refusal.code, refusal.retry_after_ms))
        await context.abort(status.status_of(refusal.code), f"Refused with {refusal.code}.")

    async def _short_call(self, request, context) -> None:
        self.calls.append(request)
        if self.refusals:
            await self._refuse(self.refusals.pop(0), context)

    other_key = False  # what it says of its node

    async def CreateSession(self, request, context):
        await self._short_call(request, context)
        if request.session_id in self.sessions:
            await self._refuse(Refuse("session_exists"), context)
        self.sessions[request.session_id] = chat_pb2.Session(
            session_id=request.session_id, model="m", n_tokens=5, tenant=request.tenant
        )
        return chat_pb2.CreateSessionResponse(session=self.sessions[request.session_id])

    async def GetSession(self, request, context):
        await self._short_call(request, context)
        if request.session_id not in self.sessions:
            await self._refuse(Refuse("unknown_session"), context)
        turn = chat_pb2.Turn(
            turn_id=TURN,
            state=chat_pb2.TURN_STATE_FINISHED,
            messages=[chat_pb2.ChatMessage(role="user", content="hello")],
            answer="hi",
            finish_reason=common_pb2.FINISH_REASON_END,
            placements=[placed("n1", 1).placed],
        )
        if (image := self.images.get(request.session_id)) is not None:
            turn.messages[0].images.append(image)
        session = self.sessions[request.session_id]
        token_ids = self.token_ids.get(request.session_id, [1, 2, 3])
        return chat_pb2.GetSessionResponse(session=session, turns=[turn], token_ids=token_ids)

    async def ExportSession(self, request, context):
        await self._short_call(request, context)
        turn = chat_pb2.ExportedTurn(turn_id=TURN, prompt_ids=[1, 2], answer_ids=[3])
        session = chat_pb2.ExportedSession(session_id=request.session_id, model="m", turns=[turn])
        return chat_pb2.ExportSessionResponse(session=session)

    async def ImportSession(self, request, context):
        await self._short_call(request, context)
        made = chat_pb2.Session(session_id=request.session_id or request.session.session_id)
        return chat_pb2.ImportSessionResponse(session=made)

    async def ListModels(self, request, context):
        await self._short_call(request, context)
        return chat_pb2.ListModelsResponse(models=[chat_pb2.ModelInfo(name="m", fingerprints=["b" * 32])])

    async def ListSnapshots(self, request, context):
        await self._short_call(request, context)
        prefix = chat_pb2.StoredPrefix(
            id="p", parent_id=request.below, start=0, end=9, n_snapshots=2, n_children=1, files=[STORED]
        )
        return chat_pb2.ListSnapshotsResponse(prefixes=[prefix][: request.max_prefixes], n_snapshots=2, n_bytes=70)

    async def LocateSession(self, request, context):
        await self._short_call(request, context)
        return chat_pb2.LocateSessionResponse(
            n_tokens=9,
            resident=[chat_pb2.ResidentRows(node_id="a", n_tokens=8)],
            stored=[chat_pb2.StoredRows(fingerprint="f", n_tokens=7, files=[STORED])],
        )

    async def ListSessions(self, request, context):
        """Pages of two, whatever was asked for."""
        await self._short_call(request, context)
        start = int(request.page_token or 0)
        page = list(self.sessions.values())[start : start + 2]
        more = start + 2 < len(self.sessions)
        return chat_pb2.ListSessionsResponse(sessions=page, next_page_token=str(start + 2) if more else "")

    async def ForkSession(self, request, context):
        await self._short_call(request, context)
        session = chat_pb2.Session(session_id=request.new_session_id, forked_from=request.session_id)
        self.sessions[request.new_session_id] = session
        return chat_pb2.ForkSessionResponse(session=session)

    async def DeleteSession(self, request, context):
        await self._short_call(request, context)
        if self.sessions.pop(request.session_id, None) is None:
            await self._refuse(Refuse("unknown_session"), context)
        return chat_pb2.DeleteSessionResponse()

    async def CancelTurn(self, request, context):
        await self._short_call(request, context)
        return chat_pb2.CancelTurnResponse()

    async def ListNodes(self, request, context):
        await self._short_call(request, context)
        store = common_pb2.StoreFigures(bytes_saved=3 << 20, files_refused=2)
        node = chat_pb2.NodeInfo(
            node_id="n1", state=chat_pb2.NODE_STATE_LIVE, store_ok=True, kv_bytes_budget=1 << 30, store=store,
            other_key=self.other_key,
        )  # fmt: skip
        return chat_pb2.ListNodesResponse(nodes=[node])

    async def GetStatus(self, request, context):
        await self._short_call(request, context)
        nodes = (await self.ListNodes(request, context)).nodes
        n_open = sum(bool(session.open_turn_id) for session in self.sessions.values())
        return chat_pb2.GetStatusResponse(
            version="0", model="m", coordinator_id="c", nodes=nodes, n_failovers=2, n_open_turns=n_open
        )
