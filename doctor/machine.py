"""Python, clock, ports, limits, and the kernel's settings that decide how fast a board is."""

from __future__ import annotations

import ctypes
import platform
import resource
import socket
import sys
import time
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Final

import psutil

from kvferry.doctor.finding import Finding, Subject, fail, ok, warn

ROOT: Final = Path("/")
FILES_ENOUGH: Final = 4096
"""A node has a descriptor for each connection, segment and library; a coordinator one for each open stream."""
FILES_LEAST: Final = 512
BUILT_AT: Final = 1_767_225_600
"""The first second of 2026: a clock before it is wrong, whatever it is."""

_UNSYNCED: Final = 0x40  # STA_UNSYNC of adjtimex(2)
_TIMEX_BYTES: Final = 256  # of struct timex, with room
_STATUS_AT: Final = 5 * ctypes.sizeof(ctypes.c_long)  # modes, offset, freq, maxerror, esterror; then int status


def machine(subject: Subject) -> Iterator[Finding]:
    """All of this room's findings."""
    yield python()
    yield clock(time.time(), clock_status())
    yield file_limit()
    yield from kernel_settings(ROOT)
    for address in subject.listen:
        yield port(address)


def python() -> Finding:
    """Its version against the package's."""
    found = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    needed = str(metadata("kvferry")["Requires-Python"] or ">=3.11")
    least = tuple(int(part) for part in needed.strip(">= ").split("."))
    if sys.version_info[: len(least)] < least:
        return fail("python", found, means=f"kvferry needs Python {needed}", advice="install a newer Python")
    if platform.python_implementation() != "CPython":
        return warn("python", found, means="only CPython is tested", advice="use CPython")
    return ok("python", found)


def clock_status() -> int | None:
    """The kernel's status bits of the clock; None where it does not say."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes 0: look only
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return int.from_bytes(buffer.raw[_STATUS_AT : _STATUS_AT + 4], sys.byteorder)


def clock(now_s: float, status: int | None) -> Finding:
    """``now_s``: Unix time. ``status``: of clock_status."""
    told = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    advice = "let systemd-timesyncd or chrony set it; a board without a battery loses its time with its power"
    if now_s < BUILT_AT:
        return fail("clock", told, means="the time is wrong: certificates are refused, logs mislead", advice=advice)
    if status is None:
        return ok("clock", f"{told}; the kernel does not say whether anybody sets it")
    if status & _UNSYNCED:
        means = "nothing sets the clock: leases do not need it, but certificates and the order of logs do"
        return warn("clock", f"{told}, not synchronised", means=means, advice=advice)
    return ok("clock", f"{told}, synchronised")


def file_limit() -> Finding:
    """How many files a process that we start may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} (could be {_limit(hard)})"
    advice = f"raise it: ulimit -n {FILES_ENOUGH}, or LimitNOFILE={FILES_ENOUGH} in the unit"
    if soft == resource.RLIM_INFINITY or soft >= FILES_ENOUGH:
        return ok("open files", found)
    if soft < FILES_LEAST:
        return fail("open files", found, means="connections are refused when they are most needed", advice=advice)
    return warn("open files", found, means="a coordinator with many streams runs out of them", advice=advice)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def kernel_settings(root: Path) -> Iterator[Finding]:
    """Huge pages and governors, below ``root``. What a kernel does not have is not told."""
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if text:
        chosen = text.partition("[")[2].partition("]")[0]
        if chosen in {"always", "madvise"}:
            yield ok("huge pages", f"{chosen}: weights lie on them")
        else:
            yield warn(
                "huge pages",
                chosen or text,
                means="decoding takes up to a fifth longer",
                advice="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, at each start of the machine",
            )
    governors = {
        _read(path) for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    } - {""}
    if governors == {"performance"}:
        yield ok("governor", "performance")
    elif governors:
        yield warn(
            "governor",
            ", ".join(sorted(governors)),
            means="processors slow down between two tokens, and take their time to be fast again",
            advice="echo performance > …/cpufreq/scaling_governor of each processor; the ansible role base does it",
        )


def port(address: str) -> Finding:
    """Whether one could listen there, or who does."""
    name = f"port {address}"
    host, _, number = address.rpartition(":")
    if not host or not number.isdigit():
        return fail(name, "is not HOST:PORT", means="nothing can listen there", advice="give HOST:PORT")
    if number == "0":
        return ok(name, "any free one is taken")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(number), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except (OSError, OverflowError, UnicodeError) as error:
        holder = _holder(int(number))
        if holder and "kvferry" in holder:
            return ok(name, f"taken by {holder}: it is running")
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        return fail(
            name,
            f"{reason}{f', by {holder}' if holder else ''}",
            means="a process of ours cannot listen there",
            advice="stop who has it, or give another --listen",
        )
    return ok(name, "free")


def _holder(number: int) -> str:
    """The process that listens at the port, as far as we may see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
        pid = next(c.pid for c in connections if c.laddr and c.laddr.port == number and c.status == psutil.CONN_LISTEN)
        if pid is None:
            return "a process of another user"
        return f"pid {pid} ({' '.join(psutil.Process(pid).cmdline())[:100]})"
    except (psutil.Error, StopIteration, OSError):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
