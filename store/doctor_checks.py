"""What `kvferry doctor` finds about a store's folder: whether it can be used, room, mount options, rates."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from rich.filesize import decimal

from kvferry.doctor import Finding, Subject, fail, ok, warn
from kvferry.store.errors import StoreMisuse
from kvferry.store.place import StorePlace

MOUNTS: Final = Path("/proc/self/mountinfo")
NETWORK: Final = frozenset({"nfs", "nfs4"})
WANTED: Final = {
    "hard": "a soft mount may lose a write silently",
    "proto=tcp": "over UDP, large reads are lost as a whole",
    "noatime": "reading a snapshot writes to the server",
}
"""As the ansible role mounts it. What the kernel rewrites, such as the version, is judged apart."""
LOOKUP_CACHE: Final = "lookupcache=pos"
VERSION_LEAST: Final = 4.0
ROOM_LEAST: Final = 1 << 30
SLOW: Final = 20e6
"""Bytes a second: below it a snapshot of 1,000 tokens of a 2B model takes longer to read than to compute on a board."""
_PROBE_BYTES: Final = 1 << 25
_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a folder lies: type of the file system, and the options of the mount and of the file system."""

    point: str
    kind: str
    options: frozenset[str]


def store(subject: Subject) -> Iterator[Finding]:
    """Nothing without --store."""
    if subject.store is None:
        return
    try:
        folder = StorePlace(subject.store).folder
    except StoreMisuse as error:
        yield fail("store", subject.store, means=str(error).rstrip("."), advice="name a folder or s3://BUCKET/PREFIX")
        return
    if folder is None:
        yield ok("store", f"{subject.store}: an object store; `kvferry kv du {subject.store}` says whether it answers")
        return
    if not folder.is_dir():
        means = "a node cannot save or restore"
        yield fail("store", f"there is no folder {folder}", means=means, advice="make it, or mount it")
        return
    yield from _room(folder)
    yield from mount_findings(mount_of(folder, MOUNTS))
    yield from _rates(folder, quick=subject.quick)


def _room(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    found = f"{folder}: {decimal(free)} free"
    if free < ROOM_LEAST:
        means = "saves are refused once it is full; answers come all the same"
        yield warn("store", found, means=means, advice="free space, or lower --store-max-bytes")
    else:
        yield ok("store", found)


def mount_of(folder: Path, mounts: Path) -> Mount | None:
    """The mount that a folder lies on, by the kernel's table; None where there is none."""
    best: Mount | None = None
    real = folder.resolve()
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")  # blanks are \040
        kind, _, of_system = (*right.split(), "", "", "")[:3]
        if real.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(point, kind, frozenset(left.split()[5].split(",")) | frozenset(of_system.split(",")))
    return best


def mount_findings(mount: Mount | None) -> Iterator[Finding]:
    """A network mount's options against those that the project recommends."""
    if mount is None:
        return
    if mount.kind not in NETWORK:
        yield ok("store mount", f"{mount.kind} at {mount.point}")
        return
    wrong = [f"without {option}, {why}" for option, why in WANTED.items() if option not in mount.options]
    if not {LOOKUP_CACHE, "lookupcache=positive", "lookupcache=none"} & mount.options:
        wrong.append(f"without {LOOKUP_CACHE}, what another board has just saved may not be seen for a minute")
    version = next((option[5:] for option in mount.options if option.startswith("vers=")), "")
    with contextlib.suppress(ValueError):
        if float(version) < VERSION_LEAST:
            wrong.append(f"version {version} has no leases of its own: take vers=4.2")
    found = f"{mount.kind} at {mount.point}, {','.join(sorted(mount.options))}"
    if not wrong:
        yield ok("store mount", found)
        return
    wanted = ",".join(["vers=4.2", *WANTED, LOOKUP_CACHE])
    yield warn("store mount", found, means="; ".join(wrong), advice=f"mount it with {wanted} (docs/fleet.md)")


def _rates(folder: Path, *, quick: bool) -> Iterator[Finding]:
    probe = folder / f".doctor-{uuid4().hex}.tmp"
    n_bytes = 4096 if quick else _PROBE_BYTES
    try:
        write = _write(probe, n_bytes)
        read = _read(probe)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        yield fail(
            "store writes", f"{folder}: {reason}", means="nothing can be saved there", advice="look at owner and mode"
        )
        return
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    if quick:
        yield ok("store writes", "a file can be written, synced and read")
        return
    found = f"{decimal(int(write))}/s written and synced, {decimal(int(read))}/s read"
    if min(write, read) < SLOW:
        means = "restoring takes longer than computing again; the router knows, and computes"
        yield warn("store rate", found, means=means, advice="use a faster disk or network, or no store")
    else:
        yield ok("store rate", found)


def _write(path: Path, n_bytes: int) -> float:
    """Bytes per second, on the disk."""
    block = os.urandom(min(n_bytes, 1 << 20))
    started_at, n_written = time.monotonic(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        while n_written < n_bytes and time.monotonic() - started_at < _PATIENCE_S:
            n_written += os.write(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return n_written / (time.monotonic() - started_at)


def _read(path: Path) -> float:
    """Bytes per second, past the page cache where the system lets us."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started_at, n_read = time.monotonic(), 0
        while time.monotonic() - started_at < _PATIENCE_S and (block := os.read(descriptor, 1 << 20)):
            n_read += len(block)
    finally:
        os.close(descriptor)
    return n_read / max(time.monotonic() - started_at, 1e-9)
