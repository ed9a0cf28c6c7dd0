"""A model's text side: messages to tokens and tokens to text. Needs no weights and no kernel."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvferry.engine.errors import InvalidMessage, ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.gguf_file import GgufFile, open_gguf
from kvferry.engine.text.bpe import tokenizer_from_gguf
from kvferry.engine.text.byte_level import token_table
from kvferry.engine.text.folder import read_folder
from kvferry.engine.text.messages import ChatMessage
from kvferry.engine.text.template import ChatTemplate

__all__ = ["ChatMessage", "TextModel"]


@dataclass(frozen=True)
class TextModel:
    """The tokenizer and the chat template of one model. Immutable; any thread may call.

    ``digest`` is a SHA-256 over everything that decides which tokens a conversation becomes.
    """

    model_name: str
    end_token_ids: tuple[int, ...]
    digest: str
    _tokenizer: Tokenizer = field(repr=False)
    _table: list[bytes] = field(repr=False)
    _template: ChatTemplate = field(repr=False)
    # That a prompt begins with, and that no template writes; None: there is no such token.
    first_token_id: int | None = field(repr=False)
    _literals: Mapping[str, int] = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> TextModel:
        """Read a GGUF file's metadata, or a folder's tokenizer files.

        Raises ModelNotFound, ModelInvalid, or UnsupportedArchitecture for a tokenizer that cannot be reproduced
        exactly.
        """
        path = Path(path)
        try:
            return cls._from_folder(path) if path.is_dir() else cls._from_gguf(open_gguf(path))
        except (ModelInvalid, UnsupportedArchitecture) as error:
            if str(path) in str(error):
                raise
            raise type(error)(f"{path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._table)

    @property
    def literal_ids(self) -> tuple[int, ...]:
        """The tokens that are matched literally in a text (control tokens, and those a model's maker added), by id."""
        return tuple(sorted(self._literals.values()))

    def literal_id(self, text: str) -> int | None:
        """The token that a mark such as ``<think>`` is, if the model has one for it."""
        return self._literals.get(text)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, nothing added before or after. Bytes that the vocabulary has no token for are dropped.

        The text of a special token, such as ``<|im_end|>``, becomes that token wherever it stands, in a user's message
        too.
        """
        try:
            # Encoding in a batch lets go of the GIL: half a megabyte of text would stop all other threads for a second.
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeError) as error:
            raise InvalidMessage("the text holds half a surrogate pair, which is no character") from error
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD. Special tokens appear as their own text."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, maybe a part of a character. ValueError for an id outside the vocabulary."""
        if not 0 <= token_id < len(self._table):
            raise ValueError(f"token {token_id} lies outside the vocabulary of {len(self._table)}")
        return self._table[token_id]

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> str:
        """The conversation as the model's text. Raises InvalidMessage when the template refuses it.

        ``tools`` and ``thinking``: see ``ChatTemplate.render``.
        """
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, thinking=thinking
        )

    def first_turn(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        """The prompt of a new conversation. Raises InvalidMessage."""
        ids = self.encode(self.render(messages, add_generation_prompt=True, tools=tools, thinking=thinking))
        if self.first_token_id is not None and ids[:1] != [self.first_token_id]:
            return [self.first_token_id, *ids]
        return ids

    def next_turn(
        self,
        history: Sequence[ChatMessage],
        last_token_id: int,
        new_messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        """The tokens to append to a session whose tokens end with the last answer.

        ``history`` ends with that answer as an assistant message; its tokens stay what they are (the thinking in it
        too, which a template would leave out of a conversation rendered anew), and only what the template puts after it
        is tokenised. An answer that ends with the template's end token (``last_token_id``) gets
        no second one.

        Raises InvalidMessage when the history does not end with an answer, or the template does not show it.
        """
        if not history or history[-1].role != "assistant":
            raise InvalidMessage(
                "the conversation so far does not end with an answer, so nothing can be appended to it"
            )
        mark = _mark_beside(repr(([*history, *new_messages], tools)))
        marked = [*history[:-1], ChatMessage(history[-1].role, mark), *new_messages]
        text = self.render(marked, add_generation_prompt=True, tools=tools, thinking=thinking)
        _before, found, after = text.partition(mark)
        if not found or mark in after:
            raise InvalidMessage(
                "the model's chat template does not show an earlier answer once, so it cannot be continued"
            )
        ids = self.encode(after)
        return ids[1:] if ids[:1] == [last_token_id] and last_token_id in self.end_token_ids else ids

    @classmethod
    def _from_gguf(cls, file: GgufFile) -> TextModel:
        metadata = file.metadata
        tokenizer, entries, literal_ids = tokenizer_from_gguf(metadata)
        source = metadata.get("tokenizer.chat_template")
        if not isinstance(source, str):
            raise ModelInvalid("it has no chat template, so it is not a chat model")
        special_tokens = {
            f"{name}_token": entries[token_id]
            for name in ("bos", "eos")
            if (token_id := _token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(entries))) is not None
        }
        bos_id = _token_id(metadata, "tokenizer.ggml.bos_token_id", len(entries))
        first_token_id = bos_id if metadata.get("tokenizer.ggml.add_bos_token") is True else None
        decides = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        return cls(
            model_name=str(metadata.get("general.name") or file.path.stem),
            end_token_ids=file.end_token_ids,
            digest=_digest(json.dumps(decides, sort_keys=True).encode()),
            _tokenizer=tokenizer,
            _table=token_table(entries, literal_ids),
            _template=ChatTemplate(source, special_tokens),
            first_token_id=first_token_id,
            _literals={entries[token_id]: token_id for token_id in literal_ids},
        )

    @classmethod
    def _from_folder(cls, folder: Path) -> TextModel:
        found = read_folder(folder)
        decides = json.dumps(
            [found.template, found.special_tokens, found.end_token_ids, len(found.entries)], sort_keys=True
        )
        return cls(
            model_name=folder.resolve().name,
            end_token_ids=found.end_token_ids,
            digest=_digest(found.tokenizer_bytes, decides.encode()),
            _tokenizer=found.tokenizer,
            _table=token_table(found.entries, found.literal_ids),
            _template=ChatTemplate(found.template, found.special_tokens),
            first_token_id=None,  # a folder's template writes it itself
            _literals={entry: i for i in found.literal_ids if (entry := found.entries[i]) is not None},
        )


def _mark_beside(texts: str) -> str:
    """A word that does not occur in the texts; letters only, so that no template strips or escapes it."""
    mark = "Qanswerq"
    while mark in texts:
        mark += "xq"
    return mark


def _token_id(metadata: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < n_tokens:
        raise ModelInvalid(f"metadata {key!r} is {value!r}, which is no token of its vocabulary of {n_tokens}")
    return value


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
