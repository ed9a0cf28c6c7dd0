"""Messages to token ids and back. The session's token ids are the authority: only new text is ever tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvferry.coordinator.registry import Message, TokenArray, TurnRecord
from kvferry.engine.text.detokenizer import Detokenizer
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

    def first_turn(self, messages: Sequence[ChatMessage]) -> list[int]: ...

    def next_turn(
        self, history: Sequence[ChatMessage], last_token_id: int, new_messages: Sequence[ChatMessage]
    ) -> list[int]: ...


def new_prompt_ids(
    model: TextSide, turns: Sequence[TurnRecord], session_ids: TokenArray, messages: Sequence[Message]
) -> TokenArray:
    """The tokens, int32[n], that ``messages`` add to a session with these turns and tokens. Any thread."""
    new = [ChatMessage(m.role, m.content) for m in messages]
    if len(session_ids) == 0:
        ids = model.first_turn(new)
    else:
        ids = model.next_turn(history_of(turns), int(session_ids[-1]), new)
    return np.array(ids, dtype=np.int32)


def tokens_of(turns: Sequence[TurnRecord]) -> TokenArray:
    """Int32 [n]: the session's tokens, those of its kept turns."""
    kept = [(turn.prompt_ids, turn.outcome.answer_ids) for turn in turns if turn.outcome and turn.outcome.kept]
    return np.concatenate([np.empty(0, dtype=np.int32), *(ids for pair in kept for ids in pair)])


def history_of(turns: Sequence[TurnRecord]) -> list[ChatMessage]:
    """The messages and answers of the kept turns."""
    history: list[ChatMessage] = []
    for turn in turns:
        if turn.outcome is not None and turn.outcome.kept:
            history.extend(ChatMessage(m.role, m.content) for m in turn.messages)
            history.append(ChatMessage("assistant", turn.outcome.answer_text))
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

    def token_text(self, token_id: int) -> str:
        return self._model.token_bytes(token_id).decode("utf-8", "replace")
