"""What a process is told at start: one frozen value, made once of flags, environment and a TOML file."""

from kvferry.settings.fields import setting
from kvferry.settings.model import Settings
from kvferry.settings.sources import Origin

__all__ = ["Origin", "Settings", "setting"]
