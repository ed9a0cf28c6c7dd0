from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.trust.authority import Authority
from kvferry.trust.certificates import Role
from kvferry.trust.handing_out import issue

LOOPBACK = ("127.0.0.1", "localhost")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", "test")


@pytest.fixture
def tls(authority: Authority, tmp_path: Path):
    """Makes the folder of a process on the loopback: ``tls("node-1", Role.NODE)``."""

    def make(name: str, role: Role, *, of: Authority = authority, days: int = 60) -> Path:
        folder = tmp_path / "tls" / of.folder.name / name
        issue(of, folder, name, role, LOOPBACK, days)
        return folder

    return make
