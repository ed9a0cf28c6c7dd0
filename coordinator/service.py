"""ChatService: what clients call. Each handler checks, asks ``Turns`` or the registry, and answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from uuid import uuid4

from kvferry.coordinator import requests
from kvferry.coordinator.conversation import History
from kvferry.coordinator.errors import BadRequest, TurnElsewhere, UnknownSession, UnknownTurn
from kvferry.coordinator.fleet import Fleet
from kvferry.coordinator.models import Models, ServedModel
from kvferry.coordinator.ownership import Ownership
from kvferry.coordinator.peers import Peers
from kvferry.coordinator.pictures import spans_of
from kvferry.coordinator.registry import Registry, SessionRecord, TurnRecord, tokens_of
from kvferry.coordinator.samples import Key, merged, sample_keys
from kvferry.coordinator.snapshots import SnapshotView
from kvferry.coordinator.stored_prefixes import list_snapshots, stored_rows
from kvferry.coordinator.tasks import to_its_end
from kvferry.coordinator.tenants import Sharing
from kvferry.coordinator.transfer import exported, imported
from kvferry.coordinator.turn import Phase
from kvferry.coordinator.turns import Turns
from kvferry.coordinator.wire import (
    Context,
    model_message,
    node_message,
    resident_messages,
    session_message,
    streaming,
    turn_message,
    unary,
)
from kvferry.proto.v1 import chat_pb2, chat_pb2_grpc
from kvferry.trust.caller import calling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatService(chat_pb2_grpc.ChatServiceServicer):
    """All handlers run on the event loop and block nowhere."""

    turns: Turns
    peers: Peers
    registry: Registry
    fleet: Fleet
    snapshots: SnapshotView
    models: Models
    sharing: Sharing
    started_s: float
    clock: Callable[[], float]
    wall_ms: Callable[[], int]
    ownership: Ownership

    @unary
    async def CreateSession(
        self, request: chat_pb2.CreateSessionRequest, context: Context
    ) -> chat_pb2.CreateSessionResponse:
        tenant = self.ownership.tenant(request.tenant)
        record = self._new_session(request.session_id, self.models.named(request.model), tenant)
        record = dataclasses.replace(record, expires_after_s=request.expires_after_seconds)
        made = await self.registry.create_session(record)
        return chat_pb2.CreateSessionResponse(session=self._session(made))

    @unary
    async def GetSession(self, request: chat_pb2.GetSessionRequest, context: Context) -> chat_pb2.GetSessionResponse:
        session_id = await self._owned(request.session_id)
        record, turns = await self.registry.session_and_turns(session_id)
        placements = await self.registry.list_placements(session_id)  # those turns' for sure, of later ones perhaps
        return chat_pb2.GetSessionResponse(
            session=self._session(record),
            turns=[self._turn(turn, placements.get(turn.turn_id, [])) for turn in turns],
            token_ids=tokens_of(turns).tolist(),
        )

    @unary
    async def ListSessions(
        self, request: chat_pb2.ListSessionsRequest, context: Context
    ) -> chat_pb2.ListSessionsResponse:
        n = requests.page_size(request.page_size)
        found = await self.ownership.sessions(n + 1, requests.page_key(request.page_token))
        more = requests.page_token(requests.key_of(found[n - 1])) if len(found) > n else ""
        return chat_pb2.ListSessionsResponse(sessions=[self._session(r) for r in found[:n]], next_page_token=more)

    @unary
    async def ForkSession(self, request: chat_pb2.ForkSessionRequest, context: Context) -> chat_pb2.ForkSessionResponse:
        session_id = await self._owned(request.session_id)
        n_turns = request.n_turns if request.HasField("n_turns") else None
        n_tokens = request.n_tokens if request.HasField("n_tokens") else None
        if n_turns is not None and n_tokens is not None:
            raise BadRequest("n_turns and n_tokens both say where the fork begins: give one of them")
        new_session = self._new_session(request.new_session_id, self.models.default)  # it gets its parent's
        fork = await to_its_end(self.turns.fork_session(session_id, new_session, n_turns, n_tokens), "fork session")
        return chat_pb2.ForkSessionResponse(session=self._session(fork))

    @unary
    async def DeleteSession(
        self, request: chat_pb2.DeleteSessionRequest, context: Context
    ) -> chat_pb2.DeleteSessionResponse:
        await to_its_end(self._delete(await self._owned(request.session_id)), "delete session")
        return chat_pb2.DeleteSessionResponse()

    async def _delete(self, session_id: str) -> None:
        try:
            await self.turns.delete_session(session_id)
        except TurnElsewhere as e:
            await self.peers.cancel(e, session_id, "")
            await self.turns.delete_session(session_id)

    @unary
    async def ExportSession(
        self, request: chat_pb2.ExportSessionRequest, context: Context
    ) -> chat_pb2.ExportSessionResponse:
        session, turns = await self.registry.session_and_turns(await self._owned(request.session_id))
        pixels = await self.registry.pixels(p.content_hash for turn in turns for p in turn.pictures)
        return chat_pb2.ExportSessionResponse(session=exported(session, turns, pixels))

    @unary
    async def ImportSession(
        self, request: chat_pb2.ImportSessionRequest, context: Context
    ) -> chat_pb2.ImportSessionResponse:
        carried = request.session
        model = self.models.of_import(carried.model, carried.tokenizer_digest)
        record, turns, pixels = await asyncio.to_thread(
            imported, carried, model, request.session_id or carried.session_id, self.wall_ms()
        )
        record = dataclasses.replace(record, tenant=calling().tenant or record.tenant)
        made = await to_its_end(self.registry.import_session(record, turns, pixels), "import session")
        return chat_pb2.ImportSessionResponse(session=self._session(made))

    @streaming
    async def Generate(
        self, request: chat_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[chat_pb2.GenerateResponse]:
        asked = before(await checked(request), context.time_remaining())
        await self.ownership.check(asked.session_id)
        key = await to_its_end(self._begin(asked), "begin turn")  # one that runs counts, whether he waits or not
        if asked.n_samples == 1:
            async with contextlib.aclosing(self._events(key, from_index=0)) as events:
                async for event in events:
                    yield chat_pb2.GenerateResponse(event=event)
            return
        streams = [self._events(one, from_index=0) for one in sample_keys(key, asked.n_samples)]
        async with contextlib.aclosing(merged(streams)) as samples:
            async for number, event in samples:
                yield chat_pb2.GenerateResponse(event=event, sample=number)

    async def _begin(self, asked: requests.TurnRequest) -> Key:
        """The turn's key, or that of the first of its samples, which count as the caller's."""
        with self.ownership.beginning((asked.session_id, asked.turn_id), asked.n_samples):
            key = await self.turns.begin(asked)
            self.ownership.began(sample_keys(key, asked.n_samples))
        return key

    @streaming
    async def Resume(self, request: chat_pb2.ResumeRequest, context: Context) -> AsyncIterator[chat_pb2.ResumeResponse]:
        session_id = await self._owned(request.session_id)
        turn_id = requests.name("turn_id", request.turn_id) if request.turn_id else ""
        indexes = requests.resumed_samples(request.from_indexes)
        if not indexes:
            key = await self.turns.find(session_id, turn_id)
            async with contextlib.aclosing(self._events(key, request.from_index)) as events:
                async for event in events:
                    yield chat_pb2.ResumeResponse(event=event)
            return
        keys = await self.turns.samples(session_id, turn_id)
        if len(indexes) > len(keys):
            raise BadRequest(f"from_indexes has {len(indexes)} numbers and turn {keys[0][1]} has {len(keys)} answers")
        streams = [self._events(*one) for one in zip(keys, indexes, strict=False)]
        async with contextlib.aclosing(merged(streams)) as samples:
            async for number, event in samples:
                yield chat_pb2.ResumeResponse(event=event, sample=number)

    @unary
    async def CancelTurn(self, request: chat_pb2.CancelTurnRequest, context: Context) -> chat_pb2.CancelTurnResponse:
        turn_id = requests.name("turn_id", request.turn_id) if request.turn_id else ""
        key, *others = await self.turns.samples(await self._owned(request.session_id), turn_id)
        await asyncio.gather(self._cancel(*key), *(self._cancel_if_there(*other) for other in others))
        return chat_pb2.CancelTurnResponse()

    async def _owned(self, session_id: str) -> str:
        """The name of a session that the caller may touch. Raises InvalidName, UnknownSession."""
        await self.ownership.check(requests.name("session_id", session_id))
        return session_id

    async def _cancel(self, session_id: str, turn_id: str) -> None:
        try:
            await self.turns.cancel(session_id, turn_id)
        except TurnElsewhere as e:
            await self.peers.cancel(e, session_id, turn_id)

    async def _cancel_if_there(self, session_id: str, turn_id: str) -> None:
        with contextlib.suppress(UnknownSession, UnknownTurn):  # a sample that was deleted by itself
            await self._cancel(session_id, turn_id)

    @unary
    async def ListNodes(self, request: chat_pb2.ListNodesRequest, context: Context) -> chat_pb2.ListNodesResponse:
        return chat_pb2.ListNodesResponse(nodes=[node_message(m) for m in self.fleet.members()])

    @unary
    async def ListModels(self, request: chat_pb2.ListModelsRequest, context: Context) -> chat_pb2.ListModelsResponse:
        return chat_pb2.ListModelsResponse(
            models=[model_message(model, self.fleet.serving(model.name)) for model in self.models]
        )

    @unary
    async def GetStatus(self, request: chat_pb2.GetStatusRequest, context: Context) -> chat_pb2.GetStatusResponse:
        return await self.status()

    @unary
    async def ListSnapshots(
        self, request: chat_pb2.ListSnapshotsRequest, context: Context
    ) -> chat_pb2.ListSnapshotsResponse:
        return await asyncio.to_thread(list_snapshots, self.snapshots.indexes(), request)

    @unary
    async def LocateSession(
        self, request: chat_pb2.LocateSessionRequest, context: Context
    ) -> chat_pb2.LocateSessionResponse:
        session_id = await self._owned(request.session_id)
        record, turns = await self.registry.session_and_turns(session_id)
        history = History.of(turns)
        namespace = self.sharing.namespace(record.tenant)
        stored = await asyncio.to_thread(
            stored_rows, self.snapshots.indexes(), namespace, history.token_ids, spans_of(history.pictures)
        )
        return chat_pb2.LocateSessionResponse(
            n_tokens=len(history.token_ids), resident=resident_messages(self.fleet.members(), session_id), stored=stored
        )

    async def status(self) -> chat_pb2.GetStatusResponse:
        """The coordinator and its fleet at a glance. Raises RegistryUnavailable."""
        counts = await self.registry.counts()
        accuracy = self.fleet.forecasts.accuracy()
        return chat_pb2.GetStatusResponse(
            version=importlib.metadata.version("kvferry"),
            model=self.models.default.name,
            coordinator_id=self.registry.coordinator_id,
            generation=self.registry.generation,
            uptime_seconds=self.clock() - self.started_s,
            n_sessions=counts.n_sessions,
            n_open_turns=counts.n_open_turns,
            nodes=[node_message(m) for m in self.fleet.members()],
            n_snapshots=self.snapshots.n_snapshots,
            snapshot_bytes=self.snapshots.n_bytes,
            n_failovers=self.turns.n_failovers,
            n_turns_finished=self.turns.n_finished,
            n_predictions=accuracy.n,
            prediction_error_median=accuracy.error,
            predicted_seconds_median=accuracy.predicted_seconds,
            first_token_seconds_median=accuracy.actual_seconds,
            sees_images=self.models.default.sees_images,
            models=[model.name for model in self.models],
        )

    async def _events(self, key: Key, from_index: int) -> AsyncGenerator[chat_pb2.TurnEvent, None]:
        """The turn's events, from here or from the coordinator that has the turn."""
        try:
            async with contextlib.aclosing(self.turns.events(key, from_index)) as events:
                async for event in events:
                    yield event
        except TurnElsewhere as e:  # before the first event: who has a turn is asked once
            async with contextlib.aclosing(self.peers.resume(e, *key, from_index)) as events:
                async for event in events:
                    yield event

    def _new_session(self, session_id: str, model: ServedModel, tenant: str = "") -> SessionRecord:
        chosen = requests.name("session_id", session_id) if session_id else uuid4().hex
        now_ms = self.wall_ms()
        return SessionRecord(
            session_id=chosen, model=model.name, tokenizer_digest=model.text.digest, created_at_ms=now_ms,
            updated_at_ms=now_ms, tenant=requests.name("tenant", tenant) if tenant else "",
        )  # fmt: skip

    def _session(self, record: SessionRecord) -> chat_pb2.Session:
        return session_message(record, self.turns.last_node(record.session_id))

    def _turn(self, record: TurnRecord, placements: list[bytes]) -> chat_pb2.Turn:
        live = self.turns.live_turn(record.session_id, record.turn_id)
        if live is None:
            return turn_message(record, map(chat_pb2.Placement.FromString, placements), running=False)
        return turn_message(record, live.placements, running=live.phase is not Phase.WAITING)


def before(request: requests.TurnRequest, call_seconds: float | None) -> requests.TurnRequest:
    """The request, to be answered within the time that is left of its call."""
    if call_seconds is None or 0 < request.timeout_s <= call_seconds:
        return request
    return dataclasses.replace(request, call_seconds=max(call_seconds, 0.001))


async def checked(request: chat_pb2.GenerateRequest) -> requests.TurnRequest:
    """``requests.turn_request``; in a thread when there are images, megabytes of which have to be hashed."""
    if any(message.images for message in request.messages):
        return await asyncio.to_thread(requests.turn_request, request)
    return requests.turn_request(request)
