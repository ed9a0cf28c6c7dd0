"""Tokens are the ones that were recorded, for every recorded text, from a GGUF file and from a folder."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.errors import InvalidMessage, ModelInvalid, ModelNotFound, UnsupportedArchitecture
from kvferry.engine.files.gguf_file import GgufFile, open_gguf
from kvferry.engine.text.bpe import tokenizer_from_gguf
from kvferry.engine.text.byte_level import BYTE_OF
from kvferry.engine.text.model import TextModel


def test_every_recorded_text_has_the_recorded_tokens(smollm2: TextModel, smollm2_golden: Any) -> None:
    cases = smollm2_golden["tokenizer_cases"]
    assert len(cases) > 40
    for case in cases:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
        assert smollm2.decode(case["ids"]) == case["decoded"]


def test_a_folder_has_the_recorded_tokens_too(qwen_tiny: TextModel, qwen_tiny_golden: Any) -> None:
    cases = qwen_tiny_golden["cases"]
    assert len(cases) > 40
    for case in cases:
        assert qwen_tiny.encode(case["text"]) == case["ids"], case["text"]
        assert qwen_tiny.decode(case["ids"]) == case["decoded"]


def test_recorded_prompts_and_answers(smollm2: TextModel, smollm2_golden: Any) -> None:
    for prompt in smollm2_golden["prompts"].values():
        assert smollm2.encode(prompt["rendered"]) == prompt["input_ids"]
        assert smollm2.decode(prompt["greedy_64_ids"]) == prompt["greedy_64_text"]


def test_facts_about_the_models(smollm2: TextModel, qwen_tiny: TextModel) -> None:
    assert (smollm2.vocab_size, smollm2.end_token_ids) == (49152, (2,))
    assert smollm2.model_name == "Smollm2 135M 8k Lc100K Mix1 Ep2"
    assert (qwen_tiny.vocab_size, qwen_tiny.end_token_ids) == (1024, (1023,))
    assert len(smollm2.digest) == 64
    assert smollm2.digest != qwen_tiny.digest


def test_the_qwen2_pre_tokenizer_of_a_gguf_file_equals_the_folder_s(
    qwen_tiny_folder: Path, qwen_tiny_golden: Any
) -> None:
    """The folder's vocabulary, as a converter writes it into a GGUF file's metadata."""
    description = json.loads((qwen_tiny_folder / "tokenizer.json").read_text())
    entries = {token_id: entry for entry, token_id in description["model"]["vocab"].items()}
    types = dict.fromkeys(entries, 1)
    for added in description["added_tokens"]:
        entries[added["id"]] = added["content"]
        types[added["id"]] = 3 if added["special"] else 4
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [entries[i] for i in range(len(entries))],
        "tokenizer.ggml.token_type": [types[i] for i in range(len(entries))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in description["model"]["merges"]],
    }
    tokenizer, _, _ = tokenizer_from_gguf(metadata)
    for case in qwen_tiny_golden["cases"]:
        assert tokenizer.encode(case["text"]).ids == case["ids"], case["text"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a1234b", ["a", "1234", "b"]),
        ("smollm", "a12½b", ["a", "1", "2", "½", "b"]),
        ("qwen2", "a1234b", ["a", "1", "2", "3", "4", "b"]),
        ("llama-bpe", "a1234b", ["a", "123", "4", "b"]),
        ("llama-bpe", "I'LL go", ["I", "'LL", " go"]),
        ("gpt-2", "I'LL go", ["I", "'", "LL", " go"]),
    ],
)
def test_how_each_pre_tokenizer_cuts(pre: str, text: str, pieces: list[str]) -> None:
    tokens = sorted(BYTE_OF)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "12", "L" * 2],
        "tokenizer.ggml.merges": ["1 2", "L L"],
    }
    tokenizer, _, _ = tokenizer_from_gguf(metadata)
    assert [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def changeable(path: Path) -> tuple[dict[str, Any], GgufFile]:
    """The file with metadata of its own: all who open a file share one."""
    file = open_gguf(path)
    metadata = copy.deepcopy(dict(file.metadata))
    return metadata, dataclasses.replace(file, metadata=metadata)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"tokenizer.ggml.model": "llama"}, UnsupportedArchitecture, "tokenizer model 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "mystery"}, UnsupportedArchitecture, "'mystery' is not supported; supported are gpt-2"),
        ({"tokenizer.ggml.pre": None}, UnsupportedArchitecture, "pre-tokenizer None"),
        ({"tokenizer.ggml.tokens": None}, ModelInvalid, r"'tokenizer\.ggml\.tokens' is missing"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, ModelInvalid, "names a token twice"),
        ({"tokenizer.ggml.merges": ["ab"]}, ModelInvalid, "merge 'ab' is not two parts"),
        ({"tokenizer.ggml.merges": ["a zebra"]}, ModelInvalid, "do not fit its vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, ModelInvalid, "one entry for each token"),
        ({"tokenizer.chat_template": None}, ModelInvalid, "no chat template"),
        ({"tokenizer.chat_template": "{% for %}"}, ModelInvalid, "cannot be compiled"),
        ({"tokenizer.ggml.eos_token_id": 99_999}, ModelInvalid, "no token of its vocabulary"),
    ],
)
def test_metadata_that_is_damaged_or_of_another_kind_is_refused_by_name(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    metadata, file = changeable(smollm2_path)
    for key, value in changes.items():
        if value is None:
            del metadata[key]
        else:
            metadata[key] = value
    monkeypatch.setattr("kvferry.engine.text.model.open_gguf", lambda _: file)
    with pytest.raises(error, match=reason) as caught:
        TextModel.load(smollm2_path)
    assert str(smollm2_path) in str(caught.value)


def test_the_digest_changes_with_the_tokenizer_and_with_the_template(
    smollm2: TextModel, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, qwen_tiny: TextModel,
    qwen_tiny_folder: Path, tmp_path: Path,
) -> None:  # fmt: skip
    metadata, file = changeable(smollm2_path)
    monkeypatch.setattr("kvferry.engine.text.model.open_gguf", lambda _: file)
    assert TextModel.load(smollm2_path).digest == smollm2.digest
    metadata["tokenizer.chat_template"] += " "
    changed_template = TextModel.load(smollm2_path).digest
    metadata["tokenizer.ggml.merges"].pop()
    changed_merges = TextModel.load(smollm2_path).digest
    assert len({smollm2.digest, changed_template, changed_merges}) == 3
    other_folder = tmp_path / "copy"
    shutil.copytree(qwen_tiny_folder, other_folder)
    assert TextModel.load(other_folder).digest == qwen_tiny.digest
    (other_folder / "generation_config.json").write_text('{"eos_token_id": [1023, 1022]}')
    other = TextModel.load(other_folder)
    assert other.end_token_ids == (1023, 1022)
    assert other.digest != qwen_tiny.digest


@pytest.mark.parametrize(
    ("name", "body", "error", "reason"),
    [
        ("tokenizer.json", None, ModelInvalid, r"has no tokenizer\.json"),
        ("tokenizer.json", "{", ModelInvalid, "is not JSON"),
        ("tokenizer.json", "[]", ModelInvalid, "is not a JSON object"),
        ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}}', ModelInvalid, "is not a tokenizer"),
        ("tokenizer.json", '{"decoder": {"type": "Metaspace"}}', UnsupportedArchitecture, "not byte-level BPE"),
        ("tokenizer_config.json", "{}", ModelInvalid, "has no chat template"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(
    qwen_tiny_folder: Path, tmp_path: Path, name: str, body: str | None, error: type[Exception], reason: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(qwen_tiny_folder, copy)
    if body is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(body)
    with pytest.raises(error, match=reason) as caught:
        TextModel.load(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        TextModel.load(tmp_path / "none.gguf")


# SmolLM2's vocabulary has no token for six control bytes and for the first bytes of planes 4 to 11, which Unicode has
# not assigned.
WRITABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"]))


@given(WRITABLE)
def test_every_text_comes_back_from_its_tokens(smollm2: TextModel, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def test_half_a_surrogate_pair_is_refused(smollm2: TextModel) -> None:
    with pytest.raises(InvalidMessage, match="surrogate"):
        smollm2.encode("a\ud800b")


@pytest.mark.parametrize("token_id", [-1, 49152])
def test_an_id_outside_the_vocabulary_is_refused(smollm2: TextModel, token_id: int) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary of 49152"):
        smollm2.token_bytes(token_id)
