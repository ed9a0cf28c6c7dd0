"""Certificates and tokens as a person reads them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from rich.table import Table

from kvferry.terminal.output import console
from kvferry.trust.authority import CA_KEY_FILE, Authority
from kvferry.trust.certificates import identity_of
from kvferry.trust.clock import now_utc, validity
from kvferry.trust.errors import TlsFolderInvalid
from kvferry.trust.files import reason_of
from kvferry.trust.tls_folder import CERTIFICATE_FILE, read_certificates, read_material
from kvferry.trust.tokens import Token

REVOKED: Final = "revoked"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One certificate. ``not_after``: in UTC."""

    place: str
    name: str
    role: str
    serial: str
    not_after: dt.datetime
    state: str
    addresses: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return dataclasses.asdict(self) | {"not_after": self.not_after.isoformat()}


def lines_of(places: Sequence[Path]) -> list[Line]:
    """What authorities have signed, what TLS folders hold, what is in files.

    What one of them says is revoked is so wherever else it is found, though the list may not have got there.
    Raises TrustError.
    """
    lines = [line for place in places for line in _lines_of(place)]
    revoked = {line.serial for line in lines if line.state == REVOKED}
    return [dataclasses.replace(line, state=REVOKED) if line.serial in revoked else line for line in lines]


def _lines_of(place: Path) -> list[Line]:
    if (place / CA_KEY_FILE).exists():
        authority = Authority(place)
        trusted, now = authority.trusted(), now_utc()
        began = min(certificate.not_valid_before_utc for certificate in trusted)  # nothing that it signed is older
        lines = [_of_authority(place, certificate) for certificate in trusted]
        for one in authority.book():
            not_after = dt.datetime.fromisoformat(one.not_after)
            state = REVOKED if one.revoked_at else validity(began, not_after, now)
            lines.append(Line(str(place), one.name, one.role, one.serial, not_after, state))
        return lines
    if place.is_dir():
        revoked = read_material(place).revoked
        return _of_file(place / CERTIFICATE_FILE, revoked)
    return _of_file(place, frozenset())


def _of_file(path: Path, revoked: frozenset[int]) -> list[Line]:
    try:
        certificates = read_certificates(path, path.read_bytes())
    except OSError as error:
        raise TlsFolderInvalid(f"{path} cannot be read: {reason_of(error)}") from error
    lines = []
    for certificate in certificates:
        try:
            who = identity_of(certificate)
        except ValueError:
            lines.append(_of_authority(path, certificate))
            continue
        state = REVOKED if who.serial in revoked else validity(who.not_before, who.not_after, now_utc())
        lines.append(Line(str(path), who.name, who.role, f"{who.serial:x}", who.not_after, state, who.addresses))
    return lines


def _of_authority(place: Path, certificate: x509.Certificate) -> Line:
    not_after = certificate.not_valid_after_utc
    serial, name = f"{certificate.serial_number:x}", certificate.subject.rfc4514_string().removeprefix("CN=")
    state = validity(certificate.not_valid_before_utc, not_after, now_utc())
    return Line(str(place), name, "authority", serial, not_after, state)


def print_lines(lines: Sequence[Line]) -> None:
    """A table."""
    table = Table("identity", "role", "until", "state", "serial", "addresses", box=None, pad_edge=False)
    for line in lines:
        until = f"{line.not_after:%Y-%m-%d %H:%M}"
        table.add_row(line.name, line.role, until, line.state, line.serial, ", ".join(line.addresses))
    console().print(table)


def print_tokens(tokens: Sequence[Token]) -> None:
    """A table."""
    table = Table("id", "tenant", "state", "requests/min", "turns at once", "until", box=None, pad_edge=False)
    for token in tokens:
        limits = (token.requests_per_minute, token.concurrent_turns)
        until = "" if token.expires_at is None else f"{token.expires_at:%Y-%m-%d %H:%M}"
        table.add_row(token.id, token.tenant, token.state(now_utc()), *(str(n or "no limit") for n in limits), until)
    console().print(table)
