"""A byte-level BPE tokenizer out of a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvferry.engine.errors import ModelInvalid, UnsupportedArchitecture

# GGUF token types that are matched literally in the text before BPE: control (3) and user-defined (4).
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> Any:
    """Every Unicode number character alone (not only 0-9), then GPT-2's split."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split_by(digits: str) -> Any:
    pattern = Regex(_SPLIT.replace("DIGITS", digits))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), byte_level])


# tokenizer.ggml.pre -> how text is cut before merging; only those that are reproduced exactly.
_PRE_TOKENIZERS: Final[dict[str, Callable[[], Any]]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_byte_level,
    "qwen2": lambda: _split_by(r"\p{N}"),
    "llama-bpe": lambda: _split_by(r"\p{N}{1,3}"),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> tuple[Tokenizer, list[str], list[int]]:
    """The tokenizer, its vocabulary by id, and the ids of the tokens that are matched literally.

    Raises ModelInvalid for metadata that is missing or inconsistent, UnsupportedArchitecture for another kind of
    tokenizer.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedArchitecture(
            f"tokenizer model {model!r} is not supported; supported is 'gpt2' (byte-level BPE)"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedArchitecture(f"pre-tokenizer {pre!r} is not supported; supported are {known}")
    entries = _strings(metadata, "tokenizer.ggml.tokens")
    merges = [_merge(line) for line in _strings(metadata, "tokenizer.ggml.merges")]
    vocabulary = {entry: token_id for token_id, entry in enumerate(entries)}
    if len(vocabulary) != len(entries):
        raise ModelInvalid("the vocabulary names a token twice")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelInvalid(f"the tokenizer's merges do not fit its vocabulary: {error}") from error
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    literal_ids = _add_literals(tokenizer, entries, metadata)
    return tokenizer, entries, literal_ids


def _add_literals(tokenizer: Tokenizer, entries: list[str], metadata: Mapping[str, Any]) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(entries))
    if not isinstance(types, list) or len(types) != len(entries):
        raise ModelInvalid("tokenizer.ggml.token_type does not have one entry for each token")
    control = [i for i, kind in enumerate(types) if kind == _CONTROL and entries[i]]
    user_defined = [i for i, kind in enumerate(types) if kind == _USER_DEFINED and entries[i]]
    tokenizer.add_special_tokens([AddedToken(entries[i], special=True, normalized=False) for i in control])
    tokenizer.add_tokens([AddedToken(entries[i], special=False, normalized=False) for i in user_defined])
    return sorted(control + user_defined)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ModelInvalid(f"metadata {key!r} is missing or no list of strings")
    return value


def _merge(line: str) -> tuple[str, str]:
    left, separator, right = line.partition(" ")
    if not (left and separator and right):
        raise ModelInvalid(f"the tokenizer's merge {line!r} is not two parts with a space between them")
    return left, right
