"""The span of one turn as its client sees it, over all of its connections; also where the turn has several answers."""

from __future__ import annotations

from kvferry.client.sdk.events import ConnectionLost, Finished, FinishReason, NodeLost, TurnEvent
from kvferry.proto.v1 import chat_pb2
from kvferry.telemetry import gen_ai, tracing


class TurnTrace:
    """Begins when it is made, as a child of what its task works on; ``headers`` tell the coordinator of it."""

    def __init__(self, session_id: str, turn_id: str, request: chat_pb2.GenerateRequest | None) -> None:
        self._span = tracing.NOTHING
        self._n_output = 0
        self._reasons: list[str] = []
        if tracing.is_on():
            asked = request or chat_pb2.GenerateRequest()
            attributes = gen_ai.of_request(session_id, turn_id, asked.sampling, asked.max_tokens)
            self._span = tracing.begin("chat" if request is not None else "resume", "client", attributes)
        self.headers = tracing.carried(self._span)

    def note(self, event: TurnEvent) -> None:
        """What the turn's reader is told."""
        match event:
            case NodeLost():
                self._span.event("failover", {gen_ai.NODE: event.node_id, "kvferry.cause": event.cause})
            case ConnectionLost():
                self._span.event("connection lost", {"kvferry.token.index": event.n_tokens})
            case Finished():
                self._n_output += event.n_answer_tokens
                self._reasons.append(event.reason.name.lower())
                seconds = event.first_token_seconds
                self._span.set(gen_ai.of_answer(event.n_prompt_tokens, self._n_output, self._reasons, seconds))
                if event.reason is FinishReason.ERROR:
                    self._span.fail(event.error_code)

    def end(self) -> None:
        """It is read to its end, or left."""
        self._span.end()
