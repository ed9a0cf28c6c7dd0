"""A conversation with pictures outlives its nodes, its coordinator and the power, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.client.errors import BadRequest
from kvferry.client.sdk import Client, ConnectionLost, Sampling
from kvferry.drills.cluster import LocalCluster
from kvferry.drills.conversation import TurnRequest, hold_turn

from .pictures import picture
from .rig import Control, options
from .tripped import Tripped

pytestmark = pytest.mark.alone  # a cluster of three nodes, and what it does within a lease

N_TOKENS = 500
KVFERRY = (sys.executable, "-m", "kvferry.client.cli")


@pytest.fixture(scope="module")
def nodes(chat_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tripped]:
    """Nodes with eyes."""
    folder = tmp_path_factory.mktemp("seeing")
    model = str(chat_model("qwen3vlmoe_bf16"))
    nodes = Tripped(options(model, folder, n_nodes=2, kv_memory="64MiB", context=2048))
    with nodes.cluster:
        yield nodes


@pytest.fixture(scope="module")
def seeing(nodes: Tripped) -> LocalCluster:
    """Their cluster."""
    return nodes.cluster


def turns(seed: int) -> list[TurnRequest]:
    """Three, whose pictures come alone, together, and not at all."""
    one, other = picture(seed), picture(seed + 1, 64, 128)
    sampled = Sampling(temperature=0.8, seed=seed)
    return [
        TurnRequest("What is this?", N_TOKENS, images=(one,)),
        TurnRequest("And these two?", N_TOKENS, sampled, images=(other, one)),
        TurnRequest("Which one is larger?", N_TOKENS, sampled),
    ]


def test_a_conversation_with_pictures_goes_on_whatever_dies(nodes: Tripped, seeing: LocalCluster) -> None:
    control, asked = Control(seeing), turns(10)
    control.conversation(asked)

    def restart(_node_id: str) -> None:
        seeing.kill_coordinator()
        meanwhile.submit(seeing.start_coordinator)

    with ThreadPoolExecutor(1) as meanwhile, Client(seeing.address) as client:
        session = client.create_session()
        logs = [hold_turn(session, asked[0], nodes.strike(2, seeing.kill_node))]
        assert len(logs[0].placements) == 2
        seeing.ensure_all_live()
        logs.append(hold_turn(session, asked[1], nodes.strike(2, restart)))
        assert any(isinstance(event, ConnectionLost) for _, event in logs[1].events)
        seeing.ensure_all_live()
        logs.append(hold_turn(session, asked[2]))
        control.assert_same(asked, [log.record for log in logs], session)


def test_after_a_power_cut_rows_of_pictures_come_from_the_store(seeing: LocalCluster) -> None:
    """And what was computed behind one picture is not taken for what stands behind another."""
    control, asked = Control(seeing), turns(20)
    control.conversation(asked)
    first = turns(30)[0]
    with Client(seeing.address) as client:
        session = client.create_session()
        records = [hold_turn(session, turn).record for turn in asked[:2]]
        n_tokens = len(session.details().token_ids)
        seeing.restart()  # in order: what is resident is saved
        log = hold_turn(session, asked[2])
        prefix = log.placements[-1].prefix
        assert prefix is not None
        assert prefix.n_restored >= n_tokens - 1
        control.assert_same(asked, [*records, log.record], session)
        other = hold_turn(client.create_session(), first)
        prefix = other.placements[-1].prefix
        assert prefix is not None
        assert prefix.n_resident + prefix.n_restored < 32  # the template's own words before the picture
        seeing.kill_all()
        seeing.ensure_all_live()
        again = hold_turn(client.create_session(), first)
        assert again.record == other.record


def test_chat_shows_a_picture_and_says_what_is_wrong_with_one(seeing: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(40))
    (tmp_path / "b.png").write_bytes(b"no picture at all")
    base = [*KVFERRY, "chat", "--coordinator", seeing.address, "--session", "seen", "--max-tokens", "8"]
    said = subprocess.run(
        [*base, "--image", str(tmp_path / "a.png"), "-m", "What is this?"], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    refused = subprocess.run(
        [*base, "--image", str(tmp_path / "b.png"), "-m", "And this?"], capture_output=True, text=True, check=False
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "error: image 1 of 1: the image is not a file of the kinds PNG, JPEG, WEBP" in refused.stderr
    show = [*KVFERRY, "sessions", "show", "seen", "--coordinator", seeing.address]
    shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert "160 x 96 pixels, 15 tokens, before character 0]" in shown
    told = json.loads(subprocess.run([*show, "--json"], capture_output=True, text=True, check=True).stdout)
    assert told["turns"][0]["messages"][0]["images"][0]["n_tokens"] == 15
    with Client(seeing.address) as client:
        details = client.session("seen").details()
        (image,) = details.turns[0].messages[0].images
        assert (len(details.turns), image.width, image.height, image.n_tokens) == (1, 160, 96, 15)
        with pytest.raises(BadRequest, match="damaged"):
            client.session("seen").generate("And this?", images=[picture(41)[:500]]).collect()
        assert client.status().sees_images
