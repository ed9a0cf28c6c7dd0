"""The life of one turn: find a node, follow its stream, move on when it is lost, make the end durable.

The decisions are ``Turn``'s and ``route``'s; this shell only waits and calls. A runner is a task of its own: it does
not depend on who reads the turn's events, and it ends when the outcome is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

import numpy as np
import stamina

from kvferry.coordinator.conversation import History, TextSide
from kvferry.coordinator.errors import (
    NoNode,
    NotNow,
    RegistryUnavailable,
    StaleEpoch,
    TurnElsewhere,
    UnknownSession,
    UnknownTurn,
)
from kvferry.coordinator.forecasts import Awaiting
from kvferry.coordinator.membership import LostNode, Node, NodeState
from kvferry.coordinator.pictures import spans_of
from kvferry.coordinator.prediction import Prediction
from kvferry.coordinator.reading import Readers
from kvferry.coordinator.registry import FinishReason, TokenArray
from kvferry.coordinator.routing import Choice
from kvferry.coordinator.run_request import prompt_images, run_request
from kvferry.coordinator.surroundings import Surroundings, T
from kvferry.coordinator.tasks import Bell, first_of
from kvferry.coordinator.tenants import marked
from kvferry.coordinator.transport import Messages, PlacementLost
from kvferry.coordinator.turn import Blame, Loss, Phase, Turn
from kvferry.coordinator.turn_trace import TurnTrace
from kvferry.proto.v1 import chat_pb2, worker_pb2
from kvferry.store.vlkv3 import identity_ids
from kvferry.telemetry.logs import log_with

logger = logging.getLogger(__name__)

REGISTRY_RETRY_SECONDS: Final = 1.0
"""A full disk does not empty in milliseconds; the turn waits, nothing is lost."""

GOODBYE_SECONDS: Final = 0.25
"""How long the node may take to close its stream after the last token, before it is cut.

It is the same burst of bytes.
"""


TAKEN_OVER: Final = (StaleEpoch, TurnElsewhere, UnknownSession, UnknownTurn)
"""What a registry answers about an open turn when another coordinator has it, has finished it, or has deleted it."""

ENDED_HERE: Final = {FinishReason.STOP_STRING, FinishReason.CANCELLED, FinishReason.DEADLINE}
"""The node does not know that the answer is over."""


class TurnRunner:
    """Runs ``turn`` to its end.

    ``history``: of its session, before this turn. ``model``: that it speaks to. ``namespace``: whose rows it reuses.
    """

    def __init__(
        self, turn: Turn, history: History, model: TextSide, around: Surroundings, namespace: str = ""
    ) -> None:
        self.turn = turn
        self._model = model
        # Rings after every event, for subscribers.
        self.changed = Bell()
        self.readers = Readers(around.clock)
        # Why nobody works on it, while that is so; empty when a node has it or is about to.
        self.obstacle = "the coordinator has just started and waits for its nodes"
        # Since when its record cannot be written, while that is so.
        self.unrecorded_since_s: float | None = None
        # Placements lost by a node that had taken the turn.
        self.n_moves = 0
        self._pictures = history.pictures + turn.record.pictures
        self._spans = spans_of(self._pictures)
        self._prompt_ids = np.concatenate([history.token_ids, turn.record.prompt_ids])
        # As they are compared with what nodes remember: pictures tell each other apart, and so do namespaces.
        self._compared_ids = marked(identity_ids(self._prompt_ids, 0, self._spans), namespace)
        self._namespace = namespace
        self._around = around
        self._arrival = around.admission.arrival()
        # The record has it by the wall clock, since it has to outlive a process; within one no jump of that counts.
        deadline_ms = turn.record.deadline_ms
        self._ends_s = self._now() + (deadline_ms - around.wall_ms()) / 1000 if deadline_ms else None
        # A placement that is durable and that no node has heard of yet, with its epoch.
        self._begun: tuple[Choice, int] | None = None
        # Nobody wants more of it.
        self._cancelled = asyncio.Event()

    async def begin(self, pixels: Mapping[str, bytes]) -> None:
        """Make the turn durable, and its first placement with it when a node may take it at once.

        Before ``run``; ``pixels`` and errors as of ``Registry.begin_turn``.
        """
        around, choice = self._around, None
        if around.settled.is_set():
            await around.admission.place(self.turn.record.priority, self._arrival)
            choice = self._choose()
        if choice is None or choice.member is None:
            await around.registry.begin_turn(self.turn.record, pixels)
            return
        epoch = await around.registry.begin_turn(self.turn.record, pixels, choice.member.node.fingerprint)
        self._begun = choice, epoch

    async def run(self) -> None:
        """The whole life of a turn, or until another coordinator has it: then it goes on there, or is over."""
        log_with(session_id=self.turn.record.session_id, turn_id=self.turn.record.turn_id)
        self._trace = TurnTrace(self.turn.record, self._model.model_name)
        left_s = self._seconds_left()
        timer = None if left_s is None else asyncio.get_running_loop().call_later(left_s, self._expire)
        try:
            await self._run()
        except TAKEN_OVER as e:
            logger.warning("%r is not this coordinator's any more: %s", self.turn, e)
        finally:
            self._trace.ended(self.turn)
            if timer is not None:
                timer.cancel()

    async def _run(self) -> None:
        try:
            while not self.turn.is_over:
                choice, epoch = self._begun or await self._place()
                self._begun = None
                await self._follow(choice, epoch)
            if self._begun is not None:  # cancelled before that
                self.turn.epoch = self._begun[1]
        except TAKEN_OVER:
            raise
        except Exception:
            logger.exception("%r met a bug", self.turn)
            self.turn.fail(
                "internal", "the coordinator met a bug, its log says which; the session is intact", self._now()
            )
        await self._make_end_durable()
        self.turn.close()
        self.changed.ring()

    def cancel(self) -> None:
        """End the turn with the tokens it has; ``run`` goes on to make that durable."""
        self.turn.cancel(self._now())
        self._cancelled.set()
        self.changed.ring()

    def waits_for(self) -> tuple[float, NotNow] | None:
        """What keeps the turn from going on, and since when; None while something is under way."""
        if self.unrecorded_since_s is not None:
            what: tuple[float, type[NotNow], str] = (
                self.unrecorded_since_s, RegistryUnavailable, "the turn's record cannot be written at the moment"
            )  # fmt: skip
        elif self.turn.phase is Phase.WAITING and self.obstacle:
            what = self.turn.waiting_since_s, NoNode, "no node can answer at the moment"
        else:
            return None
        since_s, kind, sentence = what
        end = "the turn is kept and goes on by itself when it can: resume it"
        return since_s, kind(f"{sentence} ({self.obstacle}); {end}")

    def _expire(self) -> None:
        self.turn.expire(self._now())
        self._cancelled.set()
        self.changed.ring()

    def _seconds_left(self) -> float | None:
        """Until its deadline."""
        return None if self._ends_s is None else max(0.0, self._ends_s - self._now())

    async def _place(self) -> tuple[Choice, int]:
        choice = await self._find_node()
        return choice, await self._make_placement_durable(choice)

    async def _find_node(self) -> Choice:
        """Wait until a node may take the turn; a choice without one when the turn is over before."""
        around, turn = self._around, self.turn
        if not around.settled.is_set():
            await first_of(around.settled.wait(), self._cancelled.wait())
        choice = Choice(member=None, candidates=())
        while not turn.is_over:
            if turn.next_try_s > self._now():
                await self._pause()
                continue
            seen = around.fleet.changed.count
            await around.admission.place(turn.record.priority, self._arrival)
            if self._cancelled.is_set():
                break
            choice = self._choose()
            if choice.member is not None:
                self.obstacle = ""
                break
            self._stuck(choice.summary)
            await first_of(around.fleet.changed.wait(seen), self._cancelled.wait())
        return choice

    def _choose(self) -> Choice:
        """The node that would answer soonest, as things are now."""
        around = self._around
        stored = around.snapshots.longest_prefixes(self._token_ids(), self._spans, self._namespace)
        places = tuple((span.start, span.start + span.length) for span in self._spans)
        wanted = dataclasses.replace(self.turn.route_request(), model=self._model.model_name, images=places)
        return around.rule(around.fleet.view(stored, self._with_answer(self._compared_ids)), wanted)

    async def _pause(self) -> None:
        """Until the turn may be placed again; no longer than until a node comes that was not there."""
        turn, fleet = self.turn, self._around.fleet
        self._stuck("; ".join(f"{node_id}: {why}" for node_id, why in turn.failed.items()))
        there = fleet.boots(NodeState.LIVE, NodeState.SUSPECT, NodeState.DRAINING)
        while not turn.is_over and (pause_s := turn.next_try_s - self._now()) > 0:
            seen = fleet.changed.count
            if fleet.boots(NodeState.LIVE) - there:
                turn.hurry(self._now())
                return
            await first_of(asyncio.sleep(pause_s), self._cancelled.wait(), fleet.changed.wait(seen))

    async def _make_placement_durable(self, choice: Choice) -> int:
        """Raise the session's epoch for this choice, before the node hears of it."""
        if choice.member is None:
            return self.turn.epoch
        record, fingerprint = self.turn.record, choice.member.node.fingerprint
        return await self._durably(
            lambda: self._around.registry.place_turn(record.session_id, record.turn_id, fingerprint)
        )

    async def _follow(self, choice: Choice, epoch: int) -> None:
        """Give the turn to the node, and pass its stream on until the answer or the placement ends."""
        turn, around = self.turn, self._around
        prediction = choice.prediction
        if choice.member is None or prediction is None or turn.is_over:  # cancelled while it waited
            turn.epoch = epoch
            return
        node = choice.member.node
        log_with(node_id=node.node_id, epoch=epoch)
        turn.place(
            node.node_id, node.fingerprint, epoch, candidates_of(choice), self._now(),
            predicted_s=prediction.seconds, n_candidates=choice.n_candidates,
        )  # fmt: skip
        self._trace.placed(node.node_id, epoch, prediction.seconds)
        self.obstacle = ""
        self.changed.ring()
        logger.info("%r placed", turn)
        with around.fleet.placement(node, prediction, self._with_answer(self._compared_ids)) as awaiting:
            reading = self._read(node, epoch, prediction, awaiting)
            await first_of(reading, around.fleet.until_lost(node), self._cancelled.wait())
        # No effect when the stream or the answer ended by itself. A node may be back in the meantime; its call is gone.
        lost = around.fleet.why_lost(node) or LostNode("lease_expired", "it was not heard in time")
        turn.lose(epoch, Loss(cause=lost.cause, detail=lost.detail, blame=Blame.TURN), self._now())
        self._trace.left(turn)
        self.changed.ring()
        if turn.phase is Phase.WAITING:
            self.n_moves += turn.events[-1].node_lost.cause != "refused"
            logger.warning("%r lost %s: %s", turn, node.node_id, turn.failed.get(node.node_id))
            return
        around.fleet.note_resident(node, turn.record.session_id, self._with_answer(self._compared_ids)[:-1])
        around.fleet.forecasts.turn_ended(turn.decode_seconds)
        if turn.outcome is not None and turn.outcome.reason in ENDED_HERE:
            self._stop_on(node, epoch)

    async def _read(self, node: Node, epoch: int, prediction: Prediction, awaiting: Awaiting) -> None:
        """Feed the node's messages to the turn until the placement is over."""
        turn = self.turn
        request = await self._request(epoch, recompute=prediction.recompute)
        try:
            async with contextlib.aclosing(self._call(node, request)) as messages:
                async for message in messages:
                    self._take(message, epoch)
                    self._learn(message, awaiting)
                    if turn.phase is not Phase.RUNNING:
                        break
                await self._hear_goodbye(messages)
        except PlacementLost as e:
            if e.connection_broke:
                self._around.fleet.stream_broke(node)
            turn.lose(epoch, e.loss, self._now())

    def _call(self, node: Node, request: worker_pb2.RunTurnRequest) -> Messages:
        """Its deadline is the turn's, a little later: this side tells the client how it ended."""
        left_s = self._seconds_left()
        return self._around.transport.run_turn(
            node.address, request, None if left_s is None else left_s + GOODBYE_SECONDS
        )

    async def _hear_goodbye(self, messages: AsyncIterator[worker_pb2.RunTurnResponse]) -> None:
        """Let a node that ended the answer by itself close the stream, so that it sees no cancelled call."""
        outcome = self.turn.outcome
        if outcome is not None and outcome.reason in {FinishReason.END, FinishReason.LENGTH}:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    async for _ in messages:
                        pass

    def _take(self, message: worker_pb2.RunTurnResponse, epoch: int) -> None:
        match message.WhichOneof("event"):
            case "tokens":
                self.turn.receive(epoch, message.tokens.tokens, self._now())
            case "prefix":
                self.turn.report_prefix(epoch, message.prefix)
            case "finished":
                self.turn.run_ended(epoch, message.finished.reason, self._now())
        self.changed.ring()

    def _learn(self, message: worker_pb2.RunTurnResponse, awaiting: Awaiting) -> None:
        """The node's speed, from what it reports with its first token."""
        if awaiting.has_token:
            return
        forecasts = self._around.fleet.forecasts
        if message.HasField("prefix"):
            forecasts.reported(awaiting, message.prefix, self._now())
        if self.turn.has_first_token:
            forecasts.first_token(awaiting, self._now())
            self._around.fleet.note_resident(
                awaiting.node, self.turn.record.session_id, self._with_answer(self._compared_ids)[:-1]
            )

    def _stop_on(self, node: Node, epoch: int) -> None:
        """Tell the node at once, rather than let it notice that nobody reads."""
        record = self.turn.record
        request = worker_pb2.StopTurnRequest(session_id=record.session_id, turn_id=record.turn_id, epoch=epoch)
        self._around.background.start(self._around.transport.stop_turn(node.address, request), "stop-turn")

    async def _make_end_durable(self) -> None:
        turn, around = self.turn, self._around
        record, outcome = turn.record, turn.outcome
        if outcome is None:
            raise AssertionError(f"{turn!r} ended without an outcome")
        placements = [p.SerializeToString() for p in turn.placements]
        try:
            await self._durably(
                lambda: around.registry.finish_turn(
                    record.session_id, record.turn_id, turn.epoch, outcome, placements, around.wall_ms()
                )
            )
        except UnknownTurn:
            # An attempt that seemed to fail had reached the disk after all.
            kept = (await self._durably(lambda: around.registry.get_turn(record.session_id, record.turn_id))).outcome
            if kept is None or kept.reason is not outcome.reason or len(kept.answer_ids) != len(outcome.answer_ids):
                raise
        logger.info("%r is durable: %s", turn, outcome.reason.name)

    async def _durably(self, call: Callable[[], Awaitable[T]]) -> T:
        """Until the registry takes it: without a durable record nothing may go on."""
        retries = stamina.retry_context(
            on=RegistryUnavailable, attempts=None, timeout=None,
            wait_initial=REGISTRY_RETRY_SECONDS, wait_max=REGISTRY_RETRY_SECONDS, wait_jitter=0.0,
        )  # fmt: skip
        async for attempt in retries:
            with attempt:
                try:
                    result = await call()
                except RegistryUnavailable as e:
                    self.unrecorded_since_s = (
                        self._now() if self.unrecorded_since_s is None else self.unrecorded_since_s
                    )
                    if self.obstacle != str(e):  # not once for every attempt
                        logger.warning("%r waits for its record, trying on: %s", self.turn, e)
                    self._stuck(str(e))
                    raise
                self.unrecorded_since_s = None
                return result
        raise AssertionError("endless retries ended")

    def _stuck(self, obstacle: str) -> None:
        """Nobody works on the turn: those who read it may want to know."""
        self.obstacle = obstacle
        self.changed.ring()

    async def _request(self, epoch: int, *, recompute: bool) -> worker_pb2.RunTurnRequest:
        """With the pixels of its pictures, which take long to read."""
        names = dict.fromkeys(picture.content_hash for picture in self._pictures)
        pixels = await self._durably(lambda: self._around.registry.pixels(names)) if names else {}
        return run_request(
            self.turn.record, self._around.registry, self._model, epoch=epoch, token_ids=self._token_ids(),
            images=prompt_images(self._pictures, pixels), namespace=self._namespace, recompute=recompute,
        )  # fmt: skip

    def _token_ids(self) -> TokenArray:
        """Int32 [n]: the session's tokens, this turn's prompt, and its answer so far."""
        return self._with_answer(self._prompt_ids)

    def _with_answer(self, prompt_ids: TokenArray) -> TokenArray:
        return np.concatenate([prompt_ids, np.array(self.turn.answer_ids, dtype=np.int32)])

    def _now(self) -> float:
        return self._around.clock()


def candidates_of(choice: Choice) -> list[chat_pb2.CandidateNode]:
    """The decision as a client reads it."""
    return [chat_pb2.CandidateNode(**dataclasses.asdict(candidate)) for candidate in choice.candidates]
