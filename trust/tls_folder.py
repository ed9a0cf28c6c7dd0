"""A process's certificate, key, authorities and list of revoked certificates: a folder that is read again when it
changes, so that certificates rotate without a restart."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvferry.trust.certificates import Identity, identity_of, same_key
from kvferry.trust.errors import TlsFolderInvalid
from kvferry.trust.files import reason_of
from kvferry.trust.rereading import Reread

CA_FILE: Final = "ca.pem"
CERTIFICATE_FILE: Final = "cert.pem"
KEY_FILE: Final = "key.pem"
REVOKED_FILE: Final = "revoked.pem"


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """What the files said when they were read last. ``identity``: whose this is; ``revoked``: serials."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = dataclasses.field(repr=False)
    identity: Identity
    revoked: frozenset[int]


class TlsFolder:
    """Any thread may call."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises TlsFolderInvalid."""
        files = [path / name for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE, REVOKED_FILE)]
        self._reread = Reread(files, lambda: read_material(path), f"the certificates in {path}", clock)

    @property
    def version(self) -> int:
        """Grows whenever other material came into force."""
        return self._reread.current()[1]

    def material(self) -> Material:
        """What is in force now."""
        return self._reread.current()[0]


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
