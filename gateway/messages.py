"""OpenAI's messages, and the parts they consist of, as the coordinator's."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from kvferry.client import Image, Message, ToolCall
from kvferry.gateway.body import Listed, NullIsNotGiven
from kvferry.gateway.errors import invalid, unsupported

ROLES: Final = {"developer": "system"}
"""Roles that are another one's new name."""

DATA_URL: Final = "data:image/"


class Part(NullIsNotGiven):
    """One piece of a message's content: a text, or an image as a data URL. The kinds of both APIs."""

    model_config = ConfigDict(extra="ignore")

    type: str
    text: str | None = None
    # {"url": ...} in chat completions, the URL itself in responses.
    image_url: dict[str, Any] | str | None = None
    refusal: str | None = None


class Function(NullIsNotGiven):
    """A function that the model wanted called; its arguments are JSON in a string."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str = "{}"


class Call(NullIsNotGiven):
    """A call in an assistant's message."""

    model_config = ConfigDict(extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(NullIsNotGiven):
    """A message as a program sends it. `reasoning_content`: an assistant's thinking, as this gateway tells it."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[Part] | None = None
    tool_calls: Listed[Call] | None = None
    tool_call_id: str = ""
    reasoning_content: str | None = None


def messages_of(messages: Annotated[Sequence[ChatMessage], Field(min_length=1)]) -> list[Message]:
    """All of them, in order. Raises ApiError that names the one at fault."""
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> Message:
    text, images = read_content(message.content, f"{where}.content")
    if images and message.role != "user":
        raise invalid(f"{where}: only a user's message may have images", f"{where}.content")
    return Message(
        role=ROLES.get(message.role, message.role),
        content=text,
        images=images,
        reasoning=message.reasoning_content,
        tool_calls=tuple(
            tool_call(call.id, call.function.name, call.function.arguments, f"{where}.tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id,
    )


def tool_call(call_id: str, name: str, arguments: str, where: str) -> ToolCall:
    """A call whose arguments are JSON in a string."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError as error:
        raise invalid(f"{where}: arguments is not JSON ({error})", where) from error
    except RecursionError as error:  # less is for the coordinator to judge
        raise invalid(f"{where}: arguments is nested too deeply", where) from error
    if not isinstance(parsed, dict):
        raise invalid(f"{where}: arguments must be a JSON object", where)
    return ToolCall(name, parsed, call_id)


def read_content(content: str | Iterable[Part] | None, where: str) -> tuple[str, tuple[Image, ...]]:
    """The text of all parts, and the images with the places where they stand in it."""
    if content is None or isinstance(content, str):
        return content or "", ()
    text, images = "", []
    for number, part in enumerate(content):
        match part.type:
            case "text" | "input_text" | "output_text":
                text += part.text or ""
            case "refusal":
                text += part.refusal or ""
            case "image_url" | "input_image":
                images.append(Image(_image_bytes(part.image_url, f"{where}[{number}]"), len(text)))
            case _:
                raise unsupported(f"{where}[{number}]", f"the model reads text and images, not {part.type}")
    return text, tuple(images)


def _image_bytes(image_url: dict[str, Any] | str | None, where: str) -> bytes:
    url = image_url.get("url") if isinstance(image_url, dict) else image_url
    if not isinstance(url, str) or not url.startswith(DATA_URL):
        raise invalid(
            f"{where}: the gateway fetches nothing from elsewhere; send the image as data:image/png;base64,...", where
        )
    header, comma, encoded = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise invalid(f"{where}: a data URL has ;base64, before its data", where)
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:  # binascii's own, and that of a character beyond ASCII
        raise invalid(f"{where}: the image's data is not base64 ({error})", where) from error
