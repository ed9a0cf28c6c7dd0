"""A private certificate authority in a folder.

``ca.pem`` (what signs now first, then what is still trusted), ``ca.key.pem``, ``revoked.pem`` (the list of revoked
certificates, signed) and ``issued.json`` (what was signed). Only ``ca.key.pem`` is secret; it never has to leave the
folder. The folder belongs to one person at a time: a lock file keeps two commands apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvferry.trust.certificates import (
    IDENTITY,
    Role,
    alternative_names,
    certificate_pem,
    key_pem,
    new_key,
    subject_of,
)
from kvferry.trust.clock import Clock, now_utc, usable
from kvferry.trust.errors import AuthorityInvalid, RequestInvalid
from kvferry.trust.files import PUBLIC_MODE, SECRET_MODE, reason_of, write_atomically

CA_FILE: Final = "ca.pem"
CA_KEY_FILE: Final = "ca.key.pem"
REVOKED_FILE: Final = "revoked.pem"
ISSUED_FILE: Final = "issued.json"

CA_DAYS: Final = 3650
"""Replacing an authority touches every machine; ten years outlive the boards."""

DAYS: Final = 60
"""Of a certificate: long enough for a monthly rotation that fails once (reliability.md section 7: 30 to 90)."""

MAX_DAYS: Final = 3650

CLOCK_SKEW: Final = dt.timedelta(minutes=5)
"""A certificate is valid a little before it was made: the clocks of boards differ."""


@dataclasses.dataclass(frozen=True, slots=True)
class Issued:
    """One line of the book. ``serial``: hexadecimal; times in ISO format, UTC; ``revoked_at`` empty: it is valid."""

    serial: str
    name: str
    role: str
    not_after: str
    revoked_at: str = ""


class Authority:
    """What can be asked of the authority in a folder. Methods raise AuthorityInvalid, RequestInvalid, ClockWrong."""

    def __init__(self, folder: Path, clock: Clock = now_utc) -> None:
        self.folder = folder
        self._clock = clock

    @classmethod
    def create(cls, folder: Path, name: str, days: int = CA_DAYS, clock: Clock = now_utc) -> Self:
        """A new one. Never writes over another one."""
        authority = cls(folder, clock)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise AuthorityInvalid(f"the folder {folder} cannot be made: {reason_of(error)}") from error
        with authority.locked():
            if not authority._is_unfinished() and ((folder / CA_FILE).exists() or (folder / CA_KEY_FILE).exists()):
                raise AuthorityInvalid(f"{folder} holds an authority already: name another folder, or use it as it is")
            authority._begin(name, days, [])
        return authority

    def renew_authority(self, days: int = CA_DAYS) -> None:
        """Sign with a new key from now on; what the old one signed stays trusted until `forget_old`."""
        with self.locked():
            trusted = self.trusted()
            names = trusted[0].subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            self._begin(str(names[0].value), days, trusted)

    def forget_old(self) -> None:
        """Trust only what the present key signed."""
        with self.locked():
            self._write(CA_FILE, certificate_pem(self.trusted()[0]), PUBLIC_MODE)

    def trusted(self) -> list[x509.Certificate]:
        """The authority's certificates, that which signs now first."""
        try:
            return x509.load_pem_x509_certificates((self.folder / CA_FILE).read_bytes())
        except OSError as error:
            raise AuthorityInvalid(
                f"{self.folder} holds no authority ({CA_FILE}: {reason_of(error)}); make one with: kvferry certs init"
            ) from error
        except ValueError as error:
            raise AuthorityInvalid(f"{self.folder / CA_FILE} holds no certificate in PEM") from error

    def sign(
        self, public_key: object, name: str, role: Role, addresses: Sequence[str] = (), days: int = DAYS
    ) -> x509.Certificate:
        """A certificate for the holder of a key. What it says is the caller's word, nobody else's."""
        if not isinstance(public_key, ec.EllipticCurvePublicKey):
            raise RequestInvalid(
                "only keys on an elliptic curve are signed (P-256): make one with kvferry certs request"
            )
        if not IDENTITY.fullmatch(name):
            raise RequestInvalid(f"{name!r} is no identity: 1 to 63 of a-z, 0-9, '.', '_', '-', no sign at either end")
        if not 1 <= days <= MAX_DAYS:
            raise RequestInvalid(f"a certificate is valid for 1 to {MAX_DAYS} days, not {days}")
        if role in {Role.COORDINATOR, Role.NODE} and not addresses:
            raise RequestInvalid(f"a {role} serves: give the addresses at which others reach it with --address")
        try:
            names = alternative_names(name, addresses)
        except ValueError as error:
            raise RequestInvalid(f"the certificate cannot be made: {error}") from error
        with self.locked():
            signer, key, now = self.trusted()[0], self._key(), self._now()
            if signer.not_valid_after_utc <= now:
                raise AuthorityInvalid(
                    f"the authority in {self.folder} has expired on {signer.not_valid_after_utc:%Y-%m-%d}: "
                    f"kvferry certs renew-authority {self.folder}"
                )
            certificate = _certificate(public_key, subject_of(name, role), names, days, signer, key, now)
            issued = Issued(f"{certificate.serial_number:x}", name, role, certificate.not_valid_after_utc.isoformat())
            self._write_book([*self.book(), issued])
        return certificate

    def revoke(self, *, name: str | None = None, serial: str | None = None) -> list[Issued]:
        """All certificates of an identity, or one by its serial; those that it revoked. The list is signed anew."""
        with self.locked():
            now = self._now().isoformat()
            book = self.book()
            asked = [one for one in book if one.name == name or one.serial == (serial or "").lower().lstrip("0")]
            if not asked:
                raise RequestInvalid(f"this authority has signed nothing for {name or serial}: see kvferry certs show")
            chosen = {one.serial for one in asked if not one.revoked_at}
            book = [dataclasses.replace(one, revoked_at=now) if one.serial in chosen else one for one in book]
            self._write_book(book)
            self._write_list(book, self.trusted()[0], self._key())
        return [one for one in book if one.serial in chosen]

    def book(self) -> list[Issued]:
        """Everything that was signed, oldest first."""
        try:
            lines: list[dict[str, Any]] = json.loads((self.folder / ISSUED_FILE).read_text(encoding="utf-8"))
            return [Issued(**line) for line in lines]
        except OSError as error:
            raise AuthorityInvalid(
                f"{self.folder} holds no authority ({ISSUED_FILE}: {reason_of(error)}); make one: kvferry certs init"
            ) from error
        except (ValueError, TypeError) as error:
            raise AuthorityInvalid(f"{self.folder / ISSUED_FILE} is damaged: {error}") from error

    def _now(self) -> dt.datetime:
        return usable(self._clock())

    def _is_unfinished(self) -> bool:
        """Whether somebody began one here and was interrupted: it has signed nothing, and nobody knows it."""
        return (self.folder / ISSUED_FILE).exists() and not (self.folder / CA_FILE).exists() and not self.book()

    def _begin(self, name: str, days: int, old: list[x509.Certificate]) -> None:
        """A new key and what it signs; the key before the certificate, which signs nothing without it."""
        if not 1 <= days <= 2 * MAX_DAYS:
            raise RequestInvalid(f"an authority is valid for 1 to {2 * MAX_DAYS} days, not {days}")
        if not 1 <= len(name) <= 64:
            raise RequestInvalid("an authority's name has 1 to 64 letters")
        key, subject = new_key(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = _authority_certificate(key, subject, days, self._now())
        secret, trusted = key_pem(key), certificate_pem(certificate, *old)
        if old:  # ca.pem before the list: nobody would believe one of an authority that is not in it
            self._write(CA_KEY_FILE, secret, SECRET_MODE)
            self._write(CA_FILE, trusted, PUBLIC_MODE)
            self._write_list(self.book(), certificate, key)
        else:  # ca.pem last: it is what makes the folder an authority
            self._write_book([])
            self._write(CA_KEY_FILE, secret, SECRET_MODE)
            self._write_list([], certificate, key)
            self._write(CA_FILE, trusted, PUBLIC_MODE)

    def _write_list(self, book: Sequence[Issued], signer: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        """Of those that have not expired by themselves."""
        now = self._now()
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(signer.subject)
            .last_update(now - CLOCK_SKEW)
            .next_update(now + dt.timedelta(days=MAX_DAYS))  # what is revoked stays so, however old the list is
        )
        for one in book:
            if one.revoked_at and dt.datetime.fromisoformat(one.not_after) > now:
                revoked = x509.RevokedCertificateBuilder().serial_number(int(one.serial, 16))
                revoked_at = dt.datetime.fromisoformat(one.revoked_at)
                builder = builder.add_revoked_certificate(revoked.revocation_date(revoked_at).build())
        signed = builder.sign(key, hashes.SHA256())
        self._write(REVOKED_FILE, signed.public_bytes(serialization.Encoding.PEM), PUBLIC_MODE)

    def _write_book(self, book: Sequence[Issued]) -> None:
        text = json.dumps([dataclasses.asdict(one) for one in book], indent=1)
        self._write(ISSUED_FILE, text.encode() + b"\n", PUBLIC_MODE)

    def _key(self) -> ec.EllipticCurvePrivateKey:
        path = self.folder / CA_KEY_FILE
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise AuthorityInvalid(f"the authority's key {path} cannot be read: {reason_of(error)}") from error
        except (ValueError, TypeError) as error:
            raise AuthorityInvalid(f"{path} is no private key") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != self.trusted()[0].public_key():
            raise AuthorityInvalid(
                f"{path} is not the key of the first certificate in {CA_FILE}: make a new one with "
                f"kvferry certs renew-authority {self.folder}"
            )
        return key

    def _write(self, name: str, data: bytes, mode: int) -> None:
        try:
            write_atomically(self.folder / name, data, mode)
        except OSError as error:
            raise AuthorityInvalid(f"{self.folder / name} cannot be written: {reason_of(error)}") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While nobody else changes anything; not within itself."""
        try:
            fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SECRET_MODE)
        except OSError as error:
            raise AuthorityInvalid(f"the folder {self.folder} cannot be used: {reason_of(error)}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _authority_certificate(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, days: int, now: dt.datetime
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    public_key: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    names: x509.SubjectAlternativeName,
    days: int,
    signer: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    now: dt.datetime,
) -> x509.Certificate:
    """Both ends of a call may be its holder: a node serves turns and calls the coordinator."""
    not_after = min(now + dt.timedelta(days=days), signer.not_valid_after_utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(not_after)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
