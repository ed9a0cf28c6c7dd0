"""The SDK for asyncio; `sync.py` is the same without await."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Final, Self, Unpack

from kvferry.client.errors import SessionExists, UnknownSession
from kvferry.client.sdk import wire
from kvferry.client.sdk.access import Access, TokenSource
from kvferry.client.sdk.connection import Connection
from kvferry.client.sdk.filling import request_of
from kvferry.client.sdk.fleet_wire import model_of, node_of, status_of
from kvferry.client.sdk.forms import FREE, AnswerForm
from kvferry.client.sdk.retry import OnOutage, Patience
from kvferry.client.sdk.samples import AsyncSamples
from kvferry.client.sdk.stored import SessionPlaces, StoredTree, places_of, tree_of
from kvferry.client.sdk.turn import AsyncTurn
from kvferry.client.sdk.values import (
    GREEDY,
    ClusterStatus,
    ExportedSession,
    Image,
    Message,
    ModelInfo,
    NodeInfo,
    RawPrompt,
    Sampling,
    SessionDetails,
    SessionInfo,
    TurnFields,
    with_fields,
)
from kvferry.proto.v1 import chat_pb2
from kvferry.trust.bearer import Secret

DEFAULT_ADDRESS: Final = "127.0.0.1:7070"

PATIENCE_S: Final = 60.0
"""A coordinator's restart takes about a second; a minute also covers that of its board."""

PAGE_SIZE: Final = 100


def new_uuid() -> str:
    """A random name for a session or a turn."""
    return str(uuid.uuid4())


class AsyncClient:
    """A connection to a coordinator, or to several that share a registry (`"a:7070,b:7070"`): when one fails, the next
    is asked, and a stream goes on there. Use it as `async with`, in one event loop.

    Short calls and streams alike are asked again while the coordinator is away, for up to `patience_s` seconds per
    outage (0: every error is raised at once). `on_outage` hears of each outage of a short call when it begins; a turn
    tells of its own by ConnectionLost. `new_id` makes the names of sessions and turns. `tls_dir`: folder with the
    certificate and key of a client, None: plaintext. `token`: an API token, where the cluster wants one; in plaintext
    it only goes to this machine unless `insecure_plaintext`. All methods raise ClientError, and so does this
    constructor, for an address that is not HOST:PORT and credentials that are none.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        patience_s: float = PATIENCE_S,
        new_id: Callable[[], str] = new_uuid,
        on_outage: OnOutage | None = None,
        tls_dir: str | PathLike[str] | None = None,
        token: str | Secret | TokenSource | None = None,
        insecure_plaintext: bool = False,
    ) -> None:
        access = Access(tls_dir, token, insecure_plaintext)
        self._connection = Connection(address, Patience(patience_s), on_outage, access)
        self._new_id = new_id

    @property
    def address(self) -> str:
        """host:port of the coordinator, of several that which is asked."""
        return self._connection.address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection and every stream on it; turns go on."""
        await self._connection.aclose()

    async def create_session(
        self, session_id: str | None = None, *, model: str | None = None, tenant: str = "", expires_after_s: int = 0
    ) -> AsyncSession:
        """A new conversation; without a name it gets one of its own, without a model the first one that is served.

        ``tenant``: whose it is. Nothing that is computed for it is reused for another tenant, nor the other way.
        ``expires_after_s``: it is deleted when nobody used it for so long; 0: as the coordinator has it.
        """
        wanted = session_id or self._new_id()
        request = request_of(
            chat_pb2.CreateSessionRequest,
            session_id=wanted,
            model=model,
            tenant=tenant,
            expires_after_seconds=expires_after_s,
        )
        await self._connection.ask_once_done(self._connection.stub.CreateSession, request, done_already=SessionExists)
        return self.session(wanted)

    def session(self, session_id: str) -> AsyncSession:
        """A handle on a conversation that exists; asks nobody."""
        return AsyncSession(self._connection, session_id, self._new_id)

    async def list_sessions(self, *, limit: int | None = None) -> list[SessionInfo]:
        """Most recently used first; at most `limit`."""
        found: list[SessionInfo] = []
        page_token = ""
        while limit is None or len(found) < limit:
            page_size = PAGE_SIZE if limit is None else min(PAGE_SIZE, limit - len(found))
            request = request_of(chat_pb2.ListSessionsRequest, page_size=page_size, page_token=page_token)
            page = await self._connection.ask(self._connection.stub.ListSessions, request)
            found += [wire.session_of(session) for session in page.sessions]
            page_token = page.next_page_token
            if not page_token:
                break
        return found[:limit]

    async def import_session(self, data: bytes, session_id: str | None = None) -> AsyncSession:
        """A session that another cluster exported, under its own name or this one; it goes on with the same bits."""
        request = wire.import_request(data, session_id or "")
        response = await self._connection.ask(self._connection.stub.ImportSession, request)
        return self.session(response.session.session_id)

    async def models(self) -> list[ModelInfo]:
        """What the coordinator serves; the first one is that of sessions that name none."""
        response = await self._connection.ask(self._connection.stub.ListModels, chat_pb2.ListModelsRequest())
        return [model_of(model) for model in response.models]

    async def nodes(self) -> list[NodeInfo]:
        """The fleet as the coordinator sees it."""
        response = await self._connection.ask(self._connection.stub.ListNodes, chat_pb2.ListNodesRequest())
        return [node_of(node) for node in response.nodes]

    async def snapshots(self, *, max_prefixes: int = 0, below: str = "") -> StoredTree:
        """The store's contents as a tree of prefixes, from the roots or below one of them; 0: as many as is usual."""
        request = request_of(chat_pb2.ListSnapshotsRequest, max_prefixes=max_prefixes, below=below)
        return tree_of(await self._connection.ask(self._connection.stub.ListSnapshots, request))

    async def status(self, *, within_s: float | None = None) -> ClusterStatus:
        """The coordinator and its fleet at a glance. `within_s`: how long that may take, in place of all patience."""
        request = chat_pb2.GetStatusRequest()
        response = await self._connection.ask(self._connection.stub.GetStatus, request, within_s=within_s)
        return status_of(response)


class AsyncSession:
    """A conversation. Made by AsyncClient.create_session, AsyncClient.session and fork."""

    def __init__(self, connection: Connection, session_id: str, new_id: Callable[[], str]) -> None:
        self.id = session_id
        self._connection = connection
        self._new_id = new_id

    async def details(self) -> SessionDetails:
        """Its turns, and all tokens of the finished ones."""
        request = request_of(chat_pb2.GetSessionRequest, session_id=self.id)
        response = await self._connection.ask(self._connection.stub.GetSession, request)
        return wire.session_details_of(response)

    async def locate(self) -> SessionPlaces:
        """Where its rows lie: in which nodes' memories, in which files of the store."""
        request = request_of(chat_pb2.LocateSessionRequest, session_id=self.id)
        return places_of(await self._connection.ask(self._connection.stub.LocateSession, request))

    def generate(
        self,
        messages: str | Sequence[Message] | RawPrompt,
        *,
        images: Sequence[Image | bytes] = (),
        sampling: Sampling = GREEDY,
        max_tokens: int = 0,
        stop: Sequence[str] = (),
        turn_id: str | None = None,
        form: AnswerForm = FREE,
        priority: int = 0,
        timeout_s: float = 0.0,
        **fields: Unpack[TurnFields],
    ) -> AsyncTurn:
        """Starts a turn with the new messages (a text: one message of the user) when the result is first iterated.

        ``RawPrompt("Once upon")`` in place of messages is gone on with as it is, without the model's chat template.

        ``images`` (files' bytes, or Image) stand in a text's message; in messages they have their own.

        Sampling comes as a value, as single fields (`temperature=0.8, seed=7`), or as a value with fields that replace
        its own; so does the answer's form (`tools=[...]`, `thinking=False`, `format=JsonSchema({...})`).
        max_tokens 0: to the end of the context. priority: -100 to 100, higher goes first. timeout_s: after so many
        seconds the answer ends with the tokens that it has (FinishReason.DEADLINE); 0: never. The same turn_id asked
        again is the same turn. Raises InvalidSampling, InvalidRequest, InvalidTools and InvalidFormat at once for
        values that no message can hold.
        """
        turn_id = turn_id or self._new_id()
        sampling, form = with_fields(sampling, form, fields)
        request = wire.generate_request(
            self.id,
            turn_id,
            messages=messages,
            images=images,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            form=form,
            priority=priority,
            timeout_s=timeout_s,
        )
        return AsyncTurn(self._connection, self.id, turn_id, request)

    def samples(
        self,
        messages: str | Sequence[Message] | RawPrompt,
        n: int,
        *,
        images: Sequence[Image | bytes] = (),
        sampling: Sampling = GREEDY,
        max_tokens: int = 0,
        stop: Sequence[str] = (),
        turn_id: str | None = None,
        form: AnswerForm = FREE,
        priority: int = 0,
        timeout_s: float = 0.0,
        **fields: Unpack[TurnFields],
    ) -> AsyncSamples:
        """Starts n answers to the same messages; as generate for the rest.

        Number i has the seed `seed` + i. Number 0 is this session's; each of the others is in a session of its own,
        a fork of this one, that can be gone on with or deleted.
        """
        turn_id = turn_id or self._new_id()
        sampling, form = with_fields(sampling, form, fields)
        request = wire.generate_request(
            self.id,
            turn_id,
            messages=messages,
            images=images,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            form=form,
            priority=priority,
            timeout_s=timeout_s,
            n_samples=n,
        )
        return AsyncSamples(self._connection, self.id, turn_id, n, request)

    def resume_samples(self, n: int, turn_id: str | None = None) -> AsyncSamples:
        """Streams the first n answers again, from their first tokens on; without a name the latest request's."""
        return AsyncSamples(self._connection, self.id, turn_id or "", n)

    def resume(self, turn_id: str | None = None, *, from_index: int = 0) -> AsyncTurn:
        """Streams a turn, running or finished, from any token on; without a name the latest one."""
        return AsyncTurn(self._connection, self.id, turn_id or "", first_index=from_index)

    async def cancel(self, turn_id: str | None = None) -> None:
        """Ends a turn, without a name the latest one; it keeps the tokens that came."""
        request = request_of(chat_pb2.CancelTurnRequest, session_id=self.id, turn_id=turn_id)
        await self._connection.ask(self._connection.stub.CancelTurn, request)

    async def fork(
        self, new_session_id: str | None = None, *, n_turns: int | None = None, n_tokens: int | None = None
    ) -> AsyncSession:
        """A new conversation that starts as this one does.

        With its first n_turns, or its first n_tokens, which may end inside an answer (None: all finished turns).
        """
        wanted = new_session_id or self._new_id()
        request = request_of(
            chat_pb2.ForkSessionRequest, session_id=self.id, new_session_id=wanted, n_turns=n_turns, n_tokens=n_tokens
        )
        await self._connection.ask_once_done(self._connection.stub.ForkSession, request, done_already=SessionExists)
        return AsyncSession(self._connection, wanted, self._new_id)

    async def export(self) -> ExportedSession:
        """All of it, for another cluster's import_session; an answer that is not finished is left out."""
        request = request_of(chat_pb2.ExportSessionRequest, session_id=self.id)
        return wire.exported_of((await self._connection.ask(self._connection.stub.ExportSession, request)).session)

    async def delete(self) -> None:
        """Forgets the conversation."""
        request = request_of(chat_pb2.DeleteSessionRequest, session_id=self.id)
        await self._connection.ask_once_done(self._connection.stub.DeleteSession, request, done_already=UnknownSession)
