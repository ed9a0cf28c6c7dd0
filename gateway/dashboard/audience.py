"""Whom the dashboard is for."""

from __future__ import annotations

from enum import StrEnum


class Audience(StrEnum):
    """As the setting has it."""

    LOOPBACK = "loopback"
    ALL = "all"
    OFF = "off"
