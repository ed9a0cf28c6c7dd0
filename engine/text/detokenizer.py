"""Tokens to text, one at a time."""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer needs of a TextModel."""

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Turns a stream of tokens into a stream of text, each token in time proportional to its own bytes.

    A token may end inside a character; what is not yet a whole one is kept for the next push. All pushes and the flush,
    put together, are what ``TextModel.decode`` makes of all the tokens. Not for several threads at once.
    """

    def __init__(self, text_model: TokenBytes) -> None:
        self._text_model = text_model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; often its own, empty while a character is incomplete."""
        return self._decoder.decode(self._text_model.token_bytes(token_id))

    def flush(self) -> str:
        """The end of the text: U+FFFD if a character was left incomplete. The detokenizer is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
