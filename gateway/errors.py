"""What a caller of the HTTP API is told when something is wrong: OpenAI's shape, with the status that fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from kvferry.client.errors import (
    CLASS_OF,
    BadRequest,
    ClientError,
    Conflict,
    NotFound,
    NotNow,
    Overloaded,
    Refused,
    RequestTooLarge,
    ServerFault,
    TurnFailed,
    Unauthenticated,
)


class GatewayError(Exception):
    """Base of what keeps the gateway from starting; one sentence and an exit code."""

    code: ClassVar[str] = "gateway_error"
    exit_code: ClassVar[int] = 1


class CannotListen(GatewayError):
    """The port is taken, or the address is none of this machine's."""

    code = "cannot_listen"


class ConfigInvalid(GatewayError):
    """Settings that contradict each other or are out of bounds."""

    code = "config_invalid"


class ApiError(Exception):
    """One request is refused. `parameter`: the field of the request that is at fault, if one is. `allow`: the methods
    that the path has, where the request's is none of them."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        parameter: str | None = None,
        retry_after_s: float | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter, self.retry_after_s = status, code, parameter, retry_after_s
        self.allow = allow

    @property
    def kind(self) -> str:
        """OpenAI's `type`, by which its clients choose what to raise."""
        return _KIND_OF_STATUS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.parameter, "code": self.code},
        }

    def headers(self) -> dict[str, str]:
        """When to try again, where that can help (whole seconds, as HTTP has them, and milliseconds), or with what."""
        if self.allow:
            return {"allow": self.allow}
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(max(1, round(self.retry_after_s))),
            "retry-after-ms": str(round(self.retry_after_s * 1000)),
        }


_KIND_OF_STATUS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

OPENAI_CODES: Final = {
    "prompt_too_long": "context_length_exceeded",
    "unauthenticated": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
    "too_many_turns": "rate_limit_exceeded",
}
"""Codes that programs look for under another name than ours."""

_STATUS_OF: Final[dict[type[ClientError], int]] = {
    RequestTooLarge: 413,
    BadRequest: 400,
    Unauthenticated: 401,
    Refused: 403,
    NotFound: 404,
    Conflict: 409,
    Overloaded: 429,
    NotNow: 503,
}


def invalid(message: str, parameter: str | None, *, code: str = "invalid_value") -> ApiError:
    """The request cannot be right."""
    return ApiError(400, message, code=code, parameter=parameter)


def unsupported(parameter: str, why: str) -> ApiError:
    """The request may be right elsewhere; silence about it would be a wrong answer."""
    return ApiError(400, f"{parameter} is not supported: {why}", code="unsupported_parameter", parameter=parameter)


NO_FIELDS: Final[Mapping[str, str]] = {}


def fields_at_fault(prompt: str, form: str) -> Mapping[str, str]:
    """Which field of a request each of the coordinator's codes is about: the one with what the model reads, and the one
    that says of what form the answer has to be."""
    about_prompt = (
        "empty_prompt", "images_too_large", "invalid_image", "invalid_message", "no_vision", "prompt_too_long",
    )  # fmt: skip
    return dict.fromkeys(about_prompt, prompt) | {
        "invalid_tools": "tools", "invalid_format": form, "format_too_complex": form,
    }  # fmt: skip


def api_error_of(error: ClientError, fields: Mapping[str, str] = NO_FIELDS) -> ApiError:
    """What the coordinator refused, as HTTP. `fields`: see fields_at_fault."""
    # a turn that failed on the way is told as what is refused before it begins
    kind = CLASS_OF.get(error.turn_code, ServerFault) if isinstance(error, TurnFailed) else type(error)
    status = next((status for base, status in _STATUS_OF.items() if issubclass(kind, base)), 500)
    code = error.turn_code if isinstance(error, TurnFailed) else error.code
    return ApiError(
        status, str(error), code=OPENAI_CODES.get(code, code), parameter=fields.get(code),
        retry_after_s=error.retry_after_s,
    )  # fmt: skip
