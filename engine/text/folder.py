"""What a model folder (tokenizer.json and its neighbours) says about text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture

_JSON_BYTES_MAX: Final = 1 << 26  # the largest published tokenizer.json has 35 MB


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
    raw = _read(folder / "tokenizer.json")
    description = _parse(folder / "tokenizer.json", raw)
    if (description.get("decoder") or {}).get("type") != "ByteLevel":
        raise UnsupportedArchitecture(
            f"{folder}: its tokenizer is not byte-level BPE, which is the only kind supported"
        )
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises nothing narrower
        raise ModelInvalid(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    settings = _parse(folder / "tokenizer_config.json", _read(folder / "tokenizer_config.json"))
    config = _optional(folder / "config.json")
    special_tokens = _special_tokens(settings)
    return FolderText(
        tokenizer=tokenizer,
        tokenizer_bytes=raw,
        entries=_entries(tokenizer, config),
        literal_ids=sorted(tokenizer.get_added_tokens_decoder()),
        template=_template(folder, settings),
        special_tokens=special_tokens,
        end_token_ids=_end_token_ids(folder, config, tokenizer, special_tokens),
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
        return _read(file).decode("utf-8", "replace")
    template = settings.get("chat_template")
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


def _end_token_ids(
    folder: Path, config: dict[str, Any], tokenizer: Tokenizer, special_tokens: dict[str, str]
) -> tuple[int, ...]:
    """generation_config.json is the authority, then config.json, then the tokenizer's own end-of-sequence token."""
    for source in (_optional(folder / "generation_config.json"), config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None and all(isinstance(token_id, int) for token_id in ids):
            return tuple(dict.fromkeys(ids))
    token_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    return () if token_id is None else (token_id,)


def _optional(path: Path) -> dict[str, Any]:
    return _parse(path, _read(path)) if path.is_file() else {}


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            body = file.read(_JSON_BYTES_MAX + 1)
    except OSError as error:
        raise ModelInvalid(
            f"{path} cannot be read ({error.strerror}), so {path.parent} is not a model folder"
        ) from error
    if len(body) > _JSON_BYTES_MAX:
        raise ModelInvalid(f"{path} is larger than the limit of {_JSON_BYTES_MAX} bytes")
    return body


def _parse(path: Path, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ModelInvalid(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path} is not a JSON object")
    return value
