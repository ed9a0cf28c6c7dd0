"""Serving HTTPS, with certificates that are read again when they change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.gateway.errors import ConfigInvalid
from kvferry.trust.files import Stamp, stamp_of
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
        self.give_to(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def give_to(self, context: ssl.SSLContext) -> None:
        """What lies in the files at this moment; a pair that does not fit leaves the context as it was.

        Raises ConfigInvalid.
        """
        try:
            with _in_memory(self.certificate) as certificate, _in_memory(self.key) as key:
                # by itself first: a pair that does not fit would leave the context without any
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
                context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigInvalid(f"HTTPS cannot be served with {self.certificate} and {self.key}: {reason}") from error

    async def follow(self, context: ssl.SSLContext) -> None:
        """For ever: new connections get what lies in the files, from now on."""
        files = (self.certificate, self.key)
        stamp: Stamp = ()  # whatever was loaded at the start, they may have been replaced since
        while True:
            if (now := stamp_of(*files)) != stamp:  # of before they are read: a change in between is the next look's
                is_first, stamp = not stamp, now
                try:
                    self.give_to(context)
                except ConfigInvalid as error:
                    log.warning("the certificate for HTTPS stays as it was: %s", error)
                else:
                    if not is_first:
                        log.info("the certificate for HTTPS was read again")
            await asyncio.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def _in_memory(path: Path) -> Iterator[str]:
    """A file as it is now, by a path: what is checked is then what is used, however often it is replaced meanwhile."""
    descriptor = os.memfd_create("kvferry-https")
    with os.fdopen(descriptor, "wb") as copy:
        copy.write(path.read_bytes())
        copy.flush()
        yield f"/proc/self/fd/{descriptor}"
