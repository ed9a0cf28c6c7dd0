"""Logs for machines: one JSON object a line, with the conversation's ids as fields. Never text of a conversation.

``log_with`` says what the rest of this task (or thread) works on; whatever is logged meanwhile, in any room, has it.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final, TextIO

from kvferry.telemetry.options import Format
from kvferry.terminal.words import visible

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

FIELDS: Final = ("session_id", "turn_id", "node_id", "epoch")
"""What ``log_with`` and a call's ``extra=`` may name, in this order in each line. Ids only."""

_NOTHING: Final[Mapping[str, str | int]] = {}

_fields: ContextVar[Mapping[str, str | int]] = ContextVar("kvferry_log_fields", default=_NOTHING)


def log_with(**fields: str | int) -> None:
    """Names of FIELDS and their values, until named again or the task ends; other fields stay as they are."""
    if unknown := fields.keys() - set(FIELDS):
        raise ValueError(f"no field of a log: {', '.join(sorted(unknown))}")
    _fields.set({**_fields.get(), **fields})


def configure_logs(level: str, log_format: Format | None = None, stream: TextIO | None = None, **always: str) -> None:
    """Log everything of this process to ``stream`` (default: standard error), with the fields of ``always``.

    Without a format: JSON under systemd, where standard error is the journal, else text for a person.
    """
    to = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(to)
    chosen = log_format or ("json" if _is_journal(to) else "text")
    handler.setFormatter(JsonFormatter(always) if chosen == "json" else TextFormatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """For a person, whose terminal is not for what a message quotes."""

    def format(self, record: logging.LogRecord) -> str:
        """As logging does, with control characters to be seen only."""
        return visible(super().format(record))


class JsonFormatter(logging.Formatter):
    """``always``: fields of every line, where the line itself does not say otherwise."""

    def __init__(self, always: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._always = always or {}

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        line: dict[str, str | int] = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        known = {**self._always, **_fields.get(), **record.__dict__}
        line |= {name: known[name] for name in FIELDS if known.get(name) not in {None, ""}}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _is_journal(stream: TextIO) -> bool:
    """systemd.exec(5): JOURNAL_STREAM names the device and inode of what the service was given."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
