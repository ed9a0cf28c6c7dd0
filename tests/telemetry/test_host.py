"""What every process tells of itself and its board."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvferry.telemetry import events
from kvferry.telemetry.host import HostMetrics

END = dt.datetime(2027, 3, 1, tzinfo=dt.UTC)


def samples_of(metrics: HostMetrics) -> dict[str, dict[str, float]]:
    """By metric, the value by label."""
    return {m.name: {"/".join(s.labels.values()): s.value for s in m.samples} for m in metrics.collect()}


def certificate(ends: dt.datetime) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, ends - dt.timedelta(days=60), ends)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    for number, (kind, degrees) in enumerate((("soc", "61234"), ("asleep", "no number"), ("soc", "64000"))):
        zone = tmp_path / "class" / "thermal" / f"thermal_zone{number}"
        write(zone / "type", f"{kind}\n")
        write(zone / "temp", degrees)
    for policy, allowed in (("policy0", "1800000"), ("policy4", "1200000")):
        clock = tmp_path / "devices" / "system" / "cpu" / "cpufreq" / policy
        write(clock / "scaling_max_freq", f"{allowed}\n")
        write(clock / "cpuinfo_max_freq", "1800000\n" if policy == "policy0" else "2400000\n")
    return tmp_path


def test_a_board_tells_its_hottest_sensors_and_what_its_processors_may_still_do(board: Path) -> None:
    found = samples_of(HostMetrics("node", sys=board))
    assert found["kvferry_temperature_celsius"] == {"soc": 64.0}
    assert found["kvferry_cpu_frequency_limit_ratio"] == {"policy0": 1.0, "policy4": 0.5}


def test_what_a_machine_does_not_have_has_no_value(tmp_path: Path) -> None:
    found = samples_of(HostMetrics("gateway", sys=tmp_path))
    assert found["kvferry_temperature_celsius"] == found["kvferry_cpu_frequency_limit_ratio"] == {}
    assert "kvferry_certificate_expiry_timestamp_seconds" not in found
    assert next(iter(found["kvferry_build_info"])).startswith("gateway/")


def test_the_end_of_a_certificate_is_read_anew_at_each_scrape(tmp_path: Path) -> None:
    metrics = HostMetrics("node", tls_dir=tmp_path, sys=tmp_path)
    name = "kvferry_certificate_expiry_timestamp_seconds"
    (tmp_path / "cert.pem").write_bytes(certificate(END))
    (tmp_path / "ca.pem").write_text("damaged")
    assert samples_of(metrics)[name] == {"cert.pem": END.timestamp()}
    later = END + dt.timedelta(days=60)
    (tmp_path / "cert.pem").write_bytes(certificate(later) + certificate(END))
    assert samples_of(metrics)[name] == {"cert.pem": END.timestamp()}
    (tmp_path / "cert.pem").write_bytes(certificate(later))
    assert samples_of(metrics)[name] == {"cert.pem": later.timestamp()}


def test_rare_events_are_there_before_they_happen(tmp_path: Path) -> None:
    metrics = HostMetrics("node", sys=tmp_path)
    before = samples_of(metrics)["kvferry_events"]
    assert set(before) == {"watchdog_missed", "compile_cache_healed"}
    events.count("compile_cache_healed")
    assert samples_of(metrics)["kvferry_events"]["compile_cache_healed"] == before["compile_cache_healed"] + 1
