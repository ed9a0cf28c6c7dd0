"""What a check is given, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeAlias

KV_BYTES: Final = 1 << 30
"""What a node takes for rows unless it is told otherwise."""


class Verdict(StrEnum):
    """Nothing to do; worth a look; or kvferry does not work like that."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """``check``: what was looked at. ``found``: what is there. ``means`` and ``advice``: empty when all is well."""

    check: str
    verdict: Verdict
    found: str
    means: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is to be examined beside the machine; None or empty: not asked for.

    ``store``: a folder or an address. ``listen``: HOST:PORT. ``kv_bytes``: memory for rows. ``quick``: leave out what
    takes seconds.
    """

    model: str | None = None
    store: str | None = None
    tls_dir: Path | None = None
    listen: tuple[str, ...] = ()
    kv_bytes: int = KV_BYTES
    quick: bool = False


Check: TypeAlias = Callable[[Subject], Iterator[Finding]]


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Verdict.OK, found)


def warn(check: str, found: str, *, means: str, advice: str) -> Finding:
    """Works, but not as it should."""
    return Finding(check, Verdict.WARN, found, means, advice)


def fail(check: str, found: str, *, means: str, advice: str) -> Finding:
    """Does not work."""
    return Finding(check, Verdict.FAIL, found, means, advice)
