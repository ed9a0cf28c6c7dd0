"""What can go wrong for a program that uses kvferry: one class per `kvferry-code`, under a few that say what to do.

Every error that leaves the SDK is one of these; gRPC's own never do (`map_rpc_error` is the border).
"""

from __future__ import annotations

from typing import ClassVar

import grpc

from kvferry.proto.channel import MAX_MESSAGE_BYTES
from kvferry.proto.status import CODE_KEY, RETRY_AFTER_KEY


class ClientError(Exception):
    """Base of all errors of the client; str(error) is one sentence for a person."""

    code: str = "client_error"  # of the class; of the instance where the server knows a code that this client does not
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadRequest(ClientError):
    """The caller asked for something that cannot be; asking again will not help."""

    code = "bad_request"


class EmptyPrompt(BadRequest):
    code = "empty_prompt"


class InvalidImage(BadRequest):
    """An image that cannot be read, is damaged, of another kind than the supported ones, or beyond the limits."""

    code = "invalid_image"


class NoVision(BadRequest):
    """Images for a model that takes none."""

    code = "no_vision"


class ImagesTooLarge(BadRequest):
    """More images than one conversation may have."""

    code = "images_too_large"


class InvalidMessage(BadRequest):
    code = "invalid_message"


class InvalidName(BadRequest):
    code = "invalid_name"


class InvalidSampling(BadRequest):
    code = "invalid_sampling"


class InvalidRequest(BadRequest):
    code = "invalid_request"


class InvalidTools(BadRequest):
    """Tools, or calls of them, that cannot be told to the model or followed."""

    code = "invalid_tools"


class InvalidFormat(BadRequest):
    """A form for the answer that cannot be understood."""

    code = "invalid_format"


class FormatTooComplex(BadRequest):
    """A form for the answer that would take too much time to follow."""

    code = "format_too_complex"


class InvalidAddress(BadRequest):
    """Not HOST:PORT."""

    code = "invalid_address"


class InvalidCredentials(BadRequest):
    """A certificate or an API token that cannot be used, or that would go where it must not."""

    code = "invalid_credentials"


class RequestTooLarge(BadRequest):
    """More bytes than one message may have; longer conversations are made of several turns."""

    code = "request_too_large"


class PromptTooLong(BadRequest):
    code = "prompt_too_long"


class InvalidImport(BadRequest):
    """What is to be imported is no session that was exported."""

    code = "invalid_import"


class IndexOutOfRange(BadRequest):
    code = "index_out_of_range"


class NotFound(ClientError):
    """The caller named something that is not there."""

    code = "not_found"


class UnknownModel(NotFound):
    code = "unknown_model"


class UnknownSession(NotFound):
    code = "unknown_session"


class UnknownTurn(NotFound):
    code = "unknown_turn"


class Conflict(ClientError):
    """It is there already, or not in a state that allows this."""

    code = "conflict"


class SessionExists(Conflict):
    code = "session_exists"


class TurnExists(Conflict):
    code = "turn_exists"


class SessionBusy(Conflict):
    code = "session_busy"


class ModelMismatch(Conflict):
    code = "model_mismatch"


class Refused(ClientError):
    """Not for this caller; asking again will not help."""

    code = "refused"


class Unauthenticated(Refused):
    """No certificate or API token, or one that is not valid (any more)."""

    code = "unauthenticated"


class PermissionDenied(Refused):
    """It is known who asks, and he may not."""

    code = "permission_denied"


class NotNow(ClientError):
    """It may work later: `retry_after_s` says when, if the other side knows. The SDK has already tried for long."""

    code = "not_now"


class Unavailable(NotNow):
    """The coordinator cannot be reached, or cannot serve at the moment."""

    code = "unavailable"


class NoNode(Unavailable):
    code = "no_node"


class Draining(Unavailable):
    code = "draining"


class Starting(Unavailable):
    code = "starting"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class RegistryUnavailable(Unavailable):
    code = "registry_unavailable"


class PlacementsExhausted(Unavailable):
    code = "placements_exhausted"


class Overloaded(NotNow):
    """A limit was reached that other work will free."""

    code = "overloaded"


class QueueFull(Overloaded):
    code = "queue_full"


class LimitReached(Overloaded):
    """A limit of the caller's own: he is told at once, since only he can ask for less."""

    code = "limit_reached"


class RateLimited(LimitReached):
    """So many requests a minute."""

    code = "rate_limited"


class TooManyTurns(LimitReached):
    """So many turns at once."""

    code = "too_many_turns"


class OutOfKvMemory(Overloaded):
    code = "out_of_kv_memory"


class SlowClient(Overloaded):
    """The stream was cut because its reader fell too far behind; resuming it loses nothing."""

    code = "slow_client"


class ServerFault(ClientError):
    """The other side failed in a way it did not foresee."""

    code = "internal"


class TurnFailed(ClientError):
    """The turn ended with an error (`turn_code`); its session is intact."""

    code = "turn_failed"

    def __init__(self, message: str, *, turn_code: str) -> None:
        super().__init__(message)
        self.turn_code = turn_code


class BrokenSequence(ClientError):
    """A token is missing, came twice, or belongs to another turn: the stream's promise is broken, so it ends here."""

    code = "broken_sequence"

    def __init__(self, message: str, *, expected: int, received: int) -> None:
        super().__init__(message)
        self.expected = expected
        self.received = received


def _leaves(base: type[ClientError]) -> dict[str, type[ClientError]]:
    found = {base.code: base}
    for child in base.__subclasses__():
        found |= _leaves(child)
    return found


CLASS_OF: dict[str, type[ClientError]] = {
    code: cls for code, cls in _leaves(ClientError).items() if cls not in (TurnFailed, BrokenSequence)
}
"""The class of every `kvferry-code` that the SDK knows."""

_CLASS_OF_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.OUT_OF_RANGE: BadRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: Conflict,
    grpc.StatusCode.FAILED_PRECONDITION: Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,  # we did not cancel: the other side is shutting down
}
"""For a code newer than this client, and for errors that gRPC itself makes."""


def map_rpc_error(error: grpc.aio.AioRpcError, address: str) -> ClientError:
    """The typed error of a failed call to the coordinator at `address`."""
    metadata = {key: value for key, value in (error.trailing_metadata() or ()) if isinstance(value, str)}
    code = metadata.get(CODE_KEY)
    sentence = error.details() or "no reason given"
    if code is None and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        reason = _reason_of(sentence)
        advice = "are --tls-dir and the address right?" if _is_about_tls(sentence) else "is it running?"
        sentence = f"cannot reach the coordinator at {address} ({reason}); {advice}"
    elif code is None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        sentence = f"the coordinator at {address} did not answer in time"
    elif code is None and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in sentence:
        code = RequestTooLarge.code  # gRPC's own words, at either end
        sentence = f"a message to or from {address} would have more than the {MAX_MESSAGE_BYTES >> 20} MiB it may have"
    elif code is None and error.code() is grpc.StatusCode.UNIMPLEMENTED:
        sentence = f"{address} is no kvferry coordinator, or an older one ({sentence})"
    cls = CLASS_OF.get(code or "") or _CLASS_OF_STATUS.get(error.code(), ServerFault)
    mapped = cls(sentence, retry_after_s=_seconds(metadata.get(RETRY_AFTER_KEY)))
    mapped.code = code or cls.code
    return mapped


def _is_about_tls(sentence: str) -> bool:
    """Who speaks plaintext to a server that wants certificates, or shows the wrong ones, is cut off without a word."""
    return any(words in sentence for words in ("Socket closed", "andshake", "erification"))


def _reason_of(sentence: str) -> str:
    """The system's own words: gRPC puts the address before them, twice, and brackets around them."""
    reason = sentence.rsplit(": ", 1)[-1].lower().strip()
    for opening, closing in ("[]", "()", "{}"):
        if reason.count(closing) > reason.count(opening):
            reason = reason.replace(closing, "")
        if reason.count(opening) > reason.count(closing):
            reason = reason.replace(opening, "")
    reason = reason.strip(" ,;.")
    if reason == "ok":  # the last word of OpenSSL's, which found nothing wrong with the system
        return "the TLS handshake failed"
    return reason or "no reason given"


def _seconds(milliseconds: str | None) -> float | None:
    if milliseconds is None or not milliseconds.isascii() or not milliseconds.isdigit():
        return None
    return int(milliseconds) / 1000


def is_worth_retrying(error: Exception) -> bool:
    """Whether the same call may succeed later without anybody changing it."""
    return (
        isinstance(error, NotNow)
        and not isinstance(error, LimitReached)
        and (isinstance(error, Unavailable | SlowClient) or error.retry_after_s is not None)
    )
