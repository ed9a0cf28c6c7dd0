"""What all tests share: the golden data and the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.engine.files.fetch import fetch_model


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of recorded answers."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in the user's cache, fetched by the product's own code when it is not there yet."""
    return fetch_model("smollm2-135m").path
