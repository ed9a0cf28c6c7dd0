"""Log-probabilities of tokens, each with its own bytes: a character may be made of several. Pure.

One entry for each token of the answer: all their bytes, put together, are its text in UTF-8.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvferry.client import Finished, FinishReason, Token, TokenLogprob

Json = dict[str, Any]

BYTES: Final = "bytes:"
"""What stands before a token that is a part of a character, where an entry has no bytes beside it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A token, and how many characters the answer has before it: whole ones, so that no token of one has more."""

    token: Token
    offset: int


class HeldLogprobs:
    """Log-probabilities on their way: those of tokens without text wait, since one of them may be the end."""

    def __init__(self) -> None:
        self._held: list[Entry] = []
        # As the coordinator makes text of tokens, so that its characters and ours are the same.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_decoded = 0
        self._n_told = 0  # characters that the reader has

    def push(self, token: Token) -> list[Entry]:
        """What may be told now."""
        if token.logprob is None:
            return []
        self._held.append(Entry(token, self._n_decoded))
        self._n_decoded += len(self._decoder.decode(bytes_of(token)))
        self._n_told += len(token.text)
        return self._of_told_text()

    def flush(self, end: Finished) -> list[Entry]:
        """What is left, but for the end token, and for what lies behind the place where a stop string begins."""
        self._n_told += len(end.tail_text)
        if end.reason is FinishReason.STOP_STRING:
            return self._of_told_text()
        return self._held[:-1] if end.reason is FinishReason.END else self._held

    def _of_told_text(self) -> list[Entry]:
        told = [entry for entry in self._held if entry.offset < self._n_told]
        self._held = self._held[len(told) :]
        return told


class HeldContentLogprobs:
    """The same of the content alone: tokens of thinking, of calls, and of the marks around them have no entries."""

    def __init__(self) -> None:
        self._held: list[Token] = []

    def push(self, token: Token) -> list[Token]:
        """Those whose content this token completes."""
        if token.logprob is None:
            return []
        self._held.append(token)
        if not token.content and not token.reasoning and not token.tool_calls:
            return []
        return self._told(token.content)

    def flush(self, end: Finished) -> list[Token]:
        """Of the content that came last."""
        if end.reason is FinishReason.END:
            self._held = self._held[:-1]
        return self._told(end.tail_content)

    def _told(self, content: str) -> list[Token]:
        held, self._held = self._held, []
        if not content:
            return []
        # Marks, and newlines beside them, may stand before it. Not found: its beginning was told with an earlier token.
        n_before = b"".join(map(bytes_of, held)).rfind(content.encode())
        while held and n_before >= len(bytes_of(held[0])):
            n_before -= len(bytes_of(held.pop(0)))
        return held


def bytes_of(token: Token | TokenLogprob) -> bytes:
    """What it stands for; of an older coordinator the text is all that is known."""
    return token.token_bytes or token.text.encode()


def logprob_json(token: Token) -> Json:
    """A token with its log-probability and the alternatives to it."""
    return {**_entry(token), "top_logprobs": [_entry(other) for other in token.top_logprobs]}


def old_json(entries: Sequence[Entry]) -> Json:
    """The shape that came before chat, which has only the tokens' texts."""
    tokens = [entry.token for entry in entries]
    return {
        "tokens": [_text(token, BYTES) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{_text(other, BYTES): other.logprob for other in token.top_logprobs} for token in tokens],
        "text_offset": [entry.offset for entry in entries],
    }


def _entry(token: Token | TokenLogprob) -> Json:
    return {"token": _text(token), "logprob": token.logprob, "bytes": list(bytes_of(token))}


def _text(token: Token | TokenLogprob, before_bytes: str = "") -> str:
    raw = bytes_of(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return before_bytes + "".join(f"\\x{byte:02x}" for byte in raw)
