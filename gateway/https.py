"""Serving HTTPS, with certificates that are read again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.gateway.errors import ConfigInvalid
from kvferry.trust.files import stamp_of
from kvferry.trust.tls_folder import CERTIFICATE_FILE, KEY_FILE

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """A certificate, perhaps with those between it and its authority, and its key; both in PEM."""

    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, tls_dir: Path) -> CertificateFiles:
        """Those that the gateway shows the coordinator."""
        return cls(tls_dir / CERTIFICATE_FILE, tls_dir / KEY_FILE)

    def check(self) -> None:
        """Raises ConfigInvalid."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigInvalid(f"HTTPS cannot be served with {self.certificate} and {self.key}: {reason}") from error

    async def follow(self, context: ssl.SSLContext) -> None:
        """For ever: new connections get what lies in the files."""
        files = (self.certificate, self.key)
        stamp = stamp_of(*files)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if (now := stamp_of(*files)) == stamp:
                continue
            stamp = now
            try:
                self.check()  # a pair that does not fit would leave the context without any
                context.load_cert_chain(*files)
            except (ConfigInvalid, OSError) as error:
                log.warning("the certificate for HTTPS stays as it was: %s", error)
            else:
                log.info("the certificate for HTTPS was read again")
