"""A node's heartbeat says how hot its board is, if the kernel does."""

from __future__ import annotations

from pathlib import Path

from kvferry.node.thermometer import LOOK_SECONDS, Thermometer


def test_the_hottest_zone_is_told_and_looked_at_from_time_to_time(tmp_path: Path) -> None:
    for number, degrees in enumerate(("48000", "61500")):
        zone = tmp_path / "class/thermal" / f"thermal_zone{number}"
        zone.mkdir(parents=True)
        (zone / "type").write_text(f"zone{number}\n")
        (zone / "temp").write_text(degrees)
    thermometer = Thermometer(tmp_path)
    assert thermometer.hottest(100.0) == 61.5
    (tmp_path / "class/thermal/thermal_zone0/temp").write_text("72000")
    assert thermometer.hottest(100.0 + LOOK_SECONDS / 2) == 61.5
    assert thermometer.hottest(100.0 + LOOK_SECONDS) == 72.0


def test_a_board_without_zones_has_no_temperature(tmp_path: Path) -> None:
    assert Thermometer(tmp_path).hottest(0.0) is None
