"""Pictures in a conversation: what is sent to nodes, what is kept for how long, and what is refused."""

from __future__ import annotations

import dataclasses
import io
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from cluster_kit import Client, Cluster, all_of, code_of, ids_of, until
from PIL import Image
from scripted_worker import Script, ScriptedWorker

from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.engine.vision.preprocess import content_hash
from kvferry.proto.v1 import chat_pb2

IMAGE, VISION_START, VISION_END = 1019, 1016, 1017
ANSWER = [300, 301, 302]


@pytest.fixture
def seeing(chat_model: Callable[[str], Path]) -> LoadedModel:
    return LoadedModel.load(str(chat_model("qwen3vlmoe_bf16")))


@pytest.fixture
async def cluster(new_cluster: Callable[..., Any], seeing: LoadedModel) -> Cluster:
    """With one node that sees."""
    cluster = await new_cluster(model=seeing)
    await cluster.worker("n1", Script(answer=ANSWER), sees_images=True)
    await cluster.client().until_nodes(1)
    return cluster


def picture(shade: int, width: int = 96, height: int = 64, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    pixels = np.full((height, width, 3), shade, np.uint8)
    pixels[0, 0] = 255 - shade
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def message(text: str, *images: bytes, role: str = "user", at: int = 0) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=role, content=text, images=[chat_pb2.Image(data=data, at=at) for data in images])


async def say(client: Client, session: str, *messages: chat_pb2.ChatMessage, **fields: Any) -> list[int]:
    return ids_of(await all_of(client.generate(session, messages=messages, **fields)))


def runs(token_ids: list[int]) -> list[tuple[int, int]]:
    """Start and length of each run of image tokens."""
    found: list[tuple[int, int]] = []
    for index, token in enumerate(token_ids):
        if token == IMAGE:
            if index and token_ids[index - 1] == IMAGE:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((index, 1))
    return found


async def test_the_node_gets_every_picture_of_the_session_where_its_tokens_are(cluster: Cluster) -> None:
    client, worker = cluster.client(), cluster.worker_named("n1")
    session = await client.new_session()
    small, wide = picture(10), picture(20, width=160)
    assert await say(client, session, message("What is this?", small)) == [*ANSWER, worker.requests[0].end_token_ids[0]]
    await say(client, session, message("And these?", wide, small, at=3))
    request = worker.requests[1]
    assert [(i.start, i.grid_rows * i.grid_cols // 4) for i in request.images] == runs(list(request.token_ids))
    assert [(i.grid_rows, i.grid_cols) for i in request.images] == [(4, 6), (4, 10), (4, 6)]
    assert all(request.token_ids[i.start - 1] == VISION_START for i in request.images)
    assert list(request.token_ids)[: len(worker.requests[0].token_ids)] == list(worker.requests[0].token_ids)
    first, second, again = request.images
    for image, sent in ((first, small), (second, wide)):
        pixels = np.array(Image.open(io.BytesIO(image.pixels)))
        assert np.array_equal(pixels, np.array(Image.open(io.BytesIO(sent))))
        assert content_hash(pixels) == image.content_hash
    assert (again.content_hash, again.pixels) == (first.content_hash, b"")  # once is enough


async def test_what_a_session_says_of_its_pictures(cluster: Cluster) -> None:
    client = cluster.client()
    session = await client.new_session()
    await say(client, session, message("be brief", role="system"), message("What is this?", picture(10), at=5))
    (turn,) = (await client.get(session)).turns
    assert [len(m.images) for m in turn.messages] == [0, 1]
    (image,) = turn.messages[1].images
    assert (image.data, image.at, image.width, image.height, image.n_tokens) == (b"", 5, 96, 64, 6)
    assert len(image.content_hash) == 64
    assert (await client.status()).sees_images


async def test_pictures_outlive_the_coordinator_and_go_with_the_last_session(cluster: Cluster, tmp_path: Path) -> None:
    """Kept once, however many sessions show it."""

    def n_kept() -> int:
        with closing(sqlite3.connect(tmp_path / "state0" / "registry.sqlite3")) as db:
            return int(db.execute("SELECT count(*) FROM pixels").fetchone()[0])

    client = cluster.client()
    one, other = await client.new_session(), await client.new_session()
    await say(client, one, message("What is this?", picture(10)))
    await say(client, other, message("And this?", picture(10), picture(30)))
    await client.stub.ForkSession(chat_pb2.ForkSessionRequest(session_id=one, new_session_id="fork"))
    assert n_kept() == 2
    await cluster.restart()
    await client.until_nodes(1)
    await client.stub.DeleteSession(chat_pb2.DeleteSessionRequest(session_id=one))
    await client.stub.DeleteSession(chat_pb2.DeleteSessionRequest(session_id=other))
    assert n_kept() == 1
    await say(client, "fork", message("Where is it?"))
    request = cluster.worker_named("n1").requests[-1]
    assert [(i.start, bool(i.pixels)) for i in request.images] == [(runs(list(request.token_ids))[0][0], True)]
    await client.stub.DeleteSession(chat_pb2.DeleteSessionRequest(session_id="fork"))
    assert n_kept() == 0


async def test_the_same_request_with_another_picture_is_another_turn(cluster: Cluster) -> None:
    client = cluster.client()
    session = await client.new_session()
    first = await say(client, session, message("What is this?", picture(10)), turn_id="t")
    assert await say(client, session, message("What is this?", picture(10)), turn_id="t") == first
    assert len(cluster.worker_named("n1").requests) == 1
    with pytest.raises(grpc.aio.AioRpcError, match="begun by another request"):
        await say(client, session, message("What is this?", picture(11)), turn_id="t")


async def refusal(client: Client, session: str, *messages: chat_pb2.ChatMessage) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await say(client, session, *messages)
    return code_of(caught.value), caught.value.details() or ""


def bomb() -> bytes:
    """A PNG of 60,000 x 60,000 pixels in some bytes."""
    file = bytearray(picture(0))
    file[16:24] = (60_000).to_bytes(4, "big") * 2
    file[29:33] = zlib.crc32(file[12:29]).to_bytes(4, "big")
    return bytes(file)


async def test_bad_pictures_are_one_clear_sentence_and_lose_nothing(cluster: Cluster) -> None:
    client = cluster.client()
    session = await client.new_session()
    await say(client, session, message("hello"))
    whole = picture(10)
    cases = [
        ((message("x", b"GIF89a"),), "invalid_image", "image 1 of 1: the image is not a file of the kinds"),
        ((message("x", whole, whole[:60]),), "invalid_image", "image 2 of 2: the image file is damaged"),
        ((message("x", b""),), "invalid_image", "is empty"),
        ((message("x", bomb()),), "invalid_image", "the limit of 64000000 pixels"),
        ((message("x", whole + bytes(20 << 20)),), "invalid_image", "more than the limit of 20971520"),
        ((message("x", picture(1, width=6600, height=32)),), "invalid_image", "200 times the other"),
        ((message("x", whole, at=2),), "invalid_message", "within its 1 characters"),
        ((message("y", whole, role="assistant"), message("x")), "invalid_message", "only a user's message has images"),
        ((message("x<|image_pad|>"),), "invalid_message", "0 images and 1 places"),
        ((message("x<|image_pad|>", whole),), "invalid_message", "1 images and 2 places"),
        ((message("x", *[whole] * 65),), "invalid_message", "at most 64"),
    ]
    for messages, code, sentence in cases:
        found = await refusal(client, session, *messages)
        assert (found[0], sentence in found[1]) == (code, True), found
    assert len((await client.get(session)).turns) == 1
    assert await say(client, session, message("", whole))  # a picture says enough


async def test_every_kind_of_file_turned_as_a_viewer_shows_it(cluster: Cluster) -> None:
    client = cluster.client()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    session = await client.new_session()
    files = [picture(10), picture(10, kind="WEBP", lossless=True), picture(10, kind="JPEG", exif=exif)]
    await say(client, session, message("What are these?", *files))
    images = cluster.worker_named("n1").requests[0].images
    assert [(i.grid_rows, i.grid_cols) for i in images] == [(4, 6), (4, 6), (6, 4)]
    assert images[0].content_hash == images[1].content_hash


async def test_a_large_picture_is_scaled_to_the_tokens_that_one_may_take(
    new_cluster: Callable[..., Any], chat_model: Callable[[str], Path]
) -> None:
    cluster = await new_cluster(model=LoadedModel.load(str(chat_model("qwen3vlmoe_bf16")), image_tokens=16))
    worker = await cluster.worker("n1", Script(answer=ANSWER), sees_images=True)
    client = cluster.client()
    await say(client, await client.new_session(), message("What is this?", picture(10, width=640, height=320)))
    assert runs(list(worker.requests[0].token_ids))[0][1] <= 16


async def test_a_session_has_so_many_bytes_of_pictures(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.coordinator.pictures.MAX_SESSION_BYTES", 20_000)
    client = cluster.client()
    session = await client.new_session()
    noise = [np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8) for i in range(2)]
    files = []
    for pixels in noise:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files.append(file.getvalue())
    await say(client, session, message("What is this?", files[0]))
    code, sentence = await refusal(client, session, message("And this?", files[1]))
    assert (code, "does not fit into the session" in sentence) == ("images_too_large", True)
    assert await say(client, session, message("The same?", files[0]))


async def test_a_model_or_a_fleet_that_does_not_see_says_so(
    new_cluster: Callable[..., Any], model: LoadedModel, seeing: LoadedModel
) -> None:
    blind = await new_cluster(model=model)
    client = blind.client()
    session = await client.new_session()
    code, sentence = await refusal(client, session, message("What is this?", picture(10)))
    assert (code, "takes no images" in sentence) == ("no_vision", True)
    assert not (await client.status()).sees_images
    half = await new_cluster(model=seeing)
    await half.worker("n1", Script(answer=ANSWER), sees_images=False)
    client = half.client()
    await client.until_nodes(1)
    session = await client.new_session()
    code, sentence = await refusal(client, session, message("What is this?", picture(10)))
    assert (code, "no node of this cluster has a vision tower" in sentence) == ("no_vision", True)
    assert await say(client, session, message("What then?"))


async def test_a_session_with_pictures_goes_to_nodes_that_see(cluster: Cluster) -> None:
    """Also with its later turns, which have none."""
    blind: ScriptedWorker = await cluster.worker("n0", Script(answer=ANSWER))
    client = cluster.client()
    await client.until_nodes(2)
    session = await client.new_session()
    await say(client, session, message("What is this?", picture(10)))
    await say(client, session, message("And where?"))
    assert [len(w.requests) for w in (blind, cluster.worker_named("n1"))] == [0, 2]


async def test_a_turn_with_a_picture_moves_on_and_outlives_its_coordinator(cluster: Cluster) -> None:
    client, worker = cluster.client(), cluster.worker_named("n1")
    session = await client.new_session()
    worker.script = dataclasses.replace(worker.script, answer=list(range(300, 320)), break_after=3, token_seconds=0.05)
    other = await cluster.worker("n2", Script(answer=list(range(300, 320)), token_seconds=0.05), sees_images=True)
    await client.until_nodes(2)
    events = client.generate(session, messages=[message("What is this?", picture(10))], max_tokens=30, turn_id="t")
    async for event in events:
        if event.HasField("token") and event.sequence >= 8:
            break
    await cluster.restart()
    await until(lambda: _finished(client, session))
    asked = [*worker.requests, *other.requests]
    assert len(asked) >= 3
    assert all(len(r.images) == 1 and r.images[0].pixels for r in asked)
    assert len({r.images[0].SerializeToString() for r in asked}) == 1


async def _finished(client: Client, session: str) -> bool:
    try:
        (turn,) = (await client.get(session)).turns
    except grpc.aio.AioRpcError:
        return False
    return turn.state == chat_pb2.TURN_STATE_FINISHED


async def test_routing_knows_two_pictures_apart(cluster: Cluster) -> None:
    """The node remembers one picture; with another one it has what stands before it."""
    client = cluster.client()
    for shade, n_shared in ((10, None), (10, "all"), (11, "before")):
        session = await client.new_session()
        events = await all_of(client.generate(session, messages=[message("What is this?", picture(shade))]))
        (placed,) = [e.placed for e in events if e.HasField("placed")]
        request = cluster.worker_named("n1").requests[-1]
        wanted = {None: 0, "all": len(request.token_ids) - 1, "before": request.images[0].start}[n_shared]
        assert placed.candidates[0].n_resident == wanted
