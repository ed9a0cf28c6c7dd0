"""An answer of a chat completion, event by event: what each adds to the stream, and what all of them make. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvferry.client import Finished, FinishReason, Placed, Started, Token, ToolCall, TurnEvent
from kvferry.gateway.logprobs import Entry, HeldLogprobs, logprob_json

FINISH_REASON: Final = {
    FinishReason.END: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "stop",
    FinishReason.DEADLINE: "length",
}

Json = dict[str, Any]


def call_json(call: ToolCall) -> Json:
    """A call as OpenAI has it: arguments are JSON in a string."""
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


@dataclass(slots=True)
class ChatChoice:
    """One answer so far; see answering.Choice."""

    index: int
    with_logprobs: bool = False
    place: int = 0  # events with a part so far: the role, the tokens, the end
    n_prompt: int = 0
    n_cached: int = 0
    finished: Finished | None = None
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    _held: HeldLogprobs = field(default_factory=HeldLogprobs)

    def push(self, event: TurnEvent) -> Json | None:
        """What one event adds to the stream, if anything."""
        match event:
            case Started():
                self.n_prompt = event.n_prompt_tokens
                self.place = 1
                return self._part({"role": "assistant", "content": ""})
            case Placed():
                self.n_cached = n_cached_of(event, self.n_prompt, self.n_cached)
            case Token():
                self.place = event.sequence + 2
                entries = self._logprobs(self._held.push(event))
                delta = self._delta(event.content, event.reasoning, event.tool_calls)
                return self._part(delta, entries) if delta or entries else None
            case Finished():
                self.finished = event
                self.place += 1
                entries = self._logprobs(self._held.flush(event))
                delta = self._delta(event.tail_content, event.tail_reasoning, event.tail_calls)
                return self._part(delta, entries, self.finish_reason)
        return None

    @property
    def message(self) -> Json:
        """The whole answer."""
        content: str | None = "".join(self.text)
        if self.calls and not content:
            content = None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [call_json(call) for call in self.calls]
        return message

    def whole(self) -> Json:
        """As an answer that is not streamed has it."""
        logprobs = {"content": self.logprobs, "refusal": None} if self.with_logprobs else None
        return {
            "index": self.index,
            "message": self.message,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }

    @property
    def finish_reason(self) -> str | None:
        """None while it goes on."""
        if self.finished is None:
            return None
        reason = FINISH_REASON.get(self.finished.reason, "stop")
        return "tool_calls" if self.calls and reason == "stop" else reason

    def _delta(self, content: str, reasoning: str, calls: Sequence[ToolCall]) -> Json:
        delta: Json = {}
        if reasoning:
            self.reasoning.append(reasoning)
            delta["reasoning_content"] = reasoning
        if content:
            self.text.append(content)
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [
                {"index": len(self.calls) + number, **call_json(call)} for number, call in enumerate(calls)
            ]
            self.calls += calls
        return delta

    def _logprobs(self, entries: Sequence[Entry]) -> list[Json]:
        told = [logprob_json(entry.token) for entry in entries]
        self.logprobs += told
        return told

    def _part(self, delta: Json, entries: Sequence[Json] = (), finish_reason: str | None = None) -> Json:
        logprobs = {"content": list(entries), "refusal": None} if entries else None
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def n_cached_of(placed: Placed, n_prompt: int, n_known: int) -> int:
    """Tokens of the prompt that were not computed: as its first placement tells, once it knows."""
    if placed.first_index or placed.prefix is None:
        return n_known
    return min(placed.prefix.n_resident + placed.prefix.n_restored, n_prompt)
