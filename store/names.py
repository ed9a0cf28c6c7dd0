"""The names in a store, validated at one gate both ways: before they are used, and before a listing hands them on.

    ROOT/<fingerprint>-<24 hex>/                                     the same for a tenant: digits of its name's SHA-256
    ROOT/<fingerprint>/kv_<16 hex>.kv                                a snapshot in one file: version 1
    ROOT/<fingerprint>/kv3_<32 hex>.kv                               a segment: version 3
    ROOT/<fingerprint>/kv_<16 hex>.kv.<node>.<32 hex>.<bytes>.tmp    one being written, and the bytes it reserves
    ROOT/<fingerprint>/clock.<node>.<32 hex>.0.tmp                   asks the file system what time it is
    ROOT/<fingerprint>/trash/kv_<16 hex>.kv.<32 hex>                 an evicted one, soon to be unlinked
    ROOT/<fingerprint>/quarantine/kv3_<32 hex>.kv.<32 hex>           a damaged one, kept for a person to look at

Whatever does not match is not ours: ignored in listings, never opened, never deleted.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from kvferry.store.errors import SnapshotRejected, StoreMisuse

TRASH: Final = "trash"
QUARANTINE: Final = "quarantine"
TENANT_DIGITS: Final = 24

_NAME: Final = r"(?:kv_[0-9a-f]{16}|kv3_[0-9a-f]{32})\.kv"
_SNAPSHOT: Final = re.compile(_NAME, re.ASCII)
_SEGMENT: Final = re.compile(r"kv3_[0-9a-f]{32}\.kv", re.ASCII)
_TEMP: Final = re.compile(
    r"(?P<target>" + _NAME + r"|clock)\.(?P<node>[A-Za-z0-9][A-Za-z0-9_.-]{0,63})"
    r"\.[0-9a-f]{32}\.(?P<size>[0-9]{1,15})\.tmp",
    re.ASCII,
)
_TRASHED: Final = re.compile(_NAME + r"\.[0-9a-f]{32}", re.ASCII)
_NODE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
# lower case, because some disks do not tell the cases apart; no dot first, so neither '..' nor a hidden folder
_FINGERPRINT: Final = re.compile(r"[0-9a-z][0-9a-z_-]{0,63}", re.ASCII)
_TENANT: Final = re.compile(rf"-([0-9a-f]{{{TENANT_DIGITS}}})\Z", re.ASCII)
_UNIQUE: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TempName:
    """A temporary file's name, taken apart; ``target``: the name it gets, "clock" for the file that tells the time."""

    target: str
    node_id: str
    reserved_bytes: int


def is_snapshot(name: str) -> bool:
    """Whether a directory entry is named as a snapshot."""
    return _SNAPSHOT.fullmatch(name) is not None


def is_segment(name: str) -> bool:
    """Whether a directory entry is named as a segment of version 3."""
    return _SEGMENT.fullmatch(name) is not None


def is_fingerprint(name: str) -> bool:
    """Whether a directory entry of the root is named as a model's folder."""
    return _FINGERPRINT.fullmatch(name) is not None


def is_trashed(name: str) -> bool:
    """Whether an entry of the trash folder is named as an evicted snapshot."""
    return _TRASHED.fullmatch(name) is not None


def check_snapshot(name: str) -> str:
    """The name, when it is one of a snapshot. Raises SnapshotRejected(bad_name): it may have come over the network."""
    if not is_snapshot(name):
        raise SnapshotRejected(
            "bad_name", f"{name[:80]!r} is neither kv_ and 16 nor kv3_ and 32 lower-case hex digits and .kv"
        )
    return name


def check_fingerprint(fingerprint: str) -> str:
    """The fingerprint, when it can name a directory. Raises StoreMisuse."""
    if _FINGERPRINT.fullmatch(fingerprint) is None:
        raise StoreMisuse(
            f"model fingerprint {fingerprint[:80]!r} cannot name a directory:"
            " lower-case letters and digits, at most 64",
            op="open store",
        )
    return fingerprint


def tenant_digest(tenant: str) -> str:
    """24 hex digits that stand for a tenant's name; empty for the empty name, which is everybody's."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:TENANT_DIGITS] if tenant else ""


def folder_of(fingerprint: str, tenant: str = "") -> str:
    """The directory of a tenant's snapshots of a model. Raises StoreMisuse."""
    if not tenant:
        return check_fingerprint(fingerprint)
    return f"{check_fingerprint(fingerprint)[: 64 - TENANT_DIGITS - 1]}-{tenant_digest(tenant)}"


def digest_in_folder(folder: str) -> str:
    """The tenant's digest in a directory's name; empty for one without."""
    found = _TENANT.search(folder)
    return found[1] if found else ""


def check_node_id(node_id: str) -> str:
    """The node id, when it can be part of a file's name. Raises StoreMisuse."""
    if _NODE_ID.fullmatch(node_id) is None:
        raise StoreMisuse(
            f"node id {node_id[:80]!r} cannot be part of a file's name: letters, digits, '_', '.', '-', at most 64",
            op="open store",
        )
    return node_id


def temp_name(target: str, node_id: str, unique: str, reserved_bytes: int) -> str:
    """Name of the file in which ``target`` is written; unique across hosts by node id and 32 random hex digits."""
    if _UNIQUE.fullmatch(unique) is None:
        raise StoreMisuse(f"{unique[:80]!r} is not 32 hex digits", op="name a temporary file")
    return f"{target}.{node_id}.{unique}.{reserved_bytes}.tmp"


def clock_name(node_id: str, unique: str) -> str:
    """Name of the empty file whose mtime is the file system's time."""
    return temp_name("clock", node_id, unique, 0)


def parse_temp(name: str) -> TempName | None:
    """What a temporary file's name says; None for any other name."""
    found = _TEMP.fullmatch(name)
    return TempName(found["target"], found["node"], int(found["size"])) if found else None


def trash_name(name: str, unique: str) -> str:
    """Name of an evicted snapshot in the trash folder."""
    return f"{name}.{unique}"
