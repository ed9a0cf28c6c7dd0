"""The span of one run on this node. What the store reads and writes for its session meanwhile are its children."""

from __future__ import annotations

import grpc

from kvferry.node.turns import Event, Failed, Finished, Prefix, Token, Turn
from kvferry.telemetry import gen_ai, tracing


class RunTrace:
    """Belongs to the task that answers the call."""

    def __init__(self, turn: Turn, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        self.span = tracing.NOTHING
        self._has_token = False
        if tracing.is_on():
            tracing.follow(context.invocation_metadata())
            self.span = tracing.begin(
                "kvferry.v1.WorkerService/RunTurn", "server",
                {gen_ai.CONVERSATION: turn.session_id, gen_ai.TURN: turn.turn_id, gen_ai.EPOCH: turn.epoch,
                 "rpc.system": "grpc"},
            )  # fmt: skip

    def note(self, event: Event) -> None:
        """What the turn's caller is told."""
        match event:
            case Prefix():
                self.span.set({
                    "kvferry.rows.resident": event.n_resident, "kvferry.rows.restored": event.n_restored,
                    "kvferry.rows.computed": event.n_computed, "kvferry.queue_seconds": event.queue_seconds,
                    "kvferry.restore_seconds": event.restore_seconds, "kvferry.prefill_seconds": event.prefill_seconds,
                })  # fmt: skip
            case Token() if not self._has_token:
                self._has_token = True
                self.span.event("first token", {"kvferry.token.index": event.index})
            case Failed():
                self.span.fail(str(getattr(event.error, "code", "internal")))
            case Finished():
                self.span.set({gen_ai.FINISH_REASONS: [event.reason]})
