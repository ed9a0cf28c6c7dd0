"""What all tests share: the golden data and the real model."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.engine.files.fetch import fetch_model

# A shell that runs tests in the background ignores SIGINT, and every process they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Random tests draw other cases every run; a failure is repeated with the seed that the header names.
SEED_VARIABLE = "KVFERRY_TEST_SEED"
FIRST_SEED = int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(1_000_000_000))


def pytest_report_header() -> str:
    return f"random cases from seed {FIRST_SEED} on (set {SEED_VARIABLE}={FIRST_SEED} for the same)"


@pytest.fixture(scope="session")
def first_seed() -> int:
    """Seeds from this one on are this run's."""
    return FIRST_SEED


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
