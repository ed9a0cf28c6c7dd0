"""Numbers with units, for a person."""

from __future__ import annotations


def bytes_text(n_bytes: int) -> str:
    """12.3 MiB."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def duration_text(seconds: float) -> str:
    """3.2 s, 4 min, 5.1 h, 3.0 d."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"
