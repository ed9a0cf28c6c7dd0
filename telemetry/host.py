"""What every process of ours tells of itself and of its board: its build, its certificate, heat, and what was mended.

What a machine does not have (thermal zones, cpufreq, a certificate) has no metric.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvferry.telemetry import events
from kvferry.telemetry.certificate import expiry_times
from kvferry.telemetry.families import info, labelled, labelled_counter

SYS: Final = Path("/sys")


class HostMetrics(Collector):
    """``role``: node, coordinator or gateway. ``tls_dir``: where its certificate lies, read at each scrape, since it is
    renewed while we run. ``sys``: where the kernel tells about the board."""

    def __init__(self, role: str, tls_dir: Path | None = None, sys: Path = SYS) -> None:
        self._build = {
            "role": role,
            "version": version("kvferry"),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        self._tls_dir = tls_dir
        self._sys = sys

    def collect(self) -> Iterator[Metric]:
        """Small files only; nothing here can hang on a network."""
        yield info("build", "What this process is built of.", self._build)
        yield labelled("temperature_celsius", "Of a thermal zone.", "zone", temperatures(self._sys))
        yield labelled(
            "cpu_frequency_limit_ratio", "What a processor may run at, in parts of what it could: below 1 it is "
            "throttled.", "policy", frequency_limits(self._sys),
        )  # fmt: skip
        yield labelled_counter("events", "What is rare and worth knowing.", "event", events.counts())
        if self._tls_dir is not None:
            yield labelled(
                "certificate_expiry_timestamp_seconds", "When a certificate of ours ends, in Unix time.", "file",
                expiry_times(self._tls_dir),
            )  # fmt: skip


def temperatures(sys: Path) -> dict[str, float]:
    """Degrees Celsius by zone: the hottest of those of one name."""
    found: dict[str, float] = {}
    for zone in sorted(sys.glob("class/thermal/thermal_zone*")):
        try:
            name, degrees = (zone / "type").read_text().strip(), int((zone / "temp").read_text()) / 1000
        except (OSError, ValueError):  # a sensor that is asleep
            continue
        found[name] = max(degrees, found.get(name, degrees))
    return found


def frequency_limits(sys: Path) -> dict[str, float]:
    """By cpufreq policy (the processors that share a clock). The kernel lowers scaling_max_freq when it cools."""
    found: dict[str, float] = {}
    for policy in sorted(sys.glob("devices/system/cpu/cpufreq/policy*")):
        try:
            allowed, possible = (int((policy / f).read_text()) for f in ("scaling_max_freq", "cpuinfo_max_freq"))
        except (OSError, ValueError):
            continue
        if possible > 0:
            found[policy.name] = allowed / possible
    return found
