"""An answer's parts as messages: while it comes, and as a whole. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

from kvferry.coordinator.registry import TurnRecord
from kvferry.engine.text.answers import AnswerPart, AnswerReader, ContentText, ParsedAnswer, ReasoningText, parse_answer
from kvferry.engine.text.messages import ToolCall
from kvferry.proto.v1 import chat_pb2


class PartsReader:
    """Takes the answer of one turn apart as its text comes."""

    def __init__(self, record: TurnRecord) -> None:
        form = record.form
        self._turn_id = record.turn_id
        self._n_calls = 0
        self._reader = AnswerReader(
            prompt_opened_thinking=form.prompt_opened_thinking, thinks=form.reads_thinking, calls=bool(form.tools)
        )

    def push(self, text: str) -> list[chat_pb2.AnswerPart]:
        """The parts that this text completes."""
        return self._messages(self._reader.push(text))

    def finish(self, tail: str) -> list[chat_pb2.AnswerPart]:
        """The parts of the last text, and what was held back."""
        return self._messages([*self._reader.push(tail), *self._reader.finish()])

    def _messages(self, parts: Iterable[AnswerPart]) -> list[chat_pb2.AnswerPart]:
        return [self._message(part) for part in parts]

    def _message(self, part: AnswerPart) -> chat_pb2.AnswerPart:
        match part:
            case ReasoningText(text):
                return chat_pb2.AnswerPart(reasoning=text)
            case ContentText(text):
                return chat_pb2.AnswerPart(content=text)
            case ToolCall():
                self._n_calls += 1
                named = dataclasses.replace(part, id=call_id(self._turn_id, self._n_calls - 1))
                return chat_pb2.AnswerPart(tool_call=call_message(named))


def call_id(turn_id: str, number: int) -> str:
    """Of the answer's call ``number``, from 0."""
    return f"{turn_id}.{number}"


def parsed(record: TurnRecord, text: str) -> ParsedAnswer:
    """The answer of a turn in parts."""
    form = record.form
    answer = parse_answer(
        text,
        prompt_opened_thinking=form.prompt_opened_thinking,
        thinks=form.reads_thinking,
        calls=bool(form.tools),
    )
    calls = [
        dataclasses.replace(call, id=call_id(record.turn_id, number)) for number, call in enumerate(answer.tool_calls)
    ]
    return dataclasses.replace(answer, tool_calls=tuple(calls))


def parsed_message(answer: ParsedAnswer) -> chat_pb2.ParsedAnswer:
    return chat_pb2.ParsedAnswer(
        reasoning=answer.reasoning,
        content=answer.content,
        tool_calls=[call_message(call) for call in answer.tool_calls],
        malformed_calls=answer.malformed,
        is_thinking=answer.is_thinking,
    )


def call_message(call: ToolCall) -> chat_pb2.ToolCall:
    return chat_pb2.ToolCall(id=call.id, name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
