"""Watching a stream of text for stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.errors import InvalidSampling


class StopWatcher:
    """Passes text on until a stop string is complete, and never any part of that stop string.

    The stop string that is complete first ends the text; of several that are complete at the same character, the
    longest. So the outcome does not depend on how the text is cut into pushes. Not for several threads at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidSampling for an empty stop string, which would be complete before anything."""
        if any(not stop for stop in stops):
            raise InvalidSampling("a stop string is empty; each must have at least one character")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""  # what was pushed and may be the beginning of a stop string
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """What can be passed on now, and whether a stop string is complete; after that nothing is passed on."""
        if self._stopped:
            return "", True
        waiting = self._held + text
        start = self._first_stop(waiting)
        if start is not None:
            self._held = ""
            self._stopped = True
            return waiting[:start], True
        n_held = self._n_held(waiting)
        self._held = waiting[len(waiting) - n_held :]
        return waiting[: len(waiting) - n_held], False

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string begins that is complete first."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _n_held(self, text: str) -> int:
        """The length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for n in range(min(len(text), longest - 1), 0, -1):
            tail = text[len(text) - n :]
            if any(stop.startswith(tail) for stop in self._stops):
                return n
        return 0
