"""Pictures in messages: by the SDK, and from files at the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.client.errors import InvalidImage, InvalidRequest, NoVision
from kvferry.client.sdk import AsyncClient, Client, Image, Message
from kvferry.proto.v1 import chat_pb2

from .scripted_coordinator import Refuse, ScriptedCoordinator, finished, started, tokens
from .test_cli import kvferry

ANSWER = [started(), *tokens(0, 1), finished(1)]


def sent(coordinator: ScriptedCoordinator) -> list[list[tuple[str, list[tuple[bytes, int]]]]]:
    """Content and images of each message of each turn."""
    requests = [call for call in coordinator.calls if isinstance(call, chat_pb2.GenerateRequest)]
    return [[(m.content, [(i.data, i.at) for i in m.images]) for m in request.messages] for request in requests]


async def test_images_go_with_a_text_or_with_their_message(coordinator: ScriptedCoordinator):
    coordinator.scripts, coordinator.echo_turn_id = [ANSWER, ANSWER], True
    async with AsyncClient(f"127.0.0.1:{coordinator.port}") as client:
        session = client.session("s")
        await session.generate("What is it?", images=[b"one", Image(b"two", at=4)]).collect()
        await session.generate([Message("user", "And this?", (Image(b"three"),))]).collect()
        with pytest.raises(InvalidRequest, match="give each image to its own message"):
            session.generate([Message("user", "And this?")], images=[b"x"])
        with pytest.raises(InvalidRequest, match="it is the bytes of a file"):
            session.generate("And this?", images=[Image("a.png")])
        with pytest.raises(InvalidRequest, match="at cannot be -1"):
            session.generate("And this?", images=[Image(b"x", at=-1)])
    assert sent(coordinator) == [
        [("What is it?", [(b"one", 0), (b"two", 4)])],
        [("And this?", [(b"three", 0)])],
    ]


async def test_what_the_coordinator_says_of_a_picture_is_a_value(coordinator: ScriptedCoordinator):
    coordinator.scripts = [[Refuse("no_vision")]]
    async with AsyncClient(f"127.0.0.1:{coordinator.port}") as client:
        with pytest.raises(NoVision):
            await client.session("s").generate("What is it?", images=[b"one"]).collect()


def test_a_file_that_is_none_or_too_large_is_refused_before_anything_is_sent(tmp_path: Path):
    with pytest.raises(InvalidImage, match=r"nothing\.png cannot be read: no such file"):
        Image.read(tmp_path / "nothing.png")
    with pytest.raises(InvalidImage, match="is a directory"):
        Image.read(tmp_path)
    with pytest.raises(InvalidImage, match="more than 20 MiB"):
        Image.read("/dev/zero")
    with Client("127.0.0.1:1") as client:
        turn = client.session("s").generate(
            "two of the largest", images=[Image(bytes(15 << 20)), Image(bytes(15 << 20))]
        )
        assert turn.session_id == "s"


async def test_chat_shows_pictures_with_the_first_message_and_with_the_next(coordinator, tmp_path):
    env = {"KVFERRY_COORDINATOR": f"127.0.0.1:{coordinator.port}"}
    coordinator.scripts, coordinator.echo_turn_id = [ANSWER] * 5, True
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode())
    a, b, c = (str(tmp_path / name) for name in ("a", "b", "c"))
    code, _, err = await kvferry("chat", "--image", a, "--image", b, "-m", "these?", "-m", "more?", **env)
    assert code == 0, err
    code, _, err = await kvferry("chat", "--image", a, stdin=f"this?\nthen?\n/image {c}\nthat?\n", **env)
    assert code == 0, err
    assert sent(coordinator) == [
        [("these?", [(b"a", 0), (b"b", 0)])],
        [("more?", [])],
        [("this?", [(b"a", 0)])],
        [("then?", [])],
        [("that?", [(b"c", 0)])],
    ]


async def test_chat_says_which_picture_cannot_be_read(coordinator, tmp_path):
    env = {"KVFERRY_COORDINATOR": f"127.0.0.1:{coordinator.port}"}
    code, out, err = await kvferry("chat", "--image", str(tmp_path / "no.png"), "-m", "this?", **env)
    assert (code, out) == (1, "")
    assert err == f"error: The image {tmp_path}/no.png cannot be read: no such file or directory.\n"
    assert coordinator.calls == []
