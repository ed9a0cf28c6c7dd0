"""A node whose model sees: turns with pictures, whose rows are kept, shared, saved and restored like any others."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import grpc
import numpy as np
import pytest
from PIL import Image

from kvferry.proto.status import CODE_KEY
from kvferry.proto.v1 import worker_pb2

from .running_node import RunningNode, running_node

IMAGE = 1019  # the model's image token
START, END = 1016, 1017
ROWS, COLS = 3, 5  # of a picture, in tokens; a token is 32 x 32 pixels
N_TEXT = 40

_numbers = count()


def picture(seed: int, rows: int = ROWS, cols: int = COLS) -> bytes:
    """A PNG file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * 32, cols * 32, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def prompt(
    *pictures: bytes, first: int | None = None, cols: int = COLS
) -> tuple[list[int], list[worker_pb2.PromptImage]]:
    """Tokens with these pictures among them, and the pictures as a coordinator sends them."""
    number = next(_numbers) if first is None else first
    ids = [200 + number, *range(10, 10 + N_TEXT)]
    images = []
    for data in pictures:
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.array(image)
        digest = hashlib.sha256(b"%d %d\n" % pixels.shape[:2] + pixels.tobytes()).digest()
        ids.append(START)
        images.append(
            worker_pb2.PromptImage(
                content_hash=digest, start=len(ids), grid_rows=2 * ROWS, grid_cols=2 * cols, pixels=data
            )
        )
        ids += [IMAGE] * (ROWS * cols) + [END]
    return [*ids, *range(60, 70)], images


@pytest.fixture(scope="module")
def model(chat_model: Callable[[str], Path]) -> Path:
    return chat_model("qwen3vlmoe_bf16")


@pytest.fixture(scope="module")
def shared_seeing(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningNode]:
    folder = tmp_path_factory.mktemp("seeing")
    with running_node(folder, model, "--store", str(folder / "store"), "--context", "1024") as node:
        yield node


@pytest.fixture
def seeing(shared_seeing: RunningNode) -> RunningNode:
    """A node with a store and nothing in memory."""
    shared_seeing.drop_all()
    return shared_seeing


def test_the_picture_decides_the_answer_and_nothing_of_another_one_is_shared(seeing: RunningNode) -> None:
    cat, dog = picture(1), picture(2)
    ids, with_cat = prompt(cat)
    _, with_dog = prompt(dog)
    n_before = with_cat[0].start
    seen = seeing.run_turn(ids, images=with_cat, session="cat")
    other = seeing.run_turn(ids, images=with_dog, session="dog")
    again = seeing.run_turn(ids, images=with_cat, session="again")
    assert seen.sources == (0, 0, len(ids))
    assert other.sources == (n_before, 0, len(ids) - n_before)
    assert again.sources == (len(ids), 0, 0)
    assert seen.tokens == again.tokens != other.tokens


def test_a_conversation_goes_on_behind_its_picture(seeing: RunningNode) -> None:
    """With its rows in memory, and computed anew in one go: the same tokens at the same places."""
    ids, images = prompt(picture(3))
    answer = seeing.run_turn(ids, images=images, end_token_ids=[], session="a")
    longer = [*ids, *answer.tokens, *range(100, 120)]
    more = seeing.run_turn(longer, images=images, end_token_ids=[], session="a")
    assert more.prefix.n_resident == len(ids) + len(answer.tokens) - 1
    seeing.drop_all()
    anew = seeing.run_turn(longer, images=images, end_token_ids=[], session="b", recompute=True)
    assert anew.sources == (0, 0, len(longer))
    assert anew.tokens == more.tokens


def test_a_turn_goes_on_from_the_middle_of_its_answer(seeing: RunningNode) -> None:
    """What a failover asks for."""
    ids, images = prompt(picture(4), picture(5))
    whole = seeing.run_turn(ids, images=images, end_token_ids=[], session="a", max_tokens=20)
    seeing.drop_all()
    rest = seeing.run_turn(
        [*ids, *whole.tokens[:7]], n_prompt_tokens=len(ids), images=images, end_token_ids=[], max_tokens=20,
        recompute=True,
    )  # fmt: skip
    assert rest.tokens == whole.tokens[7:]


def test_rows_come_back_from_the_store_for_this_picture_alone(seeing: RunningNode, model: Path, tmp_path: Path) -> None:
    """On another node, which never saw it: no pixels are needed for rows that are restored."""
    ids, images = prompt(picture(6))
    _, others = prompt(picture(7))
    first = seeing.run_turn(ids, images=images, session="a", end_token_ids=[])
    seeing.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id="a"), timeout=20)
    store = seeing.log_path.parent / "store"
    with running_node(tmp_path, model, "--store", str(store), "--context", "1024") as node:
        blind = [worker_pb2.PromptImage() for _ in images]
        for blank, image in zip(blind, images, strict=True):
            blank.CopyFrom(image)
            blank.ClearField("pixels")
        longer = [*ids, *first.tokens[:5]]
        back = node.run_turn(longer, n_prompt_tokens=len(ids), images=blind, end_token_ids=[], session="b")
        assert back.prefix.n_restored >= len(ids)
        assert back.tokens == first.tokens[5:]
        other = node.run_turn(ids, images=others, session="c")
        assert other.prefix.n_resident + other.prefix.n_restored == images[0].start
        restored = node.stub.RestoreSession(
            worker_pb2.RestoreSessionRequest(session_id="d", token_ids=ids, images=blind), timeout=20
        )
        assert restored.prefix.n_resident + restored.prefix.n_restored == len(ids)


def test_version_1_snapshots_stop_before_the_picture(model: Path, tmp_path: Path) -> None:
    flags = ("--store", str(tmp_path / "store"), "--store-version", "1", "--context", "1024")
    with running_node(tmp_path, model, *flags) as node:
        ids, images = prompt(picture(8), first=0)
        node.run_turn(ids, images=images, session="a")
        with pytest.raises(grpc.RpcError, match="version 1 snapshots cannot say what its images show"):
            node.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id="a"), timeout=20)
        assert not list((tmp_path / "store").rglob("*.kv"))
        text, _ = prompt(first=1)
        node.run_turn(text, session="text")
        node.wait_for("load.snapshots_published == 1")


def test_what_is_no_picture_of_the_prompt_is_refused(seeing: RunningNode) -> None:
    ids, images = prompt(picture(9))

    def code(**changes: object) -> str:
        message = worker_pb2.PromptImage()
        message.CopyFrom(images[0])
        for field, value in changes.items():
            setattr(message, field, value)
        with pytest.raises(grpc.RpcError) as caught:
            seeing.run_turn(ids, images=[message])
        return dict(caught.value.trailing_metadata())[CODE_KEY]

    assert code(start=3) == "invalid_request"
    assert code(grid_rows=5) == "invalid_request"
    assert code(grid_cols=0) == "invalid_request"
    assert code(grid_rows=200, grid_cols=2_000_000_000) == "invalid_request"
    assert code(content_hash=b"short") == "invalid_request"
    assert code(pixels=b"no picture") == "invalid_image"
    assert code(pixels=picture(10)) == "invalid_image"
    assert code(pixels=picture(9, ROWS, COLS + 1)) == "invalid_image"
    assert code(pixels=b"") == "invalid_image"
    assert seeing.run_turn(ids, images=images).tokens  # and nothing is lost


def test_a_model_that_does_not_see_says_so(node: RunningNode) -> None:
    ids, images = prompt(picture(11))
    with pytest.raises(grpc.RpcError, match="no vision tower") as caught:
        node.run_turn(ids, images=images)
    assert dict(caught.value.trailing_metadata())[CODE_KEY] == "no_vision"


def test_a_large_picture_beside_another_turn(seeing: RunningNode) -> None:
    ids, images = prompt(picture(12, ROWS, 80), cols=80)
    text, _ = prompt()
    with_picture = seeing.start_turn(ids, images=images, session="a", end_token_ids=[])
    beside = seeing.run_turn(text, session="b", end_token_ids=[], max_tokens=4)
    assert [response.WhichOneof("event") for response in with_picture][-1] == "finished"
    assert beside.tokens == seeing.run_turn(text, session="c", end_token_ids=[], max_tokens=4).tokens
