"""When what was struck is healed, and what is no truth to judge by."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.drills import stage
from kvferry.drills.errors import DrillImpossible
from kvferry.drills.runner import _Director
from kvferry.drills.scenarios import STORE, Disturbance, Injection, Limits, Scenario, Where


class ScriptedStage:
    """Comes a token further each time somebody looks: answers of four tokens."""

    serving = "node-1"

    def __init__(self) -> None:
        self.n_looks = 0

    def has_come_to(self, turn: int, n_tokens: int) -> bool:
        self.n_looks += 1
        return (self.n_looks // 4 + 1, self.n_looks % 4) >= (turn, n_tokens)

    def wait(self, seconds: float) -> None:
        del seconds

    def check_answering(self, turn: int, at: float) -> None:
        del turn, at

    def check_undisturbed(self) -> None: ...


def told_by(injection: Injection) -> tuple[list[str], float]:
    """What a target is told to do, and how long it took."""
    told: list[str] = []
    target: Any = SimpleNamespace(
        ways={Disturbance.STORE_FULL: "a full store"},
        node_ids=frozenset({"node-1"}),
        inject=lambda number, what, parts: told.append(f"strike {what} {parts}") or time.monotonic(),
        heal=lambda what, parts: told.append(f"heal {what} {parts}"),
    )
    scripted: Any = ScriptedStage()
    scenario = Scenario(name="x", hypothesis="", proves="", injections=(injection,), limits=Limits(longest_pause_s=1))
    began = time.monotonic()
    _Director(target, scripted, lambda _line: None).run(scenario, began + 30)
    return told, time.monotonic() - began


def test_a_strike_lasts_for_its_time_or_until_an_answer_begins() -> None:
    what, where = Disturbance.STORE_FULL, Where.STORE
    both = [f"strike {what} {(STORE,)}", f"heal {what} {(STORE,)}"]
    told, seconds = told_by(Injection(what=what, where=where, turn=1, after_tokens=1, hold_s=20.0, until_turn=3))
    assert (told, seconds < 10) == (both, True)
    told, seconds = told_by(Injection(what=what, where=where, turn=1, after_tokens=1, hold_s=0.2))
    assert (told, seconds >= 0.2) == (both, True)


def test_a_truth_that_is_not_whole_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against half an answer, the other half of the disturbed one would be a fault."""
    enough = threading.Event()

    def hang(**_: str) -> None:
        enough.wait()
        raise RuntimeError("the client is closed")

    client: Any = SimpleNamespace(create_session=hang)
    monkeypatch.setattr(stage, "UNDISTURBED_S", 0.0)
    try:
        with pytest.raises(DrillImpossible, match="did not end within 0 s"):
            stage.hold_undisturbed(client, [], "truth", 0)
    finally:
        enough.set()
