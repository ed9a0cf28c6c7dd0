"""A response, event by event: what each event of its turn adds to the stream, and what all of them make. Pure.

The same turn always makes the same events with the same numbers, so a stream can be made anew from any number on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvferry.client import Finished, FinishReason, Placed, Started, Token, ToolCall, TurnEvent
from kvferry.gateway.logprobs import HeldContentLogprobs, logprob_json

Json = dict[str, Any]

STATUS: Final = {
    FinishReason.END: "completed",
    FinishReason.STOP_STRING: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "failed",
}

TERMINAL_EVENT: Final = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


def base_response(
    response_id: str, created_at: int, model: str, previous_id: str | None, status: str, *, is_stored: bool = True
) -> Json:
    """A response without output."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "model": model,
        "status": status,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "previous_response_id": previous_id,
        "usage": None,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": is_stored,
        "metadata": {},
    }


@dataclass(slots=True)
class ResponseStream:
    """`base`: what `base_response` made. `push` returns the stream's events, ready to be sent."""

    base: Json
    _number: int = 0
    _output: list[Json] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)  # text of the item that is being written
    _logprobs: list[Json] = field(default_factory=list)
    _held: HeldContentLogprobs = field(default_factory=HeldContentLogprobs)
    _n_prompt: int = 0
    _n_cached: int = 0
    _n_reasoning: int = 0

    def push(self, event: TurnEvent) -> list[Json]:
        """What one event adds."""
        match event:
            case Started():
                self._n_prompt = event.n_prompt_tokens
                self.base = {**self.base, "status": "in_progress"}
                return [self._response_event("response.created"), self._response_event("response.in_progress")]
            case Placed(prefix=prefix, first_index=0) if prefix is not None:
                self._n_cached = min(prefix.n_resident + prefix.n_restored, self._n_prompt)
                return []
            case Token():
                self._n_reasoning += bool(event.reasoning)
                return self._parts(event.reasoning, event.content, event.tool_calls, self._held.push(event))
            case Finished():
                return self._end(event)
        return []

    def error(self, message: str, code: str, parameter: str | None) -> Json:
        """The event that says why no more come."""
        return self._event("error", code=code, message=message, param=parameter)

    @property
    def response(self) -> Json:
        """As it is now."""
        return {**self.base, "output": list(self._output)}

    def _parts(self, reasoning: str, content: str, calls: tuple[ToolCall, ...], told: Sequence[Token]) -> list[Json]:
        events: list[Json] = []
        if reasoning:
            events += self._write("reasoning", reasoning)
        if content:
            events += self._write("message", content, told)
        for call in calls:
            events += self._call(call)
        return events

    def _write(self, kind: str, text: str, told: Sequence[Token] = ()) -> list[Json]:
        events = [] if self._is_open(kind) else [*self._close(), *self._begin(kind)]
        self._open.append(text)
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        event = self._item_event(name, delta=text)
        if kind == "message":
            entries = [logprob_json(token) for token in told]
            self._logprobs += entries
            event["logprobs"] = entries
        return [*events, event]

    def _is_open(self, kind: str) -> bool:
        return bool(self._output) and self._output[-1]["type"] == kind and self._output[-1]["status"] == "in_progress"

    def _begin(self, kind: str) -> list[Json]:
        item: Json = {"id": self._item_id(kind), "type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item["role"] = "assistant"
        else:
            item["summary"] = []
        self._output.append(item)
        self._open, self._logprobs = [], []
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))
        return [added, self._item_event("response.content_part.added", part=self._part(""))]

    def _close(self, status: str = "completed") -> list[Json]:
        """End the item that is being written, if one is."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return []
        item, text = self._output[-1], "".join(self._open)
        item |= {"status": status, "content": [self._part(text)]}
        name = "response.output_text.done" if item["type"] == "message" else "response.reasoning_text.done"
        return [
            self._item_event(name, text=text),
            self._item_event("response.content_part.done", part=self._part(text)),
            self._event("response.output_item.done", output_index=len(self._output) - 1, item=dict(item)),
        ]

    def _part(self, text: str) -> Json:
        if self._output[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _call(self, call: ToolCall) -> list[Json]:
        events = self._close()
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        item: Json = {
            "id": self._item_id("function_call"), "type": "function_call", "status": "in_progress",
            "call_id": call.id, "name": call.name, "arguments": "",
        }  # fmt: skip
        self._output.append(item)
        place = {"output_index": len(self._output) - 1}
        events.append(self._event("response.output_item.added", **place, item=dict(item)))
        named = {**place, "item_id": item["id"]}
        events.append(self._event("response.function_call_arguments.delta", **named, delta=arguments))
        events.append(
            self._event("response.function_call_arguments.done", **named, arguments=arguments, name=call.name)
        )
        item |= {"status": "completed", "arguments": arguments}
        events.append(self._event("response.output_item.done", **place, item=dict(item)))
        return events

    def _end(self, finished: Finished) -> list[Json]:
        status = STATUS.get(finished.reason, "failed")
        told = self._held.flush(finished)
        events = self._parts(finished.tail_reasoning, finished.tail_content, finished.tail_calls, told)
        events += self._close("completed" if status == "completed" else "incomplete")
        self.base = {**self.base, "status": status, "usage": self._usage(finished)}
        if status == "incomplete":
            self.base["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "failed":
            self.base["error"] = {"code": finished.error_code or "server_error", "message": finished.error}
        return [*events, self._response_event(TERMINAL_EVENT[status])]

    def _usage(self, finished: Finished) -> Json:
        return {
            "input_tokens": finished.n_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._n_cached},
            "output_tokens": finished.n_answer_tokens,
            "output_tokens_details": {"reasoning_tokens": self._n_reasoning},
            "total_tokens": finished.n_prompt_tokens + finished.n_answer_tokens,
        }

    def _item_id(self, kind: str) -> str:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        return f"{prefix}_{self.base['id'].removeprefix('resp_')}_{len(self._output)}"

    def _item_event(self, kind: str, /, **fields: Any) -> Json:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _response_event(self, kind: str) -> Json:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, /, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event
