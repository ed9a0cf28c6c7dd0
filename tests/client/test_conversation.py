"""A chat with a person, whose lines are said by the test, against a coordinator that is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvferry.client.commands.chat import Conversation
from kvferry.client.errors import ClientError
from kvferry.client.sdk import AnswerForm, Client, Sampling, TurnEvent

from .scripted_coordinator import Refuse, ScriptedCoordinator, finished, started


class Notes:
    """A view that keeps what the person is told beside the answers."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def show(self, event: TurnEvent) -> None: ...

    def note(self, text: str) -> None:
        self.told.append(text)


def talk(address: str, lines: Sequence[str], *, interactive: bool = True) -> list[str]:
    view = Notes()
    with Client(address, patience_s=0) as client:
        conversation = Conversation(
            client, view, tenant="", model=None, system=None, max_tokens=4, stop=(), priority=0, timeout_s=0,
            sampling=Sampling(), form=AnswerForm(), interactive=interactive,
        )  # fmt: skip
        conversation.open(None)
        conversation.talk(iter(lines))
    return view.told


@pytest.mark.parametrize(
    "code",
    ["rate_limited", "too_many_turns", "queue_full", "no_node", "prompt_too_long", "unknown_session", "unknown_turn"],
)
async def test_a_person_whose_message_is_refused_may_say_it_again(coordinator: ScriptedCoordinator, code):
    coordinator.echo_turn_id = True
    coordinator.scripts = [[Refuse(code)], [started(), finished(0)]]
    told = await asyncio.to_thread(talk, f"127.0.0.1:{coordinator.port}", ["hello", "hello"])
    assert f"error: Refused with {code}." in told
    assert [type(call).__name__ for call in coordinator.calls].count("GenerateRequest") == 2
    assert len(coordinator.sessions) == 1


async def test_a_script_ends_with_what_is_refused(coordinator: ScriptedCoordinator):
    coordinator.scripts = [[Refuse("rate_limited")]]
    with pytest.raises(ClientError, match="rate_limited"):
        await asyncio.to_thread(talk, f"127.0.0.1:{coordinator.port}", ["hello", "hello"], interactive=False)
