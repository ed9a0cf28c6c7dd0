"""A certificate as kvferry reads it: who it is for, which part that one plays, and where it may be found.

The identity is a URI in the subject's alternative names, ``kvferry:NAME``; the role is the subject's organizational
unit; the other alternative names are the addresses at which its holder may serve, which gRPC compares with the address
that a client called.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SCHEME: Final = "kvferry:"

IDENTITY: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
"""As a node's name: it is one."""


class Role(enum.StrEnum):
    """The part that the holder of a certificate plays."""

    COORDINATOR = "coordinator"
    NODE = "node"
    GATEWAY = "gateway"
    CLIENT = "client"
    OPERATOR = "operator"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What one certificate says. ``not_after``: in UTC. ``addresses``: host names and IP addresses."""

    name: str
    role: Role
    serial: int
    not_before: dt.datetime
    not_after: dt.datetime
    addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def identity_of(certificate: x509.Certificate) -> Identity:
    """Raises ValueError with what is missing."""
    units = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    if len(units) != 1 or units[0].value not in set(Role):
        raise ValueError(f"it names no role (one of {', '.join(Role)}) as its organizational unit")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("it has no alternative names") from None
    uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(SCHEME)]
    if len(uris) != 1 or not IDENTITY.fullmatch(uris[0].removeprefix(SCHEME)):
        raise ValueError(f"it names nobody as {SCHEME}NAME among its alternative names")
    hosts = names.get_values_for_type(x509.DNSName)
    return Identity(
        name=uris[0].removeprefix(SCHEME),
        role=Role(str(units[0].value)),
        serial=certificate.serial_number,
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        addresses=(*hosts, *(str(address) for address in names.get_values_for_type(x509.IPAddress))),
    )


def subject_of(name: str, role: Role) -> x509.Name:
    """The subject of a certificate."""
    return x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, name), x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role)]
    )


def alternative_names(name: str, addresses: Sequence[str]) -> x509.SubjectAlternativeName:
    """The identity and the addresses. Raises ValueError for what can be neither a host's name nor an address."""
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(SCHEME + name)]
    for address in dict.fromkeys(addresses):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address.strip("[]"))))
        except ValueError:
            if not _HOST.fullmatch(address):
                raise ValueError(f"{address!r} is no host name and no IP address (leave the port out)") from None
            names.append(x509.DNSName(address))
    return x509.SubjectAlternativeName(names)


_HOST: Final = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)


def new_key() -> ec.EllipticCurvePrivateKey:
    """P-256: what every TLS library takes, and small enough that a board's handshakes cost a millisecond."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Unencrypted: the file's mode keeps it, and a service has nobody to type a passphrase."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_pem(*certificates: x509.Certificate) -> bytes:
    """One after the other."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def same_key(certificate: x509.Certificate, key: object) -> bool:
    """Whether the private key is the certificate's."""
    return isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == certificate.public_key()
