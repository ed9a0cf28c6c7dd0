"""Certificates on their way from the authority to the folders of processes.

Either the key is made where it is used (``make_request``, sign, ``install``) and never leaves that machine, or, for a
laptop's own cluster, authority and folder lie on one machine (``issue``, ``renew``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvferry.trust.authority import REVOKED_FILE as AUTHORITY_REVOKED_FILE
from kvferry.trust.authority import Authority
from kvferry.trust.certificates import (
    Identity,
    Role,
    alternative_names,
    certificate_pem,
    identity_of,
    key_pem,
    new_key,
    same_key,
    subject_of,
)
from kvferry.trust.errors import RequestInvalid, TlsFolderInvalid
from kvferry.trust.files import PUBLIC_MODE, SECRET_MODE, reason_of, write_atomically
from kvferry.trust.tls_folder import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REVOKED_FILE,
    is_signed_by,
    read_certificates,
    read_material,
    read_revoked,
)

REQUEST_FILE: Final = "request.pem"

NEXT_KEY_FILE: Final = "key.next.pem"
"""The key of a request that is not signed yet: the process goes on with the present pair until both are there."""


def issue(authority: Authority, folder: Path, name: str, role: Role, addresses: Sequence[str], days: int) -> Identity:
    """Key, certificate, authorities and list, all made here. Raises TrustError."""
    key = new_key()
    certificate = authority.sign(key.public_key(), name, role, addresses, days)
    _make_folder(folder)
    _write(folder / KEY_FILE, key_pem(key), SECRET_MODE)
    _write(folder / CERTIFICATE_FILE, certificate_pem(certificate), PUBLIC_MODE)
    hand_out_trust(authority, folder)
    return identity_of(certificate)


def renew(authority: Authority, folder: Path, days: int) -> Identity:
    """A new key and certificate that say the same. The old one stays valid until it expires. Raises TrustError."""
    old = read_material(folder).identity
    return issue(authority, folder, old.name, old.role, old.addresses, days)


def hand_out_trust(authority: Authority, folder: Path) -> None:
    """Whom to believe, and whom no longer. The authorities first: they signed the list."""
    with authority.locked():  # or a list that is signed and handed out meanwhile is written over with the one before
        _write(folder / CA_FILE, certificate_pem(*authority.trusted()), PUBLIC_MODE)
        _write(folder / REVOKED_FILE, _read(authority.folder / AUTHORITY_REVOKED_FILE), PUBLIC_MODE)


def make_request(folder: Path, name: str, role: Role, addresses: Sequence[str]) -> Path:
    """A new key, and a request for a certificate of it; the file to take to the authority. Raises TrustError."""
    key = new_key()
    try:
        names = alternative_names(name, addresses)
    except ValueError as error:
        raise RequestInvalid(f"the request cannot be made: {error}") from error
    request = x509.CertificateSigningRequestBuilder().subject_name(subject_of(name, role)).add_extension(names, False)
    _make_folder(folder)
    _write(folder / NEXT_KEY_FILE, key_pem(key), SECRET_MODE)
    pem = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    _write(folder / REQUEST_FILE, pem, PUBLIC_MODE)
    return folder / REQUEST_FILE


def sign_request(
    authority: Authority, request_file: Path, name: str, role: Role, addresses: Sequence[str], days: int
) -> bytes:
    """The certificate, in PEM. What it says is what the operator says; the request has only to agree.

    Raises RequestInvalid, AuthorityInvalid.
    """
    try:
        request = x509.load_pem_x509_csr(_read(request_file))
    except ValueError as error:
        raise RequestInvalid(f"{request_file} is no request of kvferry certs request") from error
    if not request.is_signature_valid:
        raise RequestInvalid(f"{request_file} was not signed with the key that it names: make it again")
    if request.subject != subject_of(name, role):
        asked = request.subject.rfc4514_string()
        raise RequestInvalid(f"{request_file} is not the request of {role} {name} ({asked}): two were mixed up")
    return certificate_pem(authority.sign(request.public_key(), name, role, addresses, days))


def install(folder: Path, certificate_file: Path, ca_file: Path, revoked_file: Path | None) -> Identity:
    """Put a signed certificate, and whom to believe, into force, after a look at whether all fit together.

    Raises TlsFolderInvalid; then everything is as it was.
    """
    ca_pem, pem = _read(ca_file), _read(certificate_file)
    certificate, authorities = read_certificates(certificate_file, pem)[0], read_certificates(ca_file, ca_pem)
    if not any(is_signed_by(certificate, authority) for authority in authorities):
        raise TlsFolderInvalid(f"no authority in {ca_file} has signed {certificate_file}")
    try:
        identity = identity_of(certificate)
    except ValueError as error:
        raise TlsFolderInvalid(f"{certificate_file} was not made by kvferry certs: {error}") from error
    revoked = None if revoked_file is None else _read(revoked_file)
    if revoked_file is not None:
        read_revoked(revoked_file, authorities)
    is_new_key = same_key(certificate, _key_of(folder / NEXT_KEY_FILE))
    if not is_new_key and not same_key(certificate, _key_of(folder / KEY_FILE)):
        raise TlsFolderInvalid(f"{certificate_file} is for another key than those in {folder}: sign its {REQUEST_FILE}")
    _write(folder / CA_FILE, ca_pem, PUBLIC_MODE)
    if revoked is not None:
        _write(folder / REVOKED_FILE, revoked, PUBLIC_MODE)
    if is_new_key:  # between the two a reader finds a pair that does not fit, and keeps what it has
        (folder / NEXT_KEY_FILE).replace(folder / KEY_FILE)
        (folder / REQUEST_FILE).unlink(missing_ok=True)
    _write(folder / CERTIFICATE_FILE, pem, PUBLIC_MODE)
    return identity


def _key_of(path: Path) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise TlsFolderInvalid(f"the folder {folder} cannot be made: {reason_of(error)}") from error


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        write_atomically(path, data, mode)
    except OSError as error:
        raise TlsFolderInvalid(f"{path} cannot be written: {reason_of(error)}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsFolderInvalid(f"{path} cannot be read: {reason_of(error)}") from error
