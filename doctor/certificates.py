"""The certificates of --tls-dir: whether they can be used, by whom, and for how long."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvferry.doctor.finding import Finding, Subject, fail, ok, warn

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

SOON: Final = timedelta(days=14)
"""Renewing is a timer's work; two weeks leave time to see that it failed."""
_ISSUE: Final = "make new ones: kvferry certs issue"


def certificates(subject: Subject) -> Iterator[Finding]:
    """Nothing without --tls-dir."""
    if subject.tls_dir is None:
        return
    found: dict[str, Certificate] = {}
    for name in ("ca.pem", "cert.pem"):
        loaded = _load(subject.tls_dir / name)
        if isinstance(loaded, Finding):
            yield loaded
        else:
            found[name] = loaded
            yield expiry(name, loaded, datetime.now(UTC))
    yield from _key(subject.tls_dir / "key.pem", found.get("cert.pem"))
    if len(found) == 2:
        yield _issued(found["cert.pem"], subject.tls_dir / "ca.pem")
    if "cert.pem" in found:
        yield _names(found["cert.pem"])


def _load(path: Path) -> Certificate | Finding:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
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
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), None)
        mode = path.stat().st_mode
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "is no private key in PEM without a password"
        yield fail(path.name, f"{path}: {reason}", means="nobody can connect with TLS", advice=_ISSUE)
        return
    if certificate is not None and key.public_key() != certificate.public_key():
        yield fail(path.name, "is not the key of cert.pem", means="TLS cannot be set up", advice=_ISSUE)
    elif mode & (stat.S_IRWXG | stat.S_IRWXO):
        means = "other users of this machine may read it, and pass for it"
        yield warn(path.name, f"mode {stat.S_IMODE(mode):o}", means=means, advice=f"chmod 600 {path}")
    else:
        yield ok(path.name, "belongs to cert.pem, and is its owner's alone")


def _issued(certificate: Certificate, authorities: Path) -> Finding:
    """By one of those in the file; there are two while an authority is replaced."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    for authority in x509.load_pem_x509_certificates(authorities.read_bytes()):
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return ok("issuer", authority.subject.rfc4514_string())
    found = f"issued by {certificate.issuer.rfc4514_string()}, not by ca.pem"
    means = "the others trust another authority"
    return fail("issuer", found, means=means, advice="give all the same ca.pem, or issue the certificate anew")


def _names(certificate: Certificate) -> Finding:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        means = "no address matches it: whoever calls this process refuses it"
        return fail("names", "none", means=means, advice="issue it with the names and addresses of this machine")
    return ok("names", ", ".join(str(name.value) for name in names))
