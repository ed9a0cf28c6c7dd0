"""Pictures on their way into a conversation: checked, brought to the size that the model sees, placed among the tokens.

What becomes durable is the scaled pixels, losslessly, by their hash: every node sees the same ones, whichever decoder
it has, and whoever takes the turn up needs nothing of the client.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvferry.coordinator.errors import ImagesTooLarge, InvalidMessage, NoVision
from kvferry.coordinator.registry import Picture, TokenArray
from kvferry.engine.config import VisionConfig
from kvferry.engine.errors import InvalidImage
from kvferry.engine.vision.positions import Grid
from kvferry.engine.vision.preprocess import content_hash, decode_image, grid_of, pack_pixels, scale
from kvferry.proto.v1 import chat_pb2
from kvferry.store.vlkv3 import ContentSpan

MAX_IMAGES: Final = 64
"""Of one turn: an album; each is decoded in turn while its client waits."""

MAX_SESSION_BYTES: Final = 24 << 20
"""Pixels of a session, packed: they travel to the node in one message, which may have 32 MiB."""


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """An image as a client sent it: before character ``at`` of message number ``message`` of the request."""

    message: int
    at: int
    data: bytes = dataclasses.field(repr=False)
    # SHA-256 of the file, in hex.
    digest: str

    @property
    def digest_part(self) -> str:
        """What the request's digest knows of it."""
        return f"\0image {self.message} {self.at} {self.digest}"


@dataclasses.dataclass(frozen=True, slots=True)
class Developed:
    """The same, scaled: ``png`` holds the pixels."""

    upload: Upload
    grid: Grid
    content_hash: str
    png: bytes = dataclasses.field(repr=False)


def uploads(messages: Sequence[chat_pb2.ChatMessage]) -> tuple[Upload, ...]:
    """The images of a request. Raises InvalidMessage, InvalidImage."""
    found = []
    for number, message in enumerate(messages):
        if message.images and message.role != "user":
            raise InvalidMessage(f"message {number + 1} has the role {message.role}: only a user's message has images")
        places = [image.at for image in message.images]
        if places != sorted(places) or any(place > len(message.content) for place in places):
            raise InvalidMessage(
                f"message {number + 1} has images at {places[:MAX_IMAGES]}: they stand in order, within its "
                f"{len(message.content)} characters"
            )
        for image in message.images:
            if not image.data:
                raise InvalidImage(f"an image of message {number + 1} is empty: send the bytes of a file")
            found.append(Upload(number, image.at, image.data, hashlib.sha256(image.data).hexdigest()))
    if len(found) > MAX_IMAGES:
        raise InvalidMessage(f"{len(found)} images in one request: at most {MAX_IMAGES} are allowed")
    return tuple(found)


def places_in(message: int, images: Iterable[Upload | Picture]) -> tuple[int, ...]:
    """Where the images of a message stand in its content."""
    return tuple(image.at for image in images if image.message == message)


def spans_of(pictures: Iterable[Picture]) -> tuple[ContentSpan, ...]:
    """What the rows of a session's tokens depend on beside the tokens."""
    return tuple(ContentSpan(p.start, p.n_tokens, bytes.fromhex(p.content_hash)) for p in pictures)


@dataclasses.dataclass(frozen=True, slots=True)
class PictureReader:
    """What the coordinator knows of a model's eyes; ``vision`` is None where it has none. Any thread may call it."""

    vision: VisionConfig | None
    model_name: str

    def develop(self, images: Sequence[Upload], known: Iterable[Picture]) -> list[Developed]:
        """Decode and scale, for a session that has the ``known`` ones. An image of the limits' size takes 256 MB.

        Raises NoVision, InvalidImage (which says the image's number), ImagesTooLarge.
        """
        if not images:
            return []
        if self.vision is None:
            raise NoVision(f"{self.model_name} takes no images: send text only, or ask a cluster whose model sees")
        sizes = {picture.content_hash: picture.n_bytes for picture in known}
        developed = []
        for number, upload in enumerate(images, start=1):
            try:
                pixels = scale(decode_image(upload.data), self.vision)
            except InvalidImage as error:
                raise InvalidImage(f"image {number} of {len(images)}: {error}") from error
            one = Developed(upload, grid_of(pixels, self.vision), content_hash(pixels).hex(), pack_pixels(pixels))
            developed.append(one)
            sizes[one.content_hash] = len(one.png)
            if sum(sizes.values()) > MAX_SESSION_BYTES:
                raise ImagesTooLarge(
                    f"image {number} of {len(images)} does not fit into the session: its images may have "
                    f"{MAX_SESSION_BYTES >> 20} MiB in all, scaled; begin a new session, or send fewer or smaller ones"
                )
        return developed

    def place(
        self, prompt_ids: TokenArray, images: Sequence[Developed], n_history: int
    ) -> tuple[TokenArray, tuple[Picture, ...]]:
        """A prompt with one image token for each image, int32 [n], becomes one with as many as the image has.

        Raises InvalidMessage when a text holds image tokens of its own.
        """
        vision = self.vision
        if vision is None:
            return prompt_ids, ()
        places = np.flatnonzero(prompt_ids == vision.image_token_id)
        if len(places) != len(images):
            raise InvalidMessage(
                f"the messages have {len(images)} images and {len(places)} places for one: the mark that stands for an "
                "image in the model's prompt must not be written in a text"
            )
        counts = np.ones(len(prompt_ids), np.int64)
        counts[places] = [image.grid.n_tokens(vision.merge_size) for image in images]
        starts = n_history + np.cumsum(counts) - counts
        pictures = (
            Picture(
                content_hash=image.content_hash,
                message=image.upload.message,
                at=image.upload.at,
                start=int(starts[place]),
                rows=image.grid.rows,
                cols=image.grid.cols,
                n_tokens=int(counts[place]),
                width=image.grid.cols * vision.patch_size,
                height=image.grid.rows * vision.patch_size,
                n_bytes=len(image.png),
            )
            for place, image in zip(places.tolist(), images, strict=True)
        )
        return np.repeat(prompt_ids, counts), tuple(pictures)
