"""The certificates of --tls-dir: whether they can be used, by whom, and for how long."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import Certificate

from kvferry.doctor.finding import Finding, Subject, fail, ok, warn
from kvferry.trust.certificates import same_key
from kvferry.trust.errors import TlsFolderInvalid
from kvferry.trust.tls_folder import CA_FILE, CERTIFICATE_FILE, KEY_FILE, is_signed_by, read_certificates

SOON: Final = timedelta(days=14)
"""Renewing is a timer's work; two weeks leave time to see that it failed."""
_ISSUE: Final = "make new ones: kvferry certs issue"


def certificates(subject: Subject) -> Iterator[Finding]:
    """Nothing without --tls-dir."""
    if subject.tls_dir is None:
        return
    found: dict[str, list[Certificate]] = {}
    for name in (CA_FILE, CERTIFICATE_FILE):
        loaded = _load(subject.tls_dir / name)
        if isinstance(loaded, Finding):
            yield loaded
        else:
            found[name] = loaded
            yield expiry(name, loaded[0], datetime.now(UTC))
    certificate = found[CERTIFICATE_FILE][0] if CERTIFICATE_FILE in found else None
    yield from _key(subject.tls_dir / KEY_FILE, certificate)
    if certificate is not None and CA_FILE in found:
        yield _issued(certificate, found[CA_FILE])
    if certificate is not None:
        yield _names(certificate)


def _load(path: Path) -> list[Certificate] | Finding:
    try:
        return read_certificates(path, path.read_bytes())
    except (OSError, TlsFolderInvalid) as error:
        reason = getattr(error, "strerror", None) or "is no certificate in PEM"
        return fail(path.name, f"{path}: {reason}", means="nobody can connect with TLS", advice=_ISSUE)


def expiry(name: str, certificate: Certificate, now: datetime) -> Finding:
    """Whether it is valid at ``now``."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    found = f"valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d %H:%M} UTC"
    if now < begins:
        advice = "look at the clock of this machine and of the one that issued it"
        return fail(name, found, means="it is not valid yet", advice=advice)
    if now >= ends:
        return fail(name, found, means="it has expired: nobody accepts it any more", advice="kvferry certs renew")
    if now >= ends - SOON:
        return warn(name, found, means=f"it ends in {(ends - now).days} days", advice="kvferry certs renew")
    return ok(name, found)


def _key(path: Path, certificate: Certificate | None) -> Iterator[Finding]:
    try:
        key = load_pem_private_key(path.read_bytes(), None)
        mode = path.stat().st_mode
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "is no private key in PEM without a password"
        yield fail(path.name, f"{path}: {reason}", means="nobody can connect with TLS", advice=_ISSUE)
        return
    if certificate is not None and not same_key(certificate, key):
        yield fail(path.name, "is not the key of cert.pem", means="TLS cannot be set up", advice=_ISSUE)
    elif mode & (stat.S_IRWXG | stat.S_IRWXO):
        means = "other users of this machine may read it, and pass for it"
        yield warn(path.name, f"mode {stat.S_IMODE(mode):o}", means=means, advice=f"chmod 600 {path}")
    else:
        yield ok(path.name, "belongs to cert.pem, and is its owner's alone")


def _issued(certificate: Certificate, authorities: list[Certificate]) -> Finding:
    """By one of those in the file; there are two while an authority is replaced."""
    for authority in authorities:
        if is_signed_by(certificate, authority):
            return ok("issuer", authority.subject.rfc4514_string())
    found = f"issued by {certificate.issuer.rfc4514_string()}, not by ca.pem"
    means = "the others trust another authority"
    return fail("issuer", found, means=means, advice="give all the same ca.pem, or issue the certificate anew")


def _names(certificate: Certificate) -> Finding:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        means = "no address matches it: whoever calls this process refuses it"
        return fail("names", "none", means=means, advice="issue it with the names and addresses of this machine")
    return ok("names", ", ".join(str(name.value) for name in names))
