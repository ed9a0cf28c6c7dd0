"""When the certificates of a process end: they are renewed by somebody else, who may have failed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography import x509

FILES: Final = ("cert.pem", "ca.pem")


def expiry_times(tls_dir: Path) -> dict[str, float]:
    """Unix time by file; of several certificates in a file the first to end. What cannot be read has none."""
    found: dict[str, float] = {}
    for name in FILES:
        try:
            certificates = x509.load_pem_x509_certificates((tls_dir / name).read_bytes())
        except (OSError, ValueError):
            continue
        found[name] = min(certificate.not_valid_after_utc.timestamp() for certificate in certificates)
    return found
