"""How a client shows who it is: a certificate, an API token, or neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

from kvferry.client.errors import InvalidCredentials
from kvferry.trust.bearer import Secret, check_way, checked
from kvferry.trust.doors import open_folder
from kvferry.trust.errors import TrustError
from kvferry.trust.tls_folder import TlsFolder

TokenSource = Callable[[], Secret | None]
"""Asked for each call, in the task that makes it: a gateway has another token for each of its callers."""


@dataclass(frozen=True, slots=True)
class Access:
    """``tls_dir``: see docs/security.md; ``token``: None where the cluster wants none."""

    tls_dir: str | PathLike[str] | None = None
    token: str | Secret | TokenSource | None = None
    insecure_plaintext: bool = False

    def folder(self) -> TlsFolder | None:
        """None: plaintext. Raises InvalidCredentials."""
        try:
            return open_folder(None if self.tls_dir is None else Path(self.tls_dir))
        except TrustError as error:
            raise InvalidCredentials(str(error)) from error

    def token_for(self, addresses: str) -> TokenSource:
        """What to send to coordinators. Raises InvalidCredentials when it would cross a network in clear."""
        if self.token is None:
            return lambda: None
        try:
            check_way(addresses, has_tls=self.tls_dir is not None, is_allowed=self.insecure_plaintext)
            if callable(self.token):
                return self.token
            secret = checked(self.token, "the token") if isinstance(self.token, str) else self.token
        except TrustError as error:
            raise InvalidCredentials(str(error)) from error
        return lambda: secret


PLAIN: Final = Access()
