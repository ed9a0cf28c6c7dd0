"""The time that certificates and tokens are compared with."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Final

from kvferry.trust.errors import ClockWrong

Clock = Callable[[], dt.datetime]

_FIRST_YEAR: Final = 1970
_LAST_YEAR: Final = 2200
"""Certificates say nothing before 1950, and Python's clock ends in 2262."""


def now_utc() -> dt.datetime:
    """As the machine has it. Raises ClockWrong for a time that not even Python can tell."""
    try:
        return dt.datetime.now(dt.UTC)
    except (OverflowError, ValueError) as error:
        raise ClockWrong(f"the clock of this machine says a time after {_LAST_YEAR}: set it first") from error


def usable(now: dt.datetime) -> dt.datetime:
    """The same, if something can be dated with it. Raises ClockWrong."""
    if not _FIRST_YEAR <= now.year <= _LAST_YEAR:
        raise ClockWrong(f"the clock of this machine says {now:%Y-%m-%d}: set it first")
    return now


def validity(not_before: dt.datetime, not_after: dt.datetime, now: dt.datetime) -> str:
    """Of a certificate: "valid", "expired" or "not yet valid"."""
    if not_after <= now:
        return "expired"
    return "not yet valid" if now < not_before else "valid"
