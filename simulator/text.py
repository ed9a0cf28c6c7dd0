"""A model without weights: bytes are tokens, and the next token is a function of those before it and the seed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvferry.engine.text.model import ChatMessage

END: Final = 256
ENDS_ONE_IN: Final = 61


class SimulatedText:
    """``coordinator.conversation.TextSide``; 256 bytes and an end token."""

    model_name = "simulated"
    digest = "simulated"
    vocab_size = 257
    end_token_ids = (END,)
    first_token_id = None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b""

    def literal_id(self, text: str) -> int | None:
        del text
        return None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def first_turn(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        del tools, thinking
        return [byte for m in messages for byte in f"<{m.role}>{m.content}".encode()]

    def next_turn(
        self,
        history: Sequence[ChatMessage],
        last_token_id: int,
        new_messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        del history, tools, thinking
        return [*([] if last_token_id == END else [10]), *self.first_turn(new_messages)]


class TokenStream:
    """The tokens after a prefix, one by one: any change before one changes it."""

    def __init__(self, token_ids: Sequence[int], seed: int) -> None:
        self._digest = zlib.crc32(struct.pack(f"<q{len(token_ids)}h", seed, *token_ids))

    def next(self) -> int:
        drawn = END if self._digest % ENDS_ONE_IN == 0 else self._digest % 256
        self._digest = zlib.crc32(struct.pack("<h", drawn), self._digest)
        return drawn


def undisturbed_answer(prompt_ids: Sequence[int], seed: int, max_tokens: int) -> list[int]:
    """What a turn answers when nothing ever happens to it."""
    stream = TokenStream(prompt_ids, seed)
    answer: list[int] = []
    while len(answer) < max_tokens and END not in answer[-1:]:
        answer.append(stream.next())
    return answer
