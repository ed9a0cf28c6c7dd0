"""Which registry a coordinator opens, and where it says that it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.errors import InvalidSettings
from kvferry.coordinator.opening import open_registry
from kvferry.trust.errors import PlaintextRefused

ETCD = "etcd://10.0.0.1:2379,10.0.0.2:2379"


def settings(**given: Any) -> CoordinatorSettings:
    return CoordinatorSettings.load({"model": "m", **given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "state is missing"),
        ({"state": Path("s"), "registry": ETCD}, "--state is of no use beside a registry in etcd"),
        ({"registry": "10.0.0.1:2379"}, "--registry '10.0.0.1:2379' is not etcd://"),
        ({"registry": ETCD, "listen": "0.0.0.0:7070"}, "advertise is missing"),
        ({"registry": ETCD, "advertise": "no host:1"}, "--advertise 'no host:1' is not HOST:PORT"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSettings, match=says):
        settings(**given)


@pytest.mark.parametrize(
    ("given", "reached_at"),
    [
        ({"state": Path("s")}, "127.0.0.1:41"),
        ({"registry": ETCD, "advertise": "board-1"}, "board-1:41"),
        ({"registry": ETCD, "advertise": "board-1:7"}, "board-1:7"),
        ({"registry": ETCD, "advertise": "board-1", "listen": "0.0.0.0:0"}, "board-1:41"),
    ],
)
def test_a_coordinator_is_reached_where_it_says(given: dict[str, Any], reached_at: str) -> None:
    assert settings(**given).advertised("127.0.0.1:41") == reached_at


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"registry": ETCD}, PlaintextRefused, "etcd at 10.0.0.1 in clear"),
        ({"registry": ETCD.replace("etcd", "etcds")}, InvalidSettings, "asks for a certificate: give --tls-dir"),
    ],
    ids=["in clear", "without a certificate"],
)
async def test_conversations_do_not_go_to_etcd_in_clear(
    given: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        async with open_registry(settings(**given)):
            pass
