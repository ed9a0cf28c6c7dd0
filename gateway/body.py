"""Reading a request's body: bounded, and every problem of it in one sentence."""

from __future__ import annotations

from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from kvferry.gateway.errors import ApiError, invalid

MAX_BODY_BYTES: Final = 48 << 20
"""Base64 of what one turn may carry (32 MiB), and some text."""

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body as a value. Raises ApiError."""
    raw = bytearray()
    try:
        async for piece in request.stream():
            raw += piece
            if len(raw) > MAX_BODY_BYTES:
                raise ApiError(413, f"a request may have {MAX_BODY_BYTES >> 20} MiB at most", code="request_too_large")
    except ClientDisconnect as error:
        raise ApiError(400, "the request ended before its body did", code="invalid_body") from error
    try:
        return kind.model_validate_json(bytes(raw))
    except ValidationError as error:
        raise _told(error) from error


def _told(error: ValidationError) -> ApiError:
    """The first problem as `param`, all of them in the sentence."""
    problems = []
    for problem in error.errors(include_url=False, include_input=False):
        where = _place(problem["loc"])
        problems.append((where, f"{where}: {problem['msg']}" if where else problem["msg"]))
    parameter = problems[0][0]
    sentences = dict.fromkeys(sentence for _, sentence in problems)
    return invalid("the request is not right: " + "; ".join(sentences), parameter, code="invalid_body")


def _place(location: tuple[int | str, ...]) -> str:
    """As a programmer writes it: messages[0].content."""
    place = ""
    for part in location:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    return place
