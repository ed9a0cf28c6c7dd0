"""What all tests share: the golden data and the real model."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from kvferry.engine.files.fetch import fetch_model

sys.path.insert(0, str(Path(__file__).parent))  # seaweed.py

from seaweed import SeaweedFs

# A shell that runs tests in the background ignores SIGINT, and every process they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something of the machine: one that was held up for a fifth of a second is no finding.
settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")


# Random tests draw other cases every run; a failure is repeated with the seed that the header names.
SEED_VARIABLE = "KVFERRY_TEST_SEED"
FIRST_SEED = int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(1_000_000_000))


def pytest_report_header() -> str:
    return f"random cases from seed {FIRST_SEED} on (set {SEED_VARIABLE}={FIRST_SEED} for the same)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A set has another order in every process, and two workers that disagree on a test's name run none at all."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = () if callspec is None else callspec.params.values()
        sets = [str(value) for value in values if isinstance(value, set | frozenset) and len(value) > 1]
        if any(written in item.name for written in sets):
            raise pytest.UsageError(f"{item.nodeid}: its name holds a set, which has no order: give the case an id")


@pytest.fixture(scope="session")
def first_seed() -> int:
    """Seeds from this one on are this run's."""
    return FIRST_SEED


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB: a disk that is really full, not one that says so."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=64", "tmpfs", str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


N_TOKENIZER = 1024  # tokens of the recorded tokenizer
IMAGE_IDS = {
    "vision_start_token_id": 1016, "vision_end_token_id": 1017, "video_token_id": 1018, "image_token_id": 1019,
}  # fmt: skip


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of recorded answers."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in the user's cache, fetched by the product's own code when it is not there yet."""
    return fetch_model("smollm2-135m").path


@pytest.fixture(scope="session")
def recorded(golden: Path) -> Callable[[str], Path]:
    """The folder of a model with recorded answers: the large collection beside the project, or the few kept here."""
    collection = Path(__file__).parents[2] / "shared" / "oracle"

    def find(name: str) -> Path:
        for folder in (collection / name, golden / name):
            if folder.is_dir():
                return folder
        pytest.skip(f"{name} is not among the few recorded models kept here, and there is no {collection}")

    return find


@pytest.fixture(scope="session")
def chat_model(
    recorded: Callable[[str], Path], golden: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of a recorded model that can be talked to: a tokenizer and a chat template are put beside it."""

    @cache
    def make(name: str) -> Path:
        return _with_tokenizer(
            recorded(name) / "model", golden / "tokenizer_qwen_tiny", tmp_path_factory.mktemp(name) / "model"
        )

    return make


def _with_tokenizer(model: Path, tokenizer: Path, folder: Path) -> Path:
    """A smaller vocabulary than the tokenizer's is filled up with random rows."""
    shutil.copytree(model, folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    for file in folder.glob("*.safetensors"):
        _fill_up(file, text["vocab_size"])
    text["vocab_size"] = N_TOKENIZER
    if "vision_config" in config:
        config |= IMAGE_IDS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _fill_up(file: Path, n_tokens: int) -> None:
    """Append random rows to the embeddings and the head in a safetensors file."""
    data = file.read_bytes()
    n_head = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + n_head])
    random = np.random.default_rng(4)
    parts: list[bytes] = []
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        part = data[8 + n_head + start : 8 + n_head + stop]
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            n_missing, width = N_TOKENIZER - n_tokens, entry["shape"][1]
            rows = (random.standard_normal((n_missing, width)) / 8).astype("<f4")
            part += rows.tobytes() if entry["dtype"] == "F32" else (rows.view("<u4") >> 16).astype("<u2").tobytes()
            entry["shape"][0] = N_TOKENIZER
        at = sum(map(len, parts))
        entry["data_offsets"] = [at, at + len(part)]
        parts.append(part)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


@pytest.fixture(scope="session")
def new_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], SeaweedFs]]:
    """Makes S3 servers, not started yet; all are killed at the end. Skips where there is none."""
    made: list[SeaweedFs] = []

    def new() -> SeaweedFs:
        made.append(SeaweedFs(tmp_path_factory.mktemp("weed")))
        return made[-1]

    yield new
    for server in made:
        server.kill()
