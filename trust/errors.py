"""What can be wrong with certificates, tokens and addresses, each in one sentence that says what to do."""

from __future__ import annotations

from typing import ClassVar


class TrustError(Exception):
    """Base of the room's errors: something outside the program has to be put right first."""

    code: ClassVar[str] = "trust_error"
    exit_code: ClassVar[int] = 1


class AuthorityInvalid(TrustError):
    """The folder of the certificate authority is not there, damaged, or there already."""

    code = "authority_invalid"


class RequestInvalid(TrustError):
    """What was asked of the authority cannot be signed."""

    code = "request_invalid"


class ClockWrong(TrustError):
    """The machine's clock says a time at which nothing can be dated."""

    code = "clock_wrong"


class TlsFolderInvalid(TrustError):
    """The folder with a process's certificate and key cannot be used."""

    code = "tls_folder_invalid"


class TokensInvalid(TrustError):
    """The file with the hashes of API tokens, or a file with a token, cannot be used."""

    code = "tokens_invalid"


class PlaintextRefused(TrustError):
    """Everybody on the network could read and change what is said there."""

    code = "plaintext_refused"


class Refused(TrustError):
    """A call is not answered because of who asks. ``retry_after_ms``: when it may be."""

    code = "permission_denied"

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Unauthenticated(Refused):
    """Nobody knows who asks."""

    code = "unauthenticated"


class PermissionDenied(Refused):
    """It is known who asks, and he may not."""

    code = "permission_denied"


class RateLimited(Refused):
    """Too many requests in too short a time."""

    code = "rate_limited"


class TooManyTurns(Refused):
    """As many turns of this token are open as it may have."""

    code = "too_many_turns"
