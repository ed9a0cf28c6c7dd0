"""Who a call is from, for the code that answers it."""

from __future__ import annotations

import contextvars
import dataclasses
from typing import Final

from kvferry.trust.certificates import Identity
from kvferry.trust.tokens import Token


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """``identity``: of the certificate, None in plaintext; ``token``: None where none is needed."""

    identity: Identity | None = None
    token: Token | None = None

    @property
    def tenant(self) -> str | None:
        """The only tenant whose sessions it may touch; None: it may touch all."""
        return None if self.token is None else self.token.tenant


NOBODY: Final = Caller()

_caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("kvferry_caller", default=NOBODY)


def calling() -> Caller:
    """Of the call that is being answered."""
    return _caller.get()


def answer_to(caller: Caller) -> None:
    """From now on in this task."""
    _caller.set(caller)
