"""Messages to token ids and back. The session's token ids are the authority: only new text is ever tokenised."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from kvferry.coordinator.answer_parts import parsed
from kvferry.coordinator.errors import InvalidMessage
from kvferry.coordinator.pictures import Upload, places_in
from kvferry.coordinator.registry import Message, Picture, TokenArray, TurnRecord
from kvferry.coordinator.requests import RawPrompt
from kvferry.engine.text.answers import THINK
from kvferry.engine.text.detokenizer import Detokenizer
from kvferry.engine.text.messages import Tool
from kvferry.engine.text.model import ChatMessage
from kvferry.engine.text.stop import StopWatcher


class TextSide(Protocol):
    """What the coordinator needs of ``engine.text.model.TextModel``; a simulator brings a smaller one."""

    @property
    def model_name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_token_ids(self) -> tuple[int, ...]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def literal_id(self, text: str) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    @property
    def first_token_id(self) -> int | None: ...

    def first_turn(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]: ...

    def next_turn(
        self,
        history: Sequence[ChatMessage],
        last_token_id: int,
        new_messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]: ...


def new_prompt_ids(
    model: TextSide,
    turns: Sequence[TurnRecord],
    session_ids: TokenArray,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    thinking: bool | None = None,
    images: Sequence[Upload] = (),
) -> TokenArray:
    """The tokens, int32[n], that ``messages`` add to a session with these turns and tokens. Any thread.

    Each of the images has one token in them.
    """
    new = [chat_message(message, places_in(number, images)) for number, message in enumerate(messages)]
    described = [tool.described() for tool in tools]
    if len(session_ids) == 0:
        ids = model.first_turn(new, tools=described, thinking=thinking)
    else:
        ids = model.next_turn(history_of(turns), int(session_ids[-1]), new, tools=described, thinking=thinking)
    return np.array(ids, dtype=np.int32)


def raw_prompt_ids(model: TextSide, prompt: RawPrompt, n_history: int) -> TokenArray:
    """The tokens, int32[n], that a raw prompt adds to a session with so many tokens. Any thread.

    Raises InvalidMessage.
    """
    if prompt.token_ids:
        strange = next((token_id for token_id in prompt.token_ids if not 0 <= token_id < model.vocab_size), None)
        if strange is not None:
            raise InvalidMessage(f"token {strange} lies outside the vocabulary of {model.vocab_size}")
        return np.array(prompt.token_ids, dtype=np.int32)
    ids = model.encode(prompt.text)
    if n_history == 0 and model.first_token_id is not None and ids[:1] != [model.first_token_id]:
        ids = [model.first_token_id, *ids]
    return np.array(ids, dtype=np.int32)


def chat_message(message: Message, images_at: tuple[int, ...]) -> ChatMessage:
    return ChatMessage(
        message.role,
        message.content,
        reasoning=message.reasoning,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        images_at=images_at,
    )


def opened_thinking(model: TextSide, prompt_ids: TokenArray) -> bool:
    """Whether a prompt ends with the mark that thinking begins with."""
    end = b"".join(model.token_bytes(token_id) for token_id in prompt_ids[-len(THINK) - 2 :].tolist())
    return end.rstrip(b"\n").endswith(THINK.encode())


def tokens_of(turns: Sequence[TurnRecord]) -> TokenArray:
    """Int32 [n]: the session's tokens, those of its kept turns."""
    kept = [(turn.prompt_ids, turn.outcome.answer_ids) for turn in turns if turn.outcome and turn.outcome.kept]
    return np.concatenate([np.empty(0, dtype=np.int32), *(ids for pair in kept for ids in pair)])


def pictures_of(turns: Sequence[TurnRecord]) -> tuple[Picture, ...]:
    """All pictures among those tokens, in order."""
    return tuple(picture for turn in turns if turn.outcome and turn.outcome.kept for picture in turn.pictures)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class History:
    """What a turn's prompt is appended to: the session's tokens, int32 [n], and the pictures among them."""

    token_ids: TokenArray
    pictures: tuple[Picture, ...]

    @classmethod
    def of(cls, turns: Sequence[TurnRecord]) -> Self:
        """Of a session with these turns."""
        return cls(tokens_of(turns), pictures_of(turns))


def history_of(turns: Sequence[TurnRecord]) -> list[ChatMessage]:
    """The messages and answers of the kept turns, each answer in its parts."""
    history: list[ChatMessage] = []
    for turn in turns:
        if turn.outcome is not None and turn.outcome.kept:
            places = (places_in(number, turn.pictures) for number in range(len(turn.messages)))
            history.extend(map(chat_message, turn.messages, places))
            answer = parsed(turn, turn.outcome.answer_text)
            history.append(ChatMessage("assistant", answer.content, answer.reasoning, answer.tool_calls))
    return history


class ModelAnswerText:
    """``turn_events.AnswerText`` over the model's tokenizer, for one answer."""

    def __init__(self, model: TextSide, stops: Sequence[str]) -> None:
        self._model = model
        self._detokenizer = Detokenizer(model)
        self._watcher = StopWatcher(stops)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def end_token_ids(self) -> Sequence[int]:
        return self._model.end_token_ids

    def push(self, token_id: int) -> tuple[str, bool]:
        return self._watcher.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """What was held back. A stop string that only the last half of a character completes still stops the text."""
        text, stopped = self._watcher.push(self._detokenizer.flush())
        return text if stopped else text + self._watcher.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return self._model.token_bytes(token_id)
