"""The shape that outlives any one board: two coordinators, their conversations in etcd on three boards, two nodes.

The tests are one story, told in order. About five minutes on an idle machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from kvferry.engine.files.resolve import resolve_model

from .fleet import TWO_COORDINATORS, Answer, Fleet, answer_of, bare_boards, begun, copy_of_sources

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)"),
]

ALL_LIVE = ["n3", "n4"]
STORY = "Tell me a long story about a ferry that carries letters between four islands."
N_TOKENS = 96


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    source = copy_of_sources(tmp_path_factory.mktemp("source"))
    with bare_boards(TWO_COORDINATORS, source, tmp_path_factory.mktemp("rig")) as made:
        run = made.play("site.yml", kvferry_model=str(resolve_model("smollm2-135m")))
        assert run.returncode == 0, run.output[-4000:]
        yield made


def test_one_command_makes_a_fleet_that_serves(fleet: Fleet) -> None:
    assert fleet.live() == ALL_LIVE


def test_a_second_run_changes_nothing(fleet: Fleet) -> None:
    run = fleet.play("site.yml", kvferry_model=str(resolve_model("smollm2-135m")))
    assert run.returncode == 0, run.output[-4000:]
    assert run.changed == {"c1": 0, "c2": 0, "n3": 0, "n4": 0}


def test_the_registry_is_for_coordinators_only(fleet: Fleet) -> None:
    ask = (
        "curl --silent --max-time 5 --cacert {0}/ca.pem --cert {0}/cert.pem --key {0}/key.pem https://{1}:2379/version"
    )
    for part, is_let_in in (("coordinator", True), ("gateway", False), ("etcd", False)):
        folder, address = f"/etc/kvferry/tls/{part}", fleet.rig.address(1)
        # A board has no curl; the controller's machine sees its files and has one.
        keys = fleet.rig.folder / "keys" / part
        keys.mkdir(parents=True)
        for name in ("ca.pem", "cert.pem", "key.pem"):
            (keys / name).write_text(fleet.rig.ssh(1, f"cat {folder}/{name}").stdout)
        done = fleet.run_in_control(["sh", "-c", ask.format(keys, address)])
        assert (done.returncode == 0) == is_let_in, (part, done)


def test_an_answer_goes_on_when_its_coordinator_is_killed(fleet: Fleet) -> None:
    undisturbed = answer_of(fleet.chat(STORY, N_TOKENS))
    turn = fleet.chat(STORY, N_TOKENS)
    events = begun(turn, 20)
    for board in TWO_COORDINATORS.coordinators:  # whichever has the turn
        if f"{fleet.rig.address(board)}:7070" in fleet.connections_of(turn.pid):
            fleet.rig.ssh(board, "systemctl kill --signal=KILL kvferry-coordinator")
    answer = Answer(events + answer_of(turn).events)
    assert answer.sequence == list(range(len(undisturbed.token_ids)))
    assert answer.token_ids == undisturbed.token_ids
    fleet.wait_until_live(ALL_LIVE, 60)


def test_programs_are_served_at_either_address(fleet: Fleet) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    question = {"model": "smollm2-135m", "messages": messages, "max_tokens": 8, "temperature": 0}
    for board in TWO_COORDINATORS.coordinators:
        status, answer = fleet.openai(board, "/v1/chat/completions", question)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
