"""API tokens: what is kept of them, which are valid, how much they may ask, and how clients show theirs."""

from __future__ import annotations

import datetime as dt
import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.trust.bearer import Secret, check_way, read_token
from kvferry.trust.cli import tokens as commands
from kvferry.trust.errors import PlaintextRefused, TokensInvalid, Unauthenticated
from kvferry.trust.limits import Bucket
from kvferry.trust.rereading import Reread
from kvferry.trust.tokens import TokenBook, new_token, write_tokens


def test_the_file_does_not_hold_the_token_and_is_its_owners_alone(tmp_path: Path) -> None:
    text, token = new_token("acme")
    path = tmp_path / "tokens.json"
    write_tokens(path, [token])
    assert text.rpartition("_")[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert TokenBook(path).find(text) == token


@pytest.mark.parametrize(
    "damage", [lambda t: t[:-1] + ("A" if t[-1] != "A" else "B"), lambda t: t[:-1], lambda t: "", str.upper]
)
def test_any_other_text_is_refused_without_being_told(tmp_path: Path, damage) -> None:
    text, token = new_token("acme")
    write_tokens(tmp_path / "t", [token])
    with pytest.raises(Unauthenticated) as told:
        TokenBook(tmp_path / "t").find(damage(text))
    assert text[-20:] not in str(told.value)


def test_expiry_and_revocation_hold_without_a_restart(tmp_path: Path) -> None:
    path, clock, wall = tmp_path / "t", [0.0], [dt.datetime(2026, 1, 1, tzinfo=dt.UTC)]
    short, short_kept = new_token("acme", days=1, now=wall[0])
    text, kept = new_token("acme", now=wall[0])
    write_tokens(path, [short_kept, kept])
    book = TokenBook(path, clock=lambda: clock[0], wall=lambda: wall[0])
    found = book.find(text)
    wall[0] += dt.timedelta(days=2)
    with pytest.raises(Unauthenticated, match="expired"):
        book.find(short)
    write_tokens(path, [kept.model_copy(update={"revoked_at": wall[0]})])
    clock[0] += 1
    with pytest.raises(Unauthenticated, match="revoked"):
        book.check(found)
    path.write_text("{ half")
    clock[0] += 1
    with pytest.raises(Unauthenticated, match="revoked"):
        book.find(text)  # a damaged file changes nothing


def test_news_that_could_not_be_read_at_once_are_read_later_and_told_once(tmp_path: Path, caplog) -> None:
    """A disk that fails for a moment must not keep a revocation from coming into force."""
    file, seconds, fails = tmp_path / "news", [0.0], [False, True, True, False]
    file.write_text("old")

    def read() -> str:
        if fails.pop(0):
            raise TokensInvalid("input/output error")
        return file.read_text()

    reread = Reread([file], read, "the news", lambda: seconds[0])
    file.write_text("revoked")
    seen = []
    for _ in range(3):
        seconds[0] += 1
        seen.append(reread.current())
    assert seen == [("old", 0), ("old", 0), ("revoked", 1)]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the news stay as they were: input/output error"
    ]


def test_a_line_whose_time_has_no_zone_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_tokens(path, [new_token("acme")[1]])
    told = json.loads(path.read_text())
    told["tokens"][0]["expires_at"] = "2026-12-31T00:00:00"
    path.write_text(json.dumps(told))
    with pytest.raises(TokensInvalid, match=r"no tokens file of kvferry tokens: tokens\.0\.expires_at: "):
        TokenBook(path)


def test_a_bucket_gives_back_with_time() -> None:
    bucket = Bucket(per_minute=60, filled_s=0.0)
    assert [bucket.take(0.0) for _ in range(60)] == [0.0] * 60
    assert bucket.take(0.0) == pytest.approx(1.0)
    assert bucket.take(1.0) == 0.0
    assert bucket.take(1.0) == pytest.approx(1.0)


def test_a_token_does_not_cross_a_network_in_clear() -> None:
    check_way("127.0.0.1:7070,[::1]:7070,localhost:1", has_tls=False, is_allowed=False)
    check_way("10.0.0.1:7070", has_tls=True, is_allowed=False)
    with pytest.raises(PlaintextRefused, match="in clear"):
        check_way("127.0.0.1:7070,10.0.0.1:7070", has_tls=False, is_allowed=False)


def test_a_token_file_is_one_line_and_no_error_shows_it(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "t").write_text("kvf_secret words\n")
    with pytest.raises(TokensInvalid) as told:
        read_token(tmp_path / "t")
    assert "secret" not in str(told.value)
    monkeypatch.setenv("KVFERRY_TOKEN", "kvf_canary")
    token = read_token(None)
    assert token == Secret("kvf_canary")
    assert "canary" not in f"{token!r} {token}"


def test_the_command_line(tmp_path: Path) -> None:
    path = str(tmp_path / "tokens.json")

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(commands, [*arguments[:1], "--file", path, *arguments[1:]])
        assert result.exit_code == code, result.output
        return result.output

    text = run("add", "--tenant", "acme", "--requests-per-minute", "60", "--concurrent-turns", "2").strip()
    (listed,) = json.loads(run("list", "--json"))
    assert (listed["tenant"], listed["requests_per_minute"], listed["concurrent_turns"]) == ("acme", 60, 2)
    assert "sha256" not in listed
    run("revoke", listed["id"])
    with pytest.raises(Unauthenticated, match="revoked"):
        TokenBook(Path(path)).find(text)
    run("revoke", "000000000000", code=1)


@pytest.mark.parametrize("days", ["nan", "inf", "1e300", "0", "-5"])
def test_a_token_that_is_never_valid_or_ends_beyond_all_calendars_is_not_made(tmp_path: Path, days: str) -> None:
    file = tmp_path / "tokens.json"
    result = CliRunner().invoke(commands, ["add", "--file", str(file), "--tenant", "acme", "--days", days])
    assert isinstance(result.exception, TokensInvalid)
    assert "more than 0 and at most 36500 days" in str(result.exception)
    assert not file.exists()
