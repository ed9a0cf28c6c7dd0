"""The two recorded tokenizers: one out of a GGUF file, one out of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.text.model import TextModel


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> TextModel:
    return TextModel.load(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_golden(golden: Path) -> Any:
    return json.loads((golden / "smollm2_q4_1" / "golden.json").read_text())


@pytest.fixture(scope="session")
def qwen_tiny_folder(golden: Path) -> Path:
    return golden / "tokenizer_qwen_tiny"


@pytest.fixture(scope="session")
def qwen_tiny(qwen_tiny_folder: Path) -> TextModel:
    return TextModel.load(qwen_tiny_folder)


@pytest.fixture(scope="session")
def qwen_tiny_golden(qwen_tiny_folder: Path) -> Any:
    return json.loads((qwen_tiny_folder / "golden.json").read_text())
