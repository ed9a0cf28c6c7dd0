"""What the dashboard's requests share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.gateway.dashboard.audience import Audience
from kvferry.gateway.dashboard.history import History
from kvferry.gateway.dashboard.watcher import Watchers
from kvferry.gateway.dashboard.whereabouts import Whereabouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Made once. ``drill_reports``: a folder; None: there are none to show."""

    watchers: Watchers
    history: History
    whereabouts: Whereabouts
    audience: Audience
    may_kill: bool
    drill_reports: Path | None
