"""What a model folder (tokenizer.json and its neighbours) says about text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture
from kvferry.engine.files.checkpoint_config import stated_end_token_ids
from kvferry.engine.files.fields import JSON_BYTES_MAX, parse_json, read_bytes, read_json, read_json_if_there


@dataclass(frozen=True, slots=True)
class FolderText:
    """A folder's tokenizer, template and special tokens. ``entries``: the vocabulary by id, None where no token is."""

    tokenizer: Tokenizer
    tokenizer_bytes: bytes
    entries: list[str | None]
    literal_ids: list[int]
    template: str
    special_tokens: dict[str, str]
    end_token_ids: tuple[int, ...]


def read_folder(folder: Path) -> FolderText:
    """Read a folder's text part. Raises ModelInvalid, or UnsupportedArchitecture when it is not byte-level BPE."""
    raw = read_bytes(folder / "tokenizer.json", JSON_BYTES_MAX)
    description = parse_json(folder / "tokenizer.json", raw)
    if (description.get("decoder") or {}).get("type") != "ByteLevel":
        raise UnsupportedArchitecture(
            f"{folder}: its tokenizer is not byte-level BPE, which is the only kind supported"
        )
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises nothing narrower
        raise ModelInvalid(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    settings = read_json(folder / "tokenizer_config.json", JSON_BYTES_MAX)
    config = read_json_if_there(folder / "config.json")
    special_tokens = _special_tokens(settings)
    return FolderText(
        tokenizer=tokenizer,
        tokenizer_bytes=raw,
        entries=_entries(tokenizer, config),
        literal_ids=sorted(tokenizer.get_added_tokens_decoder()),
        template=_template(folder, settings),
        special_tokens=special_tokens,
        end_token_ids=_end_token_ids(folder, tokenizer, special_tokens),
    )


def _entries(tokenizer: Tokenizer, config: dict[str, Any]) -> list[str | None]:
    """One entry for every row of the embedding, which is often padded beyond the vocabulary."""
    by_token = tokenizer.get_vocab(with_added_tokens=True)
    text_config = config.get("text_config", config)
    claimed = text_config.get("vocab_size", 0) if isinstance(text_config, dict) else 0
    n_entries = max(claimed if isinstance(claimed, int) else 0, max(by_token.values(), default=-1) + 1)
    entries: list[str | None] = [None] * min(n_entries, 1 << 22)
    for token, token_id in by_token.items():
        entries[token_id] = token
    return entries


def _template(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_bytes(file, JSON_BYTES_MAX).decode("utf-8", "replace")
    template = settings.get("chat_template")
    if template is None:  # models that see kept it beside their processor for a while
        template = read_json_if_there(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise ModelInvalid(f"{folder} has no chat template, so it is not a chat model")
    return template


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _end_token_ids(folder: Path, tokenizer: Tokenizer, special_tokens: dict[str, str]) -> tuple[int, ...]:
    """What the model's own files state, else the tokenizer's end-of-sequence token."""
    stated = stated_end_token_ids(folder)
    if stated is not None:
        return stated
    token_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    return () if token_id is None else (token_id,)
