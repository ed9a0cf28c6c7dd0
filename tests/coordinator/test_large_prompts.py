"""What takes much memory while it is tokenised does not do so for many turns at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from kvferry.coordinator.conversation import History
from kvferry.coordinator.forms import LARGE_CHARACTERS
from kvferry.coordinator.loaded_model import LoadedModel, served
from kvferry.coordinator.registry import Message
from kvferry.coordinator.requests import SAMPLING_DEFAULTS, RawPrompt, TurnRequest

T = TypeVar("T")


class Counting:
    """``in_thread``, that counts how much was under way at once."""

    def __init__(self) -> None:
        self.n_running = self.most = 0

    async def __call__(self, function: Callable[[], T], /) -> T:
        self.n_running += 1
        self.most = max(self.most, self.n_running)
        try:
            return await asyncio.to_thread(function)
        finally:
            self.n_running -= 1


def request(text: str, *, raw: bool) -> TurnRequest:
    messages = () if raw else (Message("user", text),)
    prompt = RawPrompt(text) if raw else None
    return TurnRequest(
        session_id="s", turn_id="", messages=messages, sampling=SAMPLING_DEFAULTS, max_tokens=1, stop=(),
        raw_prompt=prompt,
    )  # fmt: skip


@pytest.mark.parametrize("raw", [False, True], ids=["messages", "raw prompt"])
@pytest.mark.parametrize(("n_characters", "at_once"), [(20_000, 3), (LARGE_CHARACTERS + 1, 1)], ids=["long", "large"])
async def test_large_texts_are_tokenised_one_turn_at_a_time(
    model: LoadedModel, n_characters: int, at_once: int, raw: bool
) -> None:
    (model_served,) = served([model])
    in_thread = Counting()
    turn = request("a ferry " * (n_characters // 8 + 1), raw=raw)
    prepared = await asyncio.gather(
        *(model_served.preparation.prepare(in_thread, turn, (), History.of(())) for _ in range(3))
    )
    assert in_thread.most == at_once
    assert len({len(one.prompt_ids) for one in prepared}) == 1
