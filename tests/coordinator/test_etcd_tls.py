"""A registry in an etcd that asks for certificates: who is let in, and what becomes of it when they are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.errors import CannotStart
from kvferry.coordinator.opening import open_registry
from kvferry.trust import handing_out
from kvferry.trust.authority import Authority
from kvferry.trust.certificates import Role
from kvferry.trust.tls_folder import TlsFolder

from .etcd_cluster import BINARY, COORDINATOR, WHY_NOT, EtcdCluster

pytestmark = pytest.mark.skipif(BINARY is None, reason=WHY_NOT)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority", "test")


def issue(authority: Authority, role: Role, *names: str) -> Path:
    """A folder with a certificate for this machine."""
    folder = authority.folder.parent / role
    handing_out.issue(authority, folder, f"a-{role}", role, ["127.0.0.1", *names], 30)
    return folder


@pytest.fixture
def etcd(tmp_path: Path, authority: Authority) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path, tls_dir=issue(authority, Role.CLIENT)) as cluster:
        yield cluster


def settings(etcd: EtcdCluster, tls_dir: Path) -> CoordinatorSettings:
    return CoordinatorSettings.load({"model": "m", "registry": etcd.url, "tls_dir": tls_dir})


async def test_a_coordinator_is_let_in_and_stays_when_its_certificate_is_replaced(
    etcd: EtcdCluster, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.trust.rereading.LOOK_SECONDS", 0.0)
    tls_dir = issue(authority, Role.COORDINATOR, COORDINATOR)
    before = TlsFolder(tls_dir).material().identity.serial
    async with open_registry(settings(etcd, tls_dir)) as registry:
        await registry.announce("host:1")
        handing_out.renew(authority, tls_dir, 30)
        assert TlsFolder(tls_dir).material().identity.serial != before
        await registry.announce("host:2")


async def test_a_node_is_not_let_in_though_the_same_authority_knows_it(etcd: EtcdCluster, authority: Authority) -> None:
    with pytest.raises(CannotStart, match="no member of etcd can be reached"):
        async with open_registry(settings(etcd, issue(authority, Role.NODE))):
            pass
