"""The collector leaves alone what a server has loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvferry.telemetry.pauses import keep_loaded


class Loaded:
    """As a module's or a tokenizer's objects."""


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def is_looked_at(wanted: Loaded) -> bool:
    return any(one is wanted for one in gc.get_objects())


def test_what_was_loaded_is_not_looked_through_again_and_what_comes_later_is():
    loaded = Loaded()
    assert is_looked_at(loaded)
    keep_loaded()
    later = Loaded()
    assert not is_looked_at(loaded)
    assert is_looked_at(later)
