"""What files say, read again when they change: certificates and tokens are replaced without a restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvferry.trust.errors import TrustError
from kvferry.trust.files import stamp_of

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
"""Between looks at the files: what was revoked is refused so soon after the news arrives. A look costs some 10 µs."""


class Reread(Generic[T]):
    """Any thread may call. What cannot be used leaves in force what was read before, and is told in the log once."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T], what: str, clock: Callable[[], float]) -> None:
        """``what`` they hold, for the log. ``clock``: seconds that do not jump. Raises what ``read`` raises."""
        self._files, self._read, self._what, self._clock = files, read, what, clock
        self._lock = threading.Lock()
        self._looked_at = clock()
        self._stamp = stamp_of(*files)  # before they are read: a change in between is found by the next look
        self._told = self._stamp
        self._value = read()
        self._version = 0

    def current(self) -> tuple[T, int]:
        """What is in force, and a number that grows whenever something else came into force."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= LOOK_SECONDS:
                self._looked_at = now
                self._look()
            return self._value, self._version

    def _look(self) -> None:
        stamp = stamp_of(*self._files)
        if stamp == self._stamp:
            return
        try:
            value = self._read()
        except TrustError as error:  # they are being replaced, or a disk failed for once: each look tries again
            if stamp != self._told:
                self._told = stamp
                log.warning("%s stay as they were: %s", self._what, error)
            return
        self._stamp = stamp
        if value != self._value:
            self._value = value
            self._version += 1
            log.info("%s were read again", self._what)
