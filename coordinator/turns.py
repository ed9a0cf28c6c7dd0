"""Sessions and the turns that are alive in this process: begin, attach, cancel, take up again after a restart.

What gRPC, a simulator or a test calls; it knows records and events, no wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from uuid import uuid4

from kvferry.coordinator.conversation import History, ModelAnswerText
from kvferry.coordinator.cutting import cut_at
from kvferry.coordinator.errors import (
    ModelMismatch,
    QueueFull,
    SessionExists,
    Stopping,
    TurnElsewhere,
    TurnExists,
    UnknownSession,
    UnknownTurn,
)
from kvferry.coordinator.membership import NodeState
from kvferry.coordinator.models import Models, ServedModel
from kvferry.coordinator.new_turns import new_record
from kvferry.coordinator.reading import check_index, is_whole, moved, stopping
from kvferry.coordinator.registry import SessionRecord, TurnRecord
from kvferry.coordinator.replaying import Replays
from kvferry.coordinator.requests import TurnRequest
from kvferry.coordinator.samples import Key, n_kept_before, sample_fork, sample_keys, sample_record
from kvferry.coordinator.surroundings import Surroundings
from kvferry.coordinator.tasks import to_its_end
from kvferry.coordinator.tenants import ALONE, Sharing
from kvferry.coordinator.turn import Phase, Turn, TurnPolicy
from kvferry.coordinator.turn_runner import TurnRunner
from kvferry.proto.v1 import chat_pb2

logger = logging.getLogger(__name__)


class Turns:
    """One per coordinator; all methods from the event loop."""

    def __init__(
        self,
        models: Models,
        around: Surroundings,
        policy: TurnPolicy,
        *,
        no_node_wait_seconds: float,
        max_open_turns: int,
        sharing: Sharing = ALONE,
        new_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self.n_failovers = 0
        self.n_finished = 0
        # Hears of each turn that ended.
        self.on_finished: Callable[[Turn], None] = lambda _: None
        # Hears of each session that was deleted, with the tokens it had.
        self.on_deleted: Callable[[SessionRecord, History], None] = lambda *_: None
        self._models = models
        self._around = around
        self._policy = policy
        self._sharing = sharing
        self._no_node_wait_s = no_node_wait_seconds
        self._max_open_turns = max_open_turns
        self._new_id = new_id
        self._runners: dict[Key, TurnRunner] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._session_locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._last_node: dict[str, str] = {}
        self._n_beginning = 0
        self._replays = Replays(around.registry, around.in_thread)
        self._stopping = asyncio.Event()

    # Turns.

    async def recover(self) -> int:
        """Take up every open turn that no coordinator has; returns how many. None any more once this one stops."""
        n_resumed = 0
        for record in await self._around.registry.open_turns(known=self._runners):
            key = (record.session_id, record.turn_id)
            try:
                await self._own_session(record.session_id)
                n_resumed += await self._adopt(key) is not None
            except ModelMismatch as e:
                logger.warning("turn %s stays open: %s", record.turn_id, e)
            except (TurnElsewhere, UnknownSession, UnknownTurn):
                logger.info("turn %s was in other hands before these", record.turn_id)
            except Stopping:
                break
        return n_resumed

    async def begin(self, request: TurnRequest) -> Key:
        """Make a turn durable and start it, or find the one that the same request began before.

        Raises UnknownSession, SessionBusy, TurnExists (the id of another request), PromptTooLong, InvalidMessage,
        QueueFull, InvalidTools, InvalidFormat, FormatTooComplex, NoVision, InvalidImage, ImagesTooLarge.
        """
        if self._stopping.is_set():
            raise stopping()
        return await to_its_end(self._begin(request), "begin turn")  # one that became durable runs

    async def _begin(self, request: TurnRequest) -> Key:
        async with self._session_lock(request.session_id):
            known = await self._known(request)
            if known is not None and request.n_samples == 1:
                return known.session_id, known.turn_id
            with self._places_among_open_turns(request.n_samples):
                session, turns = await self._around.registry.session_and_turns(request.session_id)
                model = self._models.of_session(session)
                pixels: Mapping[str, bytes] = {}
                record = known
                if record is None:
                    record, history, pixels = await new_record(
                        self._around, session, turns, model, request, self._new_id
                    )
                    await self._start_durably(session, record, history, pixels)
                await self._begin_other_samples(session, record, pixels)
            return record.session_id, record.turn_id

    async def _start_durably(
        self, session: SessionRecord, record: TurnRecord, history: History, pixels: Mapping[str, bytes]
    ) -> None:
        runner = self._runner(session, record, history, resumed=False)
        await runner.begin(pixels)
        self._start(runner)

    async def _begin_other_samples(
        self, session: SessionRecord, first: TurnRecord, pixels: Mapping[str, bytes]
    ) -> None:
        """Those that have not begun, which after an attempt that failed on the way may be some."""
        registry = self._around.registry
        for number in range(1, first.n_samples):
            record = sample_record(first, number)
            async with self._session_lock(record.session_id):  # or who looks for open turns would run it as well
                try:
                    await registry.get_turn(record.session_id, record.turn_id)
                    continue
                except UnknownSession:
                    turns = await registry.list_turns(first.session_id)
                    n_before = n_kept_before(turns, first.turn_id)
                    with contextlib.suppress(SessionExists):  # another coordinator makes it in this moment
                        await registry.fork_session(first.session_id, sample_fork(session, record), n_before)
                except UnknownTurn:
                    pass
                pixels = pixels or await registry.pixels({p.content_hash for p in first.pictures})
                fork = await registry.get_session(record.session_id)
                with contextlib.suppress(TurnExists):  # as above
                    await self._start_durably(fork, record, await self._history(record.session_id), pixels)

    @contextlib.contextmanager
    def _places_among_open_turns(self, n: int) -> Iterator[None]:
        """Counts turns on their way to the disk, or a crowd would be let in that comes at once. Raises QueueFull."""
        if len(self._runners) + self._n_beginning + n > self._max_open_turns:
            raise QueueFull(
                f"{self._max_open_turns} turns are open, as many as this coordinator takes: ask again a little later"
            )
        self._n_beginning += n
        try:
            yield
        finally:
            self._n_beginning -= n

    async def events(self, key: Key, from_index: int) -> AsyncGenerator[chat_pb2.TurnEvent, None]:
        """The turn's events: tokens from ``from_index`` on, and everything that is not a token.

        A reader holds an index into the turn's events and nothing else, so a slow one costs nothing and delays nobody.
        Raises UnknownSession, UnknownTurn, IndexOutOfRange, Stopping; NoNode when no node has the turn for a while,
        RegistryUnavailable when its record cannot be written for a while; TurnElsewhere before the first event.
        """
        if (runner := self._runners.get(key)) is None:  # a turn that is alive needs no look at the registry
            record = await self._around.registry.get_turn(*key)
            _, model = await self._own_session(record.session_id)
            runner = await self._adopt(key)
            if runner is None:
                for event in await self._replays.events(record, model, from_index):
                    yield event
                return
        check_index(from_index, runner.turn.record.max_tokens)
        with runner.readers.one():
            position = 0
            arrived_s = self._around.clock()
            while True:
                seen = runner.changed.count
                while position < len(runner.turn.events):
                    event = runner.turn.events[position]
                    position += 1
                    if event.HasField("finished") and is_whole(event.finished.reason):
                        check_index(from_index, event.sequence)
                    if not event.HasField("token") or event.sequence >= from_index:
                        yield event
                if runner.turn.phase is Phase.FINISHED and position == len(runner.turn.events):
                    return
                if self._stopping.is_set():
                    raise stopping()
                if self._runners.get(key) is not runner:
                    raise moved()
                await self._wait_for_more(runner, seen, arrived_s)

    async def cancel(self, session_id: str, turn_id: str) -> None:
        """End a turn with the tokens it has, durably.

        No effect on a finished one. Raises UnknownSession, UnknownTurn, TurnElsewhere, Stopping.
        """
        key = await self.find(session_id, turn_id)
        for _ in range(2):
            if key not in self._runners:
                await self._adopt(key)
            if (runner := self._runners.get(key)) is None:
                return
            task = self._tasks[key]
            runner.cancel()
            await asyncio.wait([task])
            if runner.turn.phase is Phase.FINISHED:
                return
            if self._stopping.is_set():
                raise stopping()
        raise moved()  # while it was cancelled, and whoever took it is gone as well

    async def samples(self, session_id: str, turn_id: str) -> list[Key]:
        """As ``find``, and the other samples of the same request after it, all of them begun."""
        key = await self.find(session_id, turn_id)
        if key not in self._runners:
            with contextlib.suppress(TurnElsewhere):  # who has the turn began them
                await self._adopt(key)
        live = self._runners.get(key)
        record = live.turn.record if live is not None else await self._around.registry.get_turn(*key)
        return sample_keys(key, record.n_samples)

    async def find(self, session_id: str, turn_id: str) -> Key:
        """The turn's key; the session's latest turn for an empty id. Raises UnknownSession, UnknownTurn."""
        if turn_id and (session_id, turn_id) in self._runners:
            return session_id, turn_id
        record = await self._around.registry.get_turn(session_id, turn_id)
        return record.session_id, record.turn_id

    # Sessions.

    async def delete_session(self, session_id: str, only_if: Callable[[SessionRecord], bool] | None = None) -> bool:
        """Cancel what is open, forget the session here and on the nodes; whether it is gone.

        With ``only_if`` nothing is cancelled, and the session stays if that does not hold when it is to be deleted.
        Raises UnknownSession, and SessionBusy for a turn that begins meanwhile.
        """
        registry = self._around.registry
        if only_if is None and (open_turn_id := (await registry.get_session(session_id)).open_turn_id):
            await self.cancel(session_id, open_turn_id)
        async with self._session_lock(session_id):  # what was looked at stays so: no turn begins meanwhile
            session = await registry.get_session(session_id)
            if only_if is not None and not only_if(session):
                return False
            history = await self._history(session_id)
            await registry.delete_session(session_id)
        self._last_node.pop(session_id, None)
        for member in self._around.fleet.members():
            if session_id in member.node.resident and member.state is not NodeState.DEAD:
                dropping = self._around.transport.drop_session(member.node.address, session_id)
                self._around.background.start(dropping, "drop-session")
        self.on_deleted(session, history)
        return True

    async def fork_session(
        self, session_id: str, fork: SessionRecord, n_turns: int | None, n_tokens: int | None
    ) -> SessionRecord:
        """Make ``fork`` begin as the session does, up to a number of turns or of tokens (None: all finished turns).

        Raises UnknownSession, SessionExists, IndexOutOfRange.
        """
        registry = self._around.registry
        if n_tokens is None:
            return await registry.fork_session(session_id, fork, n_turns)
        _, model = await self._own_session(session_id)
        kept = [t for t in await registry.list_turns(session_id) if t.outcome is not None and t.outcome.kept]
        cut = await self._around.in_thread(
            lambda: cut_at(kept, n_tokens, lambda turn: ModelAnswerText(model.text, turn.stop))
        )
        return await registry.fork_session(session_id, fork, cut.n_turns, cut.last_outcome)

    def end_unread(self, limit_s: float, since_s: float) -> None:
        """End turns that a node answered for so long while nobody read them; they keep their tokens.

        ``since_s``: before that nobody could read, whatever the clock says.
        """
        for runner in self._runners.values():
            from_s = max(since_s, runner.turn.placed_s)
            if runner.turn.phase is Phase.RUNNING and runner.readers.unread_seconds(from_s) > limit_s:
                logger.warning("%r is ended: nobody has read it for %.0f s", runner.turn, limit_s)
                runner.cancel()

    def last_node(self, session_id: str) -> str:
        return self._last_node.get(session_id, "")

    def live_turn(self, session_id: str, turn_id: str) -> Turn | None:
        runner = self._runners.get((session_id, turn_id))
        return None if runner is None else runner.turn

    def open_keys(self) -> list[Key]:
        """(session_id, turn_id) of every turn that is alive here."""
        return list(self._runners)

    @property
    def n_open(self) -> int:
        return len(self._runners)

    async def stop(self) -> None:
        """Let go of every turn; they stay open in the registry. Subscribers are told to come back."""
        self._stopping.set()
        for runner in self._runners.values():
            runner.changed.ring()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # How it does it.

    def _session_lock(self, session_id: str) -> asyncio.Lock:
        return self._session_locks.setdefault(session_id, asyncio.Lock())

    async def _known(self, request: TurnRequest) -> TurnRecord | None:
        """The turn that this request began before, if it did."""
        if not request.turn_id:
            return None
        try:
            record = await self._around.registry.get_turn(request.session_id, request.turn_id)
        except UnknownTurn:
            return None
        if record.digest != request.digest:
            raise TurnExists(
                f"session {request.session_id} has a turn {request.turn_id} already, begun by another request: "
                "give each turn its own id"
            )
        return record

    async def _own_session(self, session_id: str) -> tuple[SessionRecord, ServedModel]:
        """A session, and the model that it speaks to. Raises UnknownSession, ModelMismatch."""
        session = await self._around.registry.get_session(session_id)
        return session, self._models.of_session(session)

    async def _history(self, session_id: str) -> History:
        return History.of(await self._around.registry.list_turns(session_id))

    async def _adopt(self, key: Key) -> TurnRunner | None:
        """Take up a turn that is open in the registry and that nobody runs; None for one that is over.

        Its coordinator is gone, or its beginning became durable although the registry did not say so. Its other samples
        begin before it does: whoever finds it running need not look for them.
        Raises TurnElsewhere, UnknownSession, UnknownTurn, Stopping.
        """
        async with self._session_lock(key[0]):
            registry = self._around.registry
            if key in self._runners:
                return self._runners[key]
            if (await registry.get_turn(*key)).outcome is not None:
                return None
            if self._stopping.is_set():
                raise stopping()  # before it is claimed: another coordinator may have it at once
            with contextlib.suppress(UnknownTurn):  # it ended in this moment
                await registry.claim_turn(*key)
                # only now does it stay as it is: whoever had it before may have placed it in between
                record, session = await registry.get_turn(*key), await registry.get_session(key[0])
                await self._begin_other_samples(session, record, {})
                logger.info("turn %s of session %s is taken up", key[1], key[0])
                self._start(self._runner(session, record, await self._history(key[0]), resumed=True))
            return self._runners.get(key)

    def _runner(self, session: SessionRecord, record: TurnRecord, history: History, *, resumed: bool) -> TurnRunner:
        model = self._models.of_session(session).text
        turn = Turn(record, ModelAnswerText(model, record.stop), self._policy, self._around.clock(), resumed=resumed)
        return TurnRunner(turn, history, model, self._around, self._sharing.namespace(session.tenant))

    def _start(self, runner: TurnRunner) -> None:
        """Raises Stopping: what would begin after ``stop`` nobody would end. The next start takes the turn up."""
        if self._stopping.is_set():
            raise stopping()
        record = runner.turn.record
        key = (record.session_id, record.turn_id)
        self._runners[key] = runner
        self._tasks[key] = asyncio.create_task(runner.run(), name=f"turn {record.session_id}/{record.turn_id}")
        self._tasks[key].add_done_callback(lambda _: self._ended(key, runner))

    def _ended(self, key: Key, runner: TurnRunner) -> None:
        """From now on the turn is read from the registry; subscribers keep what they hold."""
        del self._runners[key], self._tasks[key]
        runner.changed.ring()
        self.n_failovers += runner.n_moves
        if runner.turn.phase is Phase.FINISHED:
            self.n_finished += 1
            self.on_finished(runner.turn)
            self._last_node[key[0]] = runner.turn.node_id or self.last_node(key[0])

    async def _wait_for_more(self, runner: TurnRunner, seen_count: int, arrived_s: float) -> None:
        """Until the next event. Raises what the turn waits for when it did so too long in front of this reader."""
        if (wait := runner.waits_for()) is None:
            await runner.changed.wait(seen_count)
            return
        since_s, error = wait
        patience_s = max(arrived_s, since_s) + self._no_node_wait_s - self._around.clock()
        if patience_s <= 0 or not await runner.changed.wait(seen_count, patience_s):
            raise error
