"""The drill reports of a folder: one folder each, with a report.json (docs/drills.md). Any of them may be anything."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, Final

MAX_REPORTS: Final = 200
MAX_BYTES: Final = 4 << 20

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

HEAD: Final = ("name", "target", "started", "seconds", "verdict", "reason", "nodes")
"""What the list shows."""


def list_reports(folder: Path) -> list[dict[str, Any]]:
    """The newest first, at most 200; what is no report is left out. Reads files: not for the event loop."""
    try:
        names = sorted((entry.name for entry in folder.iterdir() if NAME.fullmatch(entry.name)), reverse=True)
    except OSError:  # nobody drilled yet
        return []
    reports = []
    for name in names:
        report = read_report(folder, name)
        if report is not None:
            reports.append({"id": name, **{field: report.get(field) for field in HEAD}})
        if len(reports) == MAX_REPORTS:
            break
    return reports


def read_report(folder: Path, name: str) -> dict[str, Any] | None:
    """One report; None when there is none of that name that can be read."""
    if NAME.fullmatch(name) is None:
        return None
    try:
        report = json.loads(_read_file(folder / name / "report.json"))
        json.dumps(report, allow_nan=False, ensure_ascii=False).encode()  # NaN and half characters cannot be told on
    except (OSError, ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) else None


def _read_file(path: Path) -> bytes:
    """Of a bounded size. Raises ValueError for what is larger or no file (a pipe would keep us), OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is no file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} is too large")
    return data
