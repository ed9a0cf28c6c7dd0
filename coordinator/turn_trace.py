"""The spans of one turn as its coordinator sees it: one of the whole, and a child for each placement."""

from __future__ import annotations

from kvferry.coordinator.registry import TurnRecord
from kvferry.coordinator.turn import Turn
from kvferry.proto.v1 import common_pb2
from kvferry.telemetry import gen_ai, tracing


class TurnTrace:
    """Belongs to the task that runs the turn: calls to nodes that it makes are children of the latest placement."""

    def __init__(self, record: TurnRecord, model_name: str) -> None:
        self._turn = self._placement = tracing.NOTHING
        if tracing.is_on():
            sampling = common_pb2.SamplingSettings.FromString(record.sampling)
            attributes = gen_ai.of_request(record.session_id, record.turn_id, sampling, record.max_tokens, model_name)
            self._turn = tracing.begin(f"chat {model_name}", "server", attributes)

    def placed(self, node_id: str, epoch: int, predicted_seconds: float) -> None:
        """A node is about to get it."""
        if not tracing.is_on():
            return
        attributes: tracing.Attributes = {
            gen_ai.NODE: node_id, gen_ai.EPOCH: epoch, "kvferry.predicted_seconds": predicted_seconds,
            "rpc.system": "grpc",
        }  # fmt: skip
        self._placement = tracing.begin("place", "client", attributes, self._turn.as_parent)
        self._placement.enter()

    def left(self, turn: Turn) -> None:
        """The placement is over: the answer is complete, or the turn lost its node and moves on."""
        last = turn.events[-1] if turn.events else None
        if last is not None and last.HasField("node_lost"):
            lost = last.node_lost
            self._placement.fail(lost.cause)
            self._turn.event("failover", {gen_ai.NODE: lost.node_id, "kvferry.cause": lost.cause})
        self._placement.end()

    def ended(self, turn: Turn) -> None:
        """The outcome is durable, or another coordinator has the turn."""
        outcome = turn.outcome
        if outcome is not None and tracing.is_on():
            reasons = [outcome.reason.name.lower()]
            answer = gen_ai.of_answer(
                turn.record.n_prompt_tokens, len(outcome.answer_ids), reasons, outcome.first_token_seconds
            )
            prefix = turn.placements[0].prefix if turn.placements else None
            n_cached = 0 if prefix is None else prefix.n_resident + prefix.n_restored
            self._turn.set({**answer, gen_ai.CACHED_TOKENS: n_cached, "kvferry.n_placements": len(turn.placements)})
            if outcome.error_code:
                self._turn.fail(outcome.error_code)
        self._placement.end()
        self._turn.end()
