"""The SDK without await: every call runs the asyncio one on a private event loop in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Self, Unpack

from kvferry.client.sdk.access import TokenSource
from kvferry.client.sdk.aio import DEFAULT_ADDRESS, PATIENCE_S, AsyncClient, AsyncSession, new_uuid
from kvferry.client.sdk.events import TurnEvent
from kvferry.client.sdk.forms import FREE, AnswerForm
from kvferry.client.sdk.loop_thread import LoopThread
from kvferry.client.sdk.retry import OnOutage
from kvferry.client.sdk.samples import AsyncSamples, SampleEvent
from kvferry.client.sdk.stored import SessionPlaces, StoredTree
from kvferry.client.sdk.turn import Answer, AsyncTurn
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
)
from kvferry.trust.bearer import Secret


class Client:
    """AsyncClient without await; may be used by several threads."""

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
        self._async = AsyncClient(
            address,
            patience_s=patience_s,
            new_id=new_id,
            on_outage=on_outage,
            tls_dir=tls_dir,
            token=token,
            insecure_plaintext=insecure_plaintext,
        )
        self._loop = LoopThread()

    @property
    def address(self) -> str:
        """host:port of the coordinator, of several that which is asked."""
        return self._async.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and every stream on it; turns go on. Closing twice is no error."""
        if self._loop.is_closed:
            return
        try:
            self._loop.run(self._async.aclose())
        finally:
            self._loop.close()

    def create_session(
        self,
        session_id: str | None = None,
        *,
        model: str | None = None,
        tenant: str = "",
        expires_after_s: int = 0,
    ) -> Session:
        """A new conversation; without a name it gets one of its own, without a model the first one that is served.

        ``tenant``: whose it is. Nothing that is computed for it is reused for another tenant, nor the other way.
        ``expires_after_s``: it is deleted when nobody used it for so long; 0: as the coordinator has it.
        """
        creating = self._async.create_session(session_id, model=model, tenant=tenant, expires_after_s=expires_after_s)
        return Session(self._loop, self._loop.run(creating))

    def session(self, session_id: str) -> Session:
        """A handle on a conversation that exists; asks nobody."""
        return Session(self._loop, self._async.session(session_id))

    def list_sessions(self, *, limit: int | None = None) -> list[SessionInfo]:
        """Most recently used first; at most `limit`."""
        return self._loop.run(self._async.list_sessions(limit=limit))

    def import_session(self, data: bytes, session_id: str | None = None) -> Session:
        """A session that another cluster exported, under its own name or this one; it goes on with the same bits."""
        return Session(self._loop, self._loop.run(self._async.import_session(data, session_id)))

    def models(self) -> list[ModelInfo]:
        """What the coordinator serves; the first one is that of sessions that name none."""
        return self._loop.run(self._async.models())

    def nodes(self) -> list[NodeInfo]:
        """The fleet as the coordinator sees it."""
        return self._loop.run(self._async.nodes())

    def snapshots(self, *, max_prefixes: int = 0, below: str = "") -> StoredTree:
        """The store's contents as a tree of prefixes, from the roots or below one of them; 0: as many as is usual."""
        return self._loop.run(self._async.snapshots(max_prefixes=max_prefixes, below=below))

    def status(self, *, within_s: float | None = None) -> ClusterStatus:
        """The coordinator and its fleet at a glance."""
        return self._loop.run(self._async.status(within_s=within_s))


class Session:
    """AsyncSession without await."""

    def __init__(self, loop: LoopThread, session: AsyncSession) -> None:
        self._loop = loop
        self._async = session

    @property
    def id(self) -> str:
        """Its name."""
        return self._async.id

    def details(self) -> SessionDetails:
        """Its turns, and all tokens of the finished ones."""
        return self._loop.run(self._async.details())

    def locate(self) -> SessionPlaces:
        """Where its rows lie: in which nodes' memories, in which files of the store."""
        return self._loop.run(self._async.locate())

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
    ) -> Turn:
        """See AsyncSession.generate."""
        turn = self._async.generate(
            messages,
            images=images,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            turn_id=turn_id,
            form=form,
            priority=priority,
            timeout_s=timeout_s,
            **fields,
        )
        return Turn(self._loop, turn)

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
    ) -> Samples:
        """See AsyncSession.samples."""
        samples = self._async.samples(
            messages,
            n,
            images=images,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            turn_id=turn_id,
            form=form,
            priority=priority,
            timeout_s=timeout_s,
            **fields,
        )
        return Samples(self._loop, samples)

    def resume_samples(self, n: int, turn_id: str | None = None) -> Samples:
        """Streams the first n answers again, from their first tokens on; without a name the latest request's."""
        return Samples(self._loop, self._async.resume_samples(n, turn_id))

    def resume(self, turn_id: str | None = None, *, from_index: int = 0) -> Turn:
        """Streams a turn, running or finished, from any token on; without a name the latest one."""
        return Turn(self._loop, self._async.resume(turn_id, from_index=from_index))

    def cancel(self, turn_id: str | None = None) -> None:
        """Ends a turn, without a name the latest one; it keeps the tokens that came."""
        self._loop.run(self._async.cancel(turn_id))

    def fork(
        self, new_session_id: str | None = None, *, n_turns: int | None = None, n_tokens: int | None = None
    ) -> Session:
        """A new conversation that starts as this one does.

        With its first n_turns, or its first n_tokens, which may end inside an answer (None: all finished turns).
        """
        return Session(self._loop, self._loop.run(self._async.fork(new_session_id, n_turns=n_turns, n_tokens=n_tokens)))

    def export(self) -> ExportedSession:
        """All of it, for another cluster's import_session; an answer that is not finished is left out."""
        return self._loop.run(self._async.export())

    def delete(self) -> None:
        """Forgets the conversation."""
        self._loop.run(self._async.delete())


class Samples:
    """AsyncSamples without await."""

    def __init__(self, loop: LoopThread, samples: AsyncSamples) -> None:
        self._loop = loop
        self._async = samples

    @property
    def turn_id(self) -> str:
        """The name of the turn, in each of their sessions."""
        return self._async.turn_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SampleEvent:
        try:
            return self._loop.run(self._async.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Closes the stream; the turns go on. A closed client has done so."""
        if not self._loop.is_closed:
            self._loop.run(self._async.aclose())

    def cancel(self) -> None:
        """Ends all of them; each keeps the tokens that came."""
        self._loop.run(self._async.cancel())

    def collect(self) -> list[Answer]:
        """Reads to the end; the answers in their order. Raises TurnFailed when one of them ended with an error."""
        return self._loop.run(self._async.collect())


class Turn:
    """AsyncTurn without await."""

    def __init__(self, loop: LoopThread, turn: AsyncTurn) -> None:
        self._loop = loop
        self._async = turn

    @property
    def session_id(self) -> str:
        """The conversation it belongs to."""
        return self._async.session_id

    @property
    def turn_id(self) -> str:
        """Its name."""
        return self._async.turn_id

    @property
    def next_index(self) -> int:
        """Index of the token that is due: where to resume."""
        return self._async.next_index

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TurnEvent:
        try:
            return self._loop.run(self._async.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the stream; the turn goes on. A closed client has done so."""
        if not self._loop.is_closed:
            self._loop.run(self._async.aclose())

    def cancel(self) -> None:
        """Ends the turn; the stream then finishes with reason CANCELLED and keeps the tokens that came."""
        self._loop.run(self._async.cancel())

    def collect(self, on_event: Callable[[TurnEvent], None] | None = None) -> Answer:
        """Reads to the end. Raises TurnFailed when the turn ended with an error."""
        return self._loop.run(self._async.collect(on_event))
