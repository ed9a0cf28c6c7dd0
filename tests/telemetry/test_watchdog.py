"""A service manager hears what is true, and nothing from what hangs."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from listening_manager import ListeningManager

from kvferry.telemetry import events
from kvferry.telemetry.service_manager import ServiceManager
from kvferry.telemetry.watchdog import Watchdog, loop_check


def test_without_a_manager_nothing_is_sent_and_nothing_fails() -> None:
    manager = ServiceManager({})
    manager.ready("serves")
    manager.alive("serves")
    manager.stopping("ends", 5)
    assert manager.watchdog_seconds is None


def test_each_message_is_one_datagram_of_names_and_values(tmp_path: Path) -> None:
    with ListeningManager(tmp_path, watchdog_seconds=30) as listening:
        manager = ServiceManager(listening.environment)
        manager.starting("compiles", 300)
        manager.ready("serves\nREADY=0")
        manager.alive("3 turns")
        manager.alive("3 turns")
        manager.stopping("drains", 1.5)
        assert listening.listen() == [
            {"STATUS": "compiles", "EXTEND_TIMEOUT_USEC": "300000000"},
            {"READY": "1", "STATUS": "serves READY=0"},
            {"WATCHDOG": "1", "STATUS": "3 turns"},
            {"WATCHDOG": "1"},  # the same is not said again
            {"STOPPING": "1", "STATUS": "drains", "EXTEND_TIMEOUT_USEC": "1500000"},
        ]


def test_a_socket_may_have_an_abstract_name() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        name = f"kvferry-test-{os.getpid()}"
        listening.bind(f"\0{name}")
        listening.settimeout(5)
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).ready("serves")
        assert listening.recv(100) == b"READY=1\nSTATUS=serves"


def test_a_manager_that_is_gone_fails_no_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready("serves")
    assert "could not be told READY=1" in caplog.text


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),  # of the process that started this one
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({}, None),
    ],
)
def test_it_is_watched_as_the_manager_says(environment: dict[str, str], seconds: float | None) -> None:
    assert ServiceManager({"NOTIFY_SOCKET": "/nowhere"} | environment).watchdog_seconds == seconds


def test_what_hangs_is_not_fed_and_is_fed_again_when_it_goes_on(tmp_path: Path) -> None:
    beat_at, changes = [time.monotonic() + 60], []
    n_missed = events.counts()["watchdog_missed"]
    with ListeningManager(tmp_path, watchdog_seconds=0.2) as listening:
        manager = ServiceManager(listening.environment)
        with Watchdog(manager, [loop_check(lambda: beat_at[0])], lambda: "serves", changes.append):
            assert listening.is_fed_during(5)
            beat_at[0] = time.monotonic() - 1
            hangs = listening.wait_for(lambda said: "has not come around" in said.get("STATUS", ""), 5)
            assert "WATCHDOG" not in hangs
            assert not listening.is_fed_during(0.3)
            beat_at[0] = time.monotonic() + 60
            assert listening.wait_for(lambda said: "WATCHDOG" in said, 5) == {"WATCHDOG": "1", "STATUS": "serves"}
    assert [bool(change) for change in changes] == [True, False]
    assert events.counts()["watchdog_missed"] == n_missed + 1
