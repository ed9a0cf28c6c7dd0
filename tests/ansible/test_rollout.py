"""A rollout as an operator does it: over ssh, onto four boards without internet, with people talking to the fleet.

The tests are one story, told in order; each leaves the fleet serving. Under ten minutes on an idle machine, 22 at a
load of 10; changing the release is a story of its own, test_rolling_upgrade.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, Self

import pytest

from kvferry.engine.files.resolve import resolve_model

from .fleet import ALL_LIVE, COORDINATOR, NODES, Answer, Fleet, Run, answer_of, begun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STORY: Final = "Tell me a long story about a ferry that carries letters between four islands."
N_TOKENS: Final = 96


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> Answer:
    """The same question on a fleet that nothing happens to."""
    answer = answer_of(fleet.chat(STORY, N_TOKENS))
    assert len(answer.nodes) == 1
    return answer


@pytest.fixture(scope="module", autouse=True)
def _rolled_out(first_run: Run) -> None:
    assert first_run.returncode == 0, first_run.output[-4000:]


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
    ours = [address for address in listening if not address.endswith(":22")]
    assert sorted(ours) == [f"{fleet.rig.address(NODES[0])}:{port}" for port in (7071, 7081)]


@pytest.mark.parametrize("unit", ["kvferry-node", "kvferry-coordinator", "kvferry-gateway"])
def test_a_running_service_is_exposed_to_little(fleet: Fleet, unit: str) -> None:
    board = NODES[0] if unit == "kvferry-node" else COORDINATOR
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


def test_programs_speak_to_it_with_the_token_that_the_rollout_made(fleet: Fleet) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    question = {"model": "smollm2-135m", "messages": messages, "max_tokens": 8, "temperature": 0}
    status, answer = fleet.openai(COORDINATOR, "/v1/chat/completions", question)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    status, refusal = fleet.openai(COORDINATOR, "/v1/chat/completions", question, token="kvf_made_up")  # noqa: S106 - nobody's
    assert (status, refusal["error"]["type"]) == (401, "authentication_error")


def test_who_has_no_certificate_is_told_nothing(fleet: Fleet) -> None:
    bare = fleet.rig.in_control([Path(sys.executable).with_name("kvferry"), "status", "--coordinator", fleet.address])
    assert subprocess.run(bare, capture_output=True, check=False, timeout=60).returncode != 0


def test_keys_stay_on_their_boards_where_nobody_else_reads_them(fleet: Fleet) -> None:
    controller = [path.read_text() for path in fleet.rig.folder.rglob("secrets/authority/**/*") if path.is_file()]
    for board, parts in {COORDINATOR: ("coordinator", "gateway", "operator"), NODES[0]: ("node",)}.items():
        for part in parts:
            key = fleet.rig.ssh(board, f"cat /etc/kvferry/tls/{part}/key.pem").stdout
            assert "PRIVATE KEY" in key
            assert not [text for text in controller if key.splitlines()[1] in text]
            modes = fleet.rig.ssh(board, f"cd /etc/kvferry/tls/{part} && stat -c '%a %U' . key.pem").stdout
            owner = "root" if part == "operator" else "kvferry"
            assert modes.splitlines() == [f"700 {owner}", f"600 {owner}"]


def test_a_conversation_through_it(fleet: Fleet) -> None:
    turns = answer_of(fleet.chat("What is a ferry?", 16, "--message", "And what does it carry?"))
    ends = [event for event in turns.events if event["event"] == "finished"]
    assert [end["n_answer_tokens"] for end in ends] == [16, 16]
    second = [event["prefix"] for event in turns.events if event["event"] == "placed" and event["prefix"]][-1]
    assert second["n_resident"] + second["n_restored"] > second["n_computed"]


def test_an_answer_outlives_the_power_cut_of_its_board(fleet: Fleet, undisturbed: Answer) -> None:
    turn = fleet.chat(STORY, N_TOKENS)
    events = begun(turn, 20)
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


def serials_on(fleet: Fleet, board: int, part: str) -> tuple[str, str]:
    """Of the certificate in use, and when its service was started."""
    show = f"/opt/kvferry/current/bin/kvferry certs show --json /etc/kvferry/tls/{part}"
    started = f"systemctl show --property=ActiveEnterTimestampMonotonic kvferry-{part}"
    shown, _, since = fleet.rig.ssh(board, f"{show}; {started}").stdout.rpartition("ActiveEnter")
    return json.loads(shown)[0]["serial"], since


def test_certificates_are_renewed_under_a_conversation_and_nothing_starts_anew(
    fleet: Fleet, undisturbed: Answer
) -> None:
    services = [(COORDINATOR, "coordinator"), (COORDINATOR, "gateway"), *((board, "node") for board in NODES)]
    before = [serials_on(fleet, *service) for service in services]
    with Talker(fleet) as talker:
        run = fleet.play("certs.yml", certs_days=200)  # of which the 60 of the present ones are less than a third
    assert run.returncode == 0, run.output[-4000:]
    talker.judge(undisturbed)
    after = [serials_on(fleet, *service) for service in services]
    for (old_serial, old_start), (serial, start) in zip(before, after, strict=True):
        assert serial != old_serial
        assert start == old_start
    assert fleet.live() == ALL_LIVE


def test_a_revoked_board_is_out_until_it_gets_a_new_certificate(fleet: Fleet) -> None:
    run = fleet.play("certs.yml", certs_revoke="n2")
    assert run.returncode == 0, run.output[-4000:]
    fleet.wait_until_live(ALL_LIVE[1:], 30)
    run = fleet.play("certs.yml", certs_renew=True)
    assert run.returncode == 0, run.output[-4000:]
    fleet.wait_until_live(ALL_LIVE, 60)


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
