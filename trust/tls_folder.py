"""A process's certificate, key, authorities and list of revoked certificates: a folder that is read again when it
changes, so that certificates rotate without a restart."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvferry.trust.certificates import Identity, identity_of, same_key
from kvferry.trust.errors import TlsFolderInvalid
from kvferry.trust.files import Stamp, reason_of, stamp_of

log = logging.getLogger(__name__)

CA_FILE: Final = "ca.pem"
CERTIFICATE_FILE: Final = "cert.pem"
KEY_FILE: Final = "key.pem"
REVOKED_FILE: Final = "revoked.pem"

LOOK_SECONDS: Final = 0.5
"""Between looks at the files: what was revoked is refused so soon after the list arrives. A look costs some 10 µs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """What the files said when they were read last. ``identity``: whose this is; ``revoked``: serials."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = dataclasses.field(repr=False)
    identity: Identity
    revoked: frozenset[int]


class TlsFolder:
    """Any thread may call. What cannot be used leaves what was read before in force, and is told in the log once."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises TlsFolderInvalid."""
        self.path = path
        self._files = [path / name for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE, REVOKED_FILE)]
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = clock()
        self._stamp: Stamp = stamp_of(*self._files)
        self._version = 0
        self._material = read_material(path)

    @property
    def version(self) -> int:
        """Grows whenever other material came into force."""
        self.material()
        return self._version

    def material(self) -> Material:
        """What is in force now."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= LOOK_SECONDS:
                self._looked_at = now
                self._look()
            return self._material

    def _look(self) -> None:
        stamp = stamp_of(*self._files)
        if stamp == self._stamp:
            return
        try:
            material = read_material(self.path)
        except TlsFolderInvalid as error:
            # A file that is being replaced, perhaps: the next change is looked at again.
            log.warning("the certificates in %s stay as they were: %s", self.path, error)
            self._stamp = stamp
            return
        self._stamp = stamp
        if material != self._material:
            self._material = material
            self._version += 1
            log.info(
                "certificates were read again: %s until %s, %d revoked",
                material.identity, material.identity.not_after.isoformat(timespec="minutes"), len(material.revoked),
            )  # fmt: skip


def read_material(folder: Path) -> Material:
    """All of it, as far as it fits together. Raises TlsFolderInvalid."""
    if not folder.is_dir():
        raise TlsFolderInvalid(f"there is no folder {folder} with certificates; make one with: kvferry certs issue")
    ca_pem, certificate_pem, key_pem = (_read(folder / name) for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE))
    authorities = read_certificates(folder / CA_FILE, ca_pem)
    certificate = read_certificates(folder / CERTIFICATE_FILE, certificate_pem)[0]
    try:
        identity = identity_of(certificate)
    except ValueError as error:
        raise TlsFolderInvalid(f"{folder / CERTIFICATE_FILE} was not made by kvferry certs: {error}") from error
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise TlsFolderInvalid(f"{folder / KEY_FILE} is no private key without a passphrase") from error
    if not same_key(certificate, key):
        raise TlsFolderInvalid(f"{folder / KEY_FILE} is not the key of {CERTIFICATE_FILE}: both have to be replaced")
    if not any(is_signed_by(certificate, authority) for authority in authorities):
        raise TlsFolderInvalid(f"no authority in {folder / CA_FILE} has signed {CERTIFICATE_FILE}")
    revoked = read_revoked(folder / REVOKED_FILE, authorities)
    return Material(ca_pem, certificate_pem, key_pem, identity, revoked)


def read_certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    """At least one. Raises TlsFolderInvalid."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise TlsFolderInvalid(f"{path} holds no certificate in PEM") from error


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the signature holds."""
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # noqa: BLE001 - several kinds, of which one means no and the others mean no as well
        return False
    return True


def read_revoked(path: Path, authorities: list[x509.Certificate]) -> frozenset[int]:
    """The serials of a list that one of the authorities signed; none when there is no list. Raises TlsFolderInvalid."""
    if not path.exists():
        return frozenset()
    try:
        revoked = x509.load_pem_x509_crl(_read(path))
    except ValueError as error:
        raise TlsFolderInvalid(f"{path} is no list of revoked certificates") from error
    keys = (authority.public_key() for authority in authorities)
    if not any(isinstance(key, ec.EllipticCurvePublicKey) and revoked.is_signature_valid(key) for key in keys):
        raise TlsFolderInvalid(f"no authority in {CA_FILE} has signed {path}")
    return frozenset(entry.serial_number for entry in revoked)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsFolderInvalid(f"{path} cannot be read: {reason_of(error)}") from error
