"""Clocks that are wrong, authorities that have ended, and what is said of certificates at such a time."""

from __future__ import annotations

import datetime as dt
import json
import logging
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.trust import doors, handing_out, showing
from kvferry.trust.authority import Authority
from kvferry.trust.certificates import Role, new_key
from kvferry.trust.cli import certs
from kvferry.trust.errors import AuthorityInvalid, ClockWrong
from kvferry.trust.tokens import new_token

NOW = dt.datetime.now(dt.UTC)


def at(year: int) -> dt.datetime:
    return dt.datetime(year, 6, 1, tzinfo=dt.UTC)


def states(*places: Path) -> list[tuple[str, str]]:
    result = CliRunner().invoke(certs, ["show", *map(str, places), "--json"], catch_exceptions=False)
    return [(line["name"], line["state"]) for line in json.loads(result.output)]


def test_an_authority_that_has_expired_says_so_and_what_to_do(tmp_path: Path) -> None:
    Authority.create(tmp_path / "ca", "short", days=1)
    later = Authority(tmp_path / "ca", clock=lambda: NOW + dt.timedelta(days=2))
    for ask in (
        lambda: later.sign(new_key().public_key(), "gw", Role.GATEWAY),
        lambda: handing_out.issue(later, tmp_path / "gw", "gw", Role.GATEWAY, [], 1),
    ):
        with pytest.raises(AuthorityInvalid, match=r"has expired on .*: kvferry certs renew-authority "):
            ask()
    assert not (tmp_path / "gw").exists()
    later.renew_authority()
    later.sign(new_key().public_key(), "gw", Role.GATEWAY)


@pytest.mark.parametrize("year", [1949, 9990])
def test_with_a_clock_that_nothing_can_be_dated_by_nothing_is_made(tmp_path: Path, authority: Authority, year: int):
    there = Authority(authority.folder, clock=lambda: at(year))
    for ask in (
        lambda: Authority.create(tmp_path / "new", "x", clock=lambda: at(year)),
        lambda: there.sign(new_key().public_key(), "gw", Role.GATEWAY),
        there.renew_authority,
        lambda: new_token("acme", days=36_500, now=at(year)),
        lambda: new_token("acme", now=at(year)),
    ):
        with pytest.raises(ClockWrong, match=f"the clock of this machine says {year}-06-01: set it first"):
            ask()
    assert not (tmp_path / "new" / "ca.pem").exists()


def test_what_is_revoked_is_so_in_every_row_of_a_table(authority: Authority, tls, tmp_path: Path) -> None:
    folder = tls("board-1", Role.NODE)
    shutil.copy(folder / "cert.pem", tmp_path / "copy.pem")
    authority.revoke(name="board-1")
    found = states(folder, tmp_path / "copy.pem", authority.folder)
    assert [state for name, state in found if name == "board-1"] == ["revoked"] * 3
    assert states(folder) == [("board-1", "valid")], "its own list has not arrived"


def test_before_its_time_a_certificate_is_not_valid(
    authority: Authority, tls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tls("board-1", Role.NODE)
    for module in (showing, doors):
        monkeypatch.setattr(module, "now_utc", lambda: at(2020))
    found = states(authority.folder, folder, folder / "cert.pem", folder / "ca.pem")
    assert [state for _, state in found] == ["not yet valid"] * 5
    with caplog.at_level(logging.ERROR):
        doors.open_folder(folder, Role.NODE)
    assert "look at this machine's clock" in caplog.text
