"""The door of every server: who calls, and whether he may, before anything else is looked at."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from cryptography import x509

from kvferry.trust.bearer import AUTHORIZATION, BEARER
from kvferry.trust.caller import NOBODY, Caller
from kvferry.trust.certificates import Identity, identity_of
from kvferry.trust.clock import now_utc
from kvferry.trust.errors import PermissionDenied, RateLimited, Refused, Unauthenticated
from kvferry.trust.limits import Bucket
from kvferry.trust.roles import BEARERS, NEED_TOKEN, OWN_NAME, STARTS_TURN, may_call
from kvferry.trust.tls_folder import TlsFolder
from kvferry.trust.tokens import Token, TokenBook

log = logging.getLogger(__name__)

KINDS: Final = (Unauthenticated, PermissionDenied, RateLimited)

CALLS_PER_REQUEST: Final = 10
"""Calls that start no turn come in so many times the number: a chat program makes a session, looks, and forgets."""

TELL_SECONDS: Final = 60.0
"""Before the same refusal of the same caller is told again: somebody may knock ten times a second."""

MAX_REMEMBERED: Final = 1024
"""Refusals that were told, and buckets of tokens: more of them at once than a fleet of boards has callers."""


class Call(Protocol):
    """What the guard needs of a call that came in; gRPC's contexts have it."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...
    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...
    def peer(self) -> str: ...


class Guard:
    """One per server. ``folder`` None: plaintext, everybody is let in; ``tokens`` None: nobody needs one.

    Event loop only.
    """

    def __init__(
        self,
        folder: TlsFolder | None,
        tokens: TokenBook | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], dt.datetime] = now_utc,
    ) -> None:
        self._refused: Counter[str] = Counter({kind.code: 0 for kind in KINDS})
        self._folder, self._tokens = folder, tokens
        self._clock, self._wall = clock, wall
        self._buckets: OrderedDict[tuple[str, bool], Bucket] = OrderedDict()
        self._told: OrderedDict[tuple[str, str], float] = OrderedDict()

    @property
    def lets_all_in(self) -> bool:
        """There is nothing to check."""
        return self._folder is None and self._tokens is None

    def refusals(self) -> dict[str, float]:
        """How many calls were refused here, by code, since the start; from any thread."""
        return {code: float(n) for code, n in self._refused.items()}

    def admit(self, method: str, request: object, call: Call) -> Caller:
        """Who calls. Raises Refused, which is counted and told in the log."""
        try:
            identity = self._identity(call)
            if identity is not None:
                _check_role(identity, method)
                _check_own_name(identity, method, request)
            caller = Caller(identity, self._token(identity, method, call))
            self._check_rate(caller, method)
        except Refused as refused:
            self._tell(method, call.peer(), refused)
            raise
        return caller

    def check_still(self, caller: Caller) -> None:
        """For a stream that goes on: what was revoked meanwhile is refused. Raises Unauthenticated."""
        if caller is NOBODY:
            return
        if caller.identity is not None:
            self._check_valid(caller.identity)
        if caller.token is not None and self._tokens is not None:
            self._tokens.check(caller.token)

    def _identity(self, call: Call) -> Identity | None:
        """Of the certificate, whose signature the handshake has checked. None in plaintext."""
        if self._folder is None:
            return None
        pem = next(iter(call.auth_context().get("x509_pem_cert", ())), None)
        if pem is None:
            raise Unauthenticated("the caller has shown no certificate: give it a --tls-dir")
        identity = _read_identity(bytes(pem))
        self._check_valid(identity)
        return identity

    def _check_valid(self, identity: Identity) -> None:
        """Again for each call: a connection may be older than what it began with."""
        if self._folder is not None and identity.serial in self._folder.material().revoked:
            raise Unauthenticated(f"the certificate {identity.serial:x} of {identity} is revoked")
        if identity.not_after <= self._wall():
            raise Unauthenticated(
                f"the certificate of {identity} has expired on {identity.not_after:%Y-%m-%d}: renew it (kvferry certs)"
            )

    def _token(self, identity: Identity | None, method: str, call: Call) -> Token | None:
        if self._tokens is None or method not in NEED_TOKEN:
            return None
        if identity is not None and identity.role not in BEARERS:
            return None
        given = next((str(v) for k, v in call.invocation_metadata() or () if k.lower() == AUTHORIZATION), "")
        if not given:
            raise Unauthenticated("this cluster wants an API token: give it with --token-file, or as the API key")
        if not given.lower().startswith(BEARER.lower()):
            raise Unauthenticated("the authorization of a call is 'Bearer TOKEN', this one's is something else")
        return self._tokens.find(given[len(BEARER) :].strip())

    def _check_rate(self, caller: Caller, method: str) -> None:
        if caller.token is None or (per_minute := caller.token.requests_per_minute) is None:
            return
        starts_turn = method == STARTS_TURN
        key = (caller.token.id, starts_turn)
        per_minute = per_minute if starts_turn else per_minute * CALLS_PER_REQUEST
        bucket = self._buckets.get(key)
        if bucket is None or bucket.per_minute != per_minute:  # new, or its limit was changed
            bucket = self._buckets[key] = Bucket(per_minute, self._clock())
        self._buckets.move_to_end(key)
        while len(self._buckets) > MAX_REMEMBERED:
            self._buckets.popitem(last=False)
        if wait_s := bucket.take(self._clock()):
            what = "requests" if starts_turn else "calls beside them"
            raise RateLimited(
                f"the API token {caller.token.id} has its {per_minute} {what} of this minute: "
                f"ask again in {wait_s:.1f} s",
                retry_after_ms=int(wait_s * 1000) + 1,
            )

    def _tell(self, method: str, peer: str, refused: Refused) -> None:
        self._refused[refused.code] += 1
        now, key = self._clock(), (peer.rpartition(":")[0], str(refused))
        if now - self._told.get(key, -TELL_SECONDS) < TELL_SECONDS:
            return
        self._told[key] = now
        self._told.move_to_end(key)
        while len(self._told) > MAX_REMEMBERED:
            self._told.popitem(last=False)
        log.warning("refused a call of %s from %s: %s", method, peer, refused)


def _check_role(identity: Identity, method: str) -> None:
    if not may_call(identity.role, method):
        name = method.rpartition("/")[2]
        raise PermissionDenied(f"{name} is not for {identity}: a {identity.role} may not call it")


def _check_own_name(identity: Identity, method: str, request: object) -> None:
    if (field := OWN_NAME.get(method)) is not None and getattr(request, field, None) != identity.name:
        raise PermissionDenied(
            f"{identity} may speak for itself only, not as {getattr(request, field, None)!r}: its {field} has to be "
            "the name in its certificate"
        )


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _read_identity(pem: bytes) -> Identity:
    try:
        return identity_of(x509.load_pem_x509_certificate(pem))
    except ValueError as error:
        raise Unauthenticated(f"the caller's certificate was not made by kvferry certs: {error}") from error
