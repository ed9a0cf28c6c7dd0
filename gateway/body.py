"""Reading a request's body: bounded, and every problem of it in one sentence."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from kvferry.gateway.errors import NO_FIELDS, ApiError, invalid

MAX_BODY_BYTES: Final = 48 << 20
"""Base64 of what one turn may carry (32 MiB), and some text."""


FIELDS_AT_FAULT: Final = "fields_at_fault"
"""A body that has it says which of its fields each of the coordinator's refusals is about."""


class NullIsNotGiven(BaseModel):
    """A part of a request. OpenAI's schema lets nearly every field be null, and its clients send that for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


Element = TypeVar("Element")

Listed = Annotated[list[Element], Field(fail_fast=True)]
"""A list of a request, of which the first wrong element is told: a million of them would take half a minute."""

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
        body = kind.model_validate_json(bytes(raw))
    except ValidationError as error:
        raise _told(error, raw) from error
    setattr(request.state, FIELDS_AT_FAULT, getattr(body, FIELDS_AT_FAULT, NO_FIELDS))
    return body


def _told(error: ValidationError, raw: bytearray) -> ApiError:
    """The first problem as `param`, all of them in the sentence."""
    try:
        given = from_json(bytes(raw))
    except ValueError:
        given = None
    problems = []
    for problem in error.errors(include_url=False, include_input=False):
        where = _place(problem["loc"], given, is_missing=problem["type"] == "missing")
        problems.append((where, f"{where}: {problem['msg']}" if where else problem["msg"]))
    # where a field may be of several kinds, the one that comes closest to the fault is the likeliest meant
    first = problems[0][0]
    within = [where for where, _ in problems if where.startswith((f"{first}.", f"{first}["))]
    parameter = max(within, key=len, default=first) or None
    sentences = dict.fromkeys(sentence for _, sentence in problems)
    return invalid("the request is not right: " + "; ".join(sentences), parameter, code="invalid_body")


def _place(location: tuple[int | str, ...], given: Any, *, is_missing: bool) -> str:
    """As a programmer writes it: messages[0].content. Kinds among which a field has a choice are none of its parts."""
    place = ""
    for number, part in enumerate(location, start=1):
        if isinstance(part, int) and isinstance(given, list):
            place, given = f"{place}[{part}]", given[part]
        elif isinstance(given, dict) and (part in given or (is_missing and number == len(location))):
            place, given = f"{place}.{part}".removeprefix("."), given.get(part)
    return place
