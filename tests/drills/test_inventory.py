"""Drills on the boards of an inventory, without a board: what ansible says is played."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.drills.errors import DrillImpossible
from kvferry.drills.journal import STATE_VARIABLE, Journal
from kvferry.drills.scenarios import SCENARIOS, STORE, Disturbance
from kvferry.drills.targets import inventory
from kvferry.drills.targets.inventory import InventoryTarget

LISTED: dict[str, Any] = {
    "coordinators": {"hosts": ["desk"]},
    "nodes": {"hosts": ["board1", "board2"]},
    "_meta": {"hostvars": {}},
}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InventoryTarget]:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "runs"))
    (tmp_path / "drill.yml").touch()
    with Journal.begin("test") as journal:
        yield InventoryTarget(
            journal, tmp_path / "inventory.yml", lambda *_: pytest.fail("nobody asks"), allow_power_cut=False
        )


def ansible_lists(listed: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "ansible-inventory"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(listed)}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setattr(inventory, "_program", lambda _name: str(program))


@pytest.mark.parametrize("group", ["coordinators", "nodes"])
@pytest.mark.parametrize("what_is_there", [{}, {"children": ["others"]}, {"hosts": []}])
def test_a_group_without_hosts_is_one_sentence(
    target: InventoryTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, what_is_there: dict[str, Any]
) -> None:
    ansible_lists(LISTED | {group: what_is_there}, tmp_path, monkeypatch)
    with pytest.raises(DrillImpossible, match=rf"inventory\.yml has no hosts in its group {group}\."):
        _ = (target.node_ids, target.address)


def test_hosts_of_groups_in_a_group_belong_to_it(
    target: InventoryTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = LISTED | {
        "nodes": {"children": ["rack1", "rack2"]},
        "rack1": {"hosts": ["board1"]},
        "rack2": {"hosts": ["board2"]},
    }
    ansible_lists(nested, tmp_path, monkeypatch)
    assert (target.node_ids, target.address) == ({"board1", "board2"}, "desk:7070")


@pytest.mark.parametrize(("name", "is_done"), [("kill", False), ("store-rotten", False), ("coordinator-loss", True)])
def test_a_node_that_shares_its_host_with_a_coordinator_is_not_struck_in_its_place(
    target: InventoryTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_done: bool
) -> None:
    ansible_lists(LISTED | {"nodes": {"hosts": ["desk", "board1"]}}, tmp_path, monkeypatch)
    armed: list[int] = []
    monkeypatch.setattr(target, "_arm", lambda number, _injection: armed.append(number))
    if is_done:
        target.start(SCENARIOS[name])
    else:
        with pytest.raises(DrillImpossible, match="desk is a coordinator and a node"):
            target.start(SCENARIOS[name])
    assert armed == ([0] if is_done else [])


class Played:
    """A play that has ended."""

    def poll(self) -> int:
        return 0


@pytest.mark.parametrize("n_flipped", [0, 2])
def test_a_store_in_which_nothing_could_rot_proves_nothing(
    target: InventoryTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_flipped: int
) -> None:
    """Of several boards, one may well have nothing."""
    ansible_lists(LISTED, tmp_path, monkeypatch)
    target._plays[0] = Played()  # type: ignore[assignment]
    for host, n_flipped_there in (("board1", 0), ("board2", n_flipped)):
        (target.journal.work / f"strike-0.{host}").write_text(json.dumps({"at": 0.0, "n_flipped": n_flipped_there}))
    if n_flipped:
        target.inject(0, Disturbance.STORE_ROTTEN, (STORE,))
    else:
        with pytest.raises(DrillImpossible, match="no new snapshot"):
            target.inject(0, Disturbance.STORE_ROTTEN, (STORE,))
