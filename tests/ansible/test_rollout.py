"""A rollout as an operator does it: over ssh, onto four boards without internet, with people talking to the fleet.

The tests are one story, told in order; each leaves the fleet serving. About fifteen minutes on an idle machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import platformdirs
import pytest

from kvferry.engine.files.resolve import resolve_model

from . import boards
from .fleet import ANSIBLE, COORDINATOR, NODES, Answer, Fleet, Run, ansible_playbook, answer_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ALL_LIVE: Final = [f"n{board}" for board in NODES]
STORY: Final = "Tell me a long story about a ferry that carries letters between four islands."
N_TOKENS: Final = 96


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that nobody edits it during the test."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ANSIBLE.parent / name, folder / name)
    rooms = ANSIBLE.parent / "src/kvferry"
    shutil.copytree(rooms, folder / "src/kvferry", symlinks=True)
    for room in rooms.iterdir():
        shutil.copytree(room.resolve(), folder / room.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def fleet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Four boards that are up and have nothing on them."""
    reason = boards.why_not() or (None if ansible_playbook() else "ansible-playbook is not installed")
    if reason:
        pytest.skip(reason)
    cache = platformdirs.user_cache_path("kvferry")
    base = boards.base_root(cache / "test-boards")
    folder = tmp_path_factory.mktemp("rig") / "rig"
    n_boards = 1 + len(NODES)
    with boards.Rig.make(folder, n_boards, base, shared_at="/srv/kvferry/store", memory_bytes=2 << 30) as rig:
        for board in rig.boards:
            rig.start(board)
        for board in rig.boards:
            rig.wait_until_up(board)
        yield Fleet(rig, source, tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def first_run(fleet: Fleet) -> Run:
    return fleet.play("site.yml", kvferry_model=str(resolve_model("smollm2-135m")))


@pytest.fixture(scope="module", autouse=True)
def _rolled_out(first_run: Run) -> None:
    assert first_run.returncode == 0, first_run.output[-4000:]


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> Answer:
    """The same question on a fleet that nothing happens to."""
    answer = answer_of(fleet.chat(STORY, N_TOKENS))
    assert len(answer.nodes) == 1
    return answer


def release_on(fleet: Fleet, board: int) -> str:
    return fleet.rig.ssh(board, "basename $(readlink /opt/kvferry/current)").stdout.strip()


def test_one_command_makes_a_fleet_that_serves(fleet: Fleet) -> None:
    assert fleet.live() == ALL_LIVE
    assert all(node["store_ok"] for node in fleet.status()["nodes"])


def test_boards_have_no_way_out(fleet: Fleet) -> None:
    assert fleet.rig.ssh(NODES[0], "ip route").stdout.splitlines() == [
        f"10.77.0.0/24 dev eth0 proto kernel scope link src {fleet.rig.address(NODES[0])} "
    ]


def test_services_run_as_one_user_with_the_same_numbers_everywhere(fleet: Fleet) -> None:
    for board, unit in [(COORDINATOR, "kvferry-coordinator"), *((board, "kvferry-node") for board in NODES)]:
        ask = f"stat -c '%u:%g' /proc/$(systemctl show --property=MainPID --value {unit}); id -u kvferry"
        assert fleet.rig.ssh(board, ask).stdout.split() == ["7070:7070", "7070"]


def test_services_listen_on_the_fleet_address_only(fleet: Fleet) -> None:
    shown = fleet.rig.ssh(NODES[0], "ss --no-header --listening --tcp --numeric | awk '{print $4}'").stdout
    listening = shown.replace("[::ffff:", "").replace("]:", ":").split()  # gRPC binds IPv4 by its IPv6 name
    assert [address for address in listening if not address.endswith(":22")] == [f"{fleet.rig.address(NODES[0])}:7071"]


@pytest.mark.parametrize("unit", ["kvferry-node", "kvferry-coordinator"])
def test_a_running_service_is_exposed_to_little(fleet: Fleet, unit: str) -> None:
    board = COORDINATOR if unit == "kvferry-coordinator" else NODES[0]
    done = fleet.rig.ssh(board, f"systemd-analyze security --no-pager --threshold=25 {unit}", check=False)
    assert done.returncode == 0, done.stdout


def test_kernels_were_compiled_before_the_node_started(fleet: Fleet) -> None:
    log = fleet.rig.ssh(NODES[0], "journalctl -o cat -u 'kvferry-warm-up@*' -u kvferry-node").stdout.splitlines()
    finished = next(i for i, line in enumerate(log) if line.startswith("Finished kvferry-warm-up@"))
    assert finished < next(i for i, line in enumerate(log) if line.startswith("Starting kvferry-node"))


def test_a_second_run_changes_nothing(fleet: Fleet) -> None:
    run = fleet.play("site.yml", kvferry_model=str(resolve_model("smollm2-135m")))
    assert run.returncode == 0, run.output[-4000:]
    assert run.changed == {"c1": 0, "n2": 0, "n3": 0, "n4": 0}


def test_a_conversation_through_it(fleet: Fleet) -> None:
    turns = answer_of(fleet.chat("What is a ferry?", 16, "--message", "And what does it carry?"))
    ends = [event for event in turns.events if event["event"] == "finished"]
    assert [end["n_answer_tokens"] for end in ends] == [16, 16]
    second = [event["prefix"] for event in turns.events if event["event"] == "placed" and event["prefix"]][-1]
    assert second["n_resident"] + second["n_restored"] > second["n_computed"]


def test_an_answer_outlives_the_power_cut_of_its_board(fleet: Fleet, undisturbed: Answer) -> None:
    turn = fleet.chat(STORY, N_TOKENS)
    assert turn.stdout is not None
    events = []
    for line in turn.stdout:
        events.append(json.loads(line))
        if len(Answer(events).token_ids) == 20:
            break
    board = int(Answer(events).nodes[-1].removeprefix("n"))
    fleet.rig.power_cut(board)
    try:
        answer = Answer(events + answer_of(turn).events)
        assert answer.sequence == list(range(len(undisturbed.token_ids)))
        assert answer.token_ids == undisturbed.token_ids
        assert f"n{board}" in answer.nodes
        assert len(answer.nodes) == 2
        fleet.wait_until_live([name for name in ALL_LIVE if name != f"n{board}"], 20)
    finally:
        fleet.rig.start(board)
    fleet.rig.wait_until_up(board)
    fleet.wait_until_live(ALL_LIVE, 120)  # it came back by itself


class Talker(threading.Thread):
    """Asks the same question again and again, and keeps the answers."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(name="talker")
        self._fleet = fleet
        self._enough = threading.Event()
        self.answers: list[Answer] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._enough.is_set():
                self.answers.append(answer_of(self._fleet.chat(STORY, N_TOKENS)))
        except BaseException as error:  # noqa: BLE001 - carried to the test
            self.failure = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self.join()

    def judge(self, undisturbed: Answer) -> None:
        assert self.failure is None, self.failure
        assert self.answers
        for answer in self.answers:
            assert answer.sequence == list(range(len(undisturbed.token_ids)))
            assert answer.token_ids == undisturbed.token_ids


def set_version(source: Path, version: str) -> None:
    path = source / "pyproject.toml"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(f'version = "{version}"' if line.startswith("version = ") else line for line in lines))


def test_an_upgrade_under_a_conversation_loses_no_token(fleet: Fleet, source: Path, undisturbed: Answer) -> None:
    before = release_on(fleet, NODES[0])
    set_version(source, "0.1.1")
    with Talker(fleet) as talker:
        run = fleet.play("rollout.yml", kvferry_model=str(resolve_model("smollm2-135m")))
    assert run.returncode == 0, run.output[-4000:]
    talker.judge(undisturbed)
    assert {release_on(fleet, board) for board in fleet.rig.boards} == {release_on(fleet, COORDINATOR)}
    assert release_on(fleet, COORDINATOR).startswith("0.1.1-")
    assert release_on(fleet, COORDINATOR) != before
    assert fleet.live() == ALL_LIVE


def test_a_build_that_cannot_start_never_touches_what_runs(fleet: Fleet, source: Path, undisturbed: Answer) -> None:
    before = {board: release_on(fleet, board) for board in fleet.rig.boards}
    broken = source / "node/loading.py"
    good = broken.read_text()
    broken.write_text(good + "\nraise RuntimeError('a deliberately broken build')\n")
    set_version(source, "0.1.2")
    run = fleet.play("rollout.yml", kvferry_model=str(resolve_model("smollm2-135m")))
    broken.write_text(good)
    assert run.returncode != 0
    assert {board: release_on(fleet, board) for board in fleet.rig.boards} == before
    assert fleet.live() == ALL_LIVE
    assert answer_of(fleet.chat(STORY, N_TOKENS)).token_ids == undisturbed.token_ids


def test_a_board_that_fails_stops_the_rollout_and_says_how_to_go_back(fleet: Fleet, source: Path) -> None:
    """Its settings are not right, which nothing before the start of the service notices."""
    before = release_on(fleet, NODES[0])
    set_version(source, "0.1.3")
    model = str(resolve_model("smollm2-135m"))
    run = fleet.play("rollout.yml", kvferry_model=model, node_store_max_bytes="a lot")
    assert run.returncode != 0
    assert f"program_release={before}" in run.output
    assert [release_on(fleet, board) for board in NODES[1:]] == [before, before]
    assert fleet.live() == ALL_LIVE[1:]

    repaired = fleet.play("site.yml", kvferry_model=model, program_release=before)
    assert repaired.returncode == 0, repaired.output[-4000:]
    assert fleet.live() == ALL_LIVE
    assert {release_on(fleet, board) for board in fleet.rig.boards} == {before}


def test_uninstall_leaves_the_data_and_nothing_else(fleet: Fleet) -> None:
    run = fleet.play("uninstall.yml")
    assert run.returncode == 0, run.output[-4000:]
    for board in fleet.rig.boards:
        assert (
            fleet.rig.ssh(
                board, "systemctl list-unit-files 'kvferry*' --no-legend; pgrep -u kvferry", check=False
            ).stdout
            == ""
        )
        assert fleet.rig.ssh(board, "ls -d /opt/kvferry /etc/kvferry /var/cache/kvferry", check=False).stdout == ""
        assert "models" in fleet.rig.ssh(board, "ls /var/lib/kvferry").stdout
    run = fleet.play("uninstall.yml", uninstall_data=True)
    assert run.returncode == 0, run.output[-4000:]
    for board in fleet.rig.boards:
        assert fleet.rig.ssh(board, "ls -d /var/lib/kvferry; getent passwd kvferry", check=False).stdout == ""
    snapshots = subprocess.run(
        ["find", fleet.rig.folder / "shared", "-name", "*.kv"], capture_output=True, text=True, check=True
    )
    assert snapshots.stdout  # everybody's
