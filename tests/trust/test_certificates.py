"""The private authority: what it signs, what it refuses, what it revokes, and how it is replaced."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import stat
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from kvferry.trust import handing_out
from kvferry.trust.authority import Authority
from kvferry.trust.certificates import Role, identity_of, new_key
from kvferry.trust.cli import certs
from kvferry.trust.errors import AuthorityInvalid, RequestInvalid, TlsFolderInvalid
from kvferry.trust.files import write_atomically
from kvferry.trust.tls_folder import TlsFolder, is_signed_by, read_material


def test_a_certificate_says_who_which_role_where_and_for_how_long(authority: Authority, tmp_path: Path) -> None:
    handing_out.issue(authority, tmp_path / "t", "node-1", Role.NODE, ["10.0.0.5", "board.lan"], 30)
    who = read_material(tmp_path / "t").identity
    assert (who.name, who.role, set(who.addresses)) == ("node-1", Role.NODE, {"10.0.0.5", "board.lan"})
    assert dt.timedelta(days=29) < who.not_after - dt.datetime.now(dt.UTC) <= dt.timedelta(days=30)


def test_secrets_are_their_owners_alone(authority: Authority, tls) -> None:
    folder = tls("node-1", Role.NODE)
    for secret in (authority.folder / "ca.key.pem", folder / "key.pem"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert not (folder / "ca.key.pem").exists(), "the authority's key stays with the authority"


def test_an_authority_is_never_written_over(authority: Authority) -> None:
    before = (authority.folder / "ca.key.pem").read_bytes()
    with pytest.raises(AuthorityInvalid, match="holds an authority already"):
        Authority.create(authority.folder, "another")
    assert (authority.folder / "ca.key.pem").read_bytes() == before


@pytest.mark.parametrize("n_written", range(5))
def test_an_authority_that_was_begun_and_interrupted_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_written: int
) -> None:
    """As site.yml does it, which looks for ca.pem: whatever was written before, the next run gets one that works."""
    left = iter(range(n_written))

    def write(path: Path, data: bytes, mode: int) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        write_atomically(path, data, mode)

    with monkeypatch.context() as interrupted, contextlib.suppress(KeyboardInterrupt):
        interrupted.setattr("kvferry.trust.authority.write_atomically", write)
        Authority.create(tmp_path / "ca", "test")
    is_made = (tmp_path / "ca" / "ca.pem").exists()
    assert is_made == (n_written == 4)
    authority = Authority(tmp_path / "ca") if is_made else Authority.create(tmp_path / "ca", "test")
    handing_out.issue(authority, tmp_path / "t", "node-1", Role.NODE, ["10.0.0.5"], 30)
    assert read_material(tmp_path / "t").identity.name == "node-1"


def test_a_key_that_somebody_else_put_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "ca.key.pem").write_text("of another authority")
    with pytest.raises(AuthorityInvalid, match="holds an authority already"):
        Authority.create(tmp_path, "test")
    assert (tmp_path / "ca.key.pem").read_text() == "of another authority"


@pytest.mark.parametrize(
    ("name", "role", "addresses", "days", "words"),
    [
        ("Node 1", Role.NODE, ["10.0.0.5"], 60, "no identity"),
        ("node-1", Role.NODE, [], 60, "--address"),
        ("node-1", Role.NODE, ["10.0.0.5:7071"], 60, "leave the port out"),
        ("node-1", Role.NODE, ["10.0.0.5"], 0, "1 to 3650 days"),
        ("node-1", Role.NODE, ["10.0.0.5"], 10**6, "1 to 3650 days"),
    ],
)
def test_what_cannot_be_signed_is_said_in_one_sentence(
    authority: Authority, name: str, role: Role, addresses: list[str], days: int, words: str
) -> None:
    with pytest.raises(RequestInvalid, match=words) as told:
        authority.sign(new_key().public_key(), name, role, addresses, days)
    assert "\n" not in str(told.value)


def test_the_key_of_a_request_never_leaves_its_folder(authority: Authority, tmp_path: Path) -> None:
    board, desk = tmp_path / "board", tmp_path / "desk"
    desk.mkdir()
    request = handing_out.make_request(board, "node-1", Role.NODE, ["10.0.0.5"])
    pem = handing_out.sign_request(authority, request, "node-1", Role.NODE, ["10.0.0.5"], 60)
    (desk / "cert.pem").write_bytes(pem)
    handing_out.install(board, desk / "cert.pem", authority.folder / "ca.pem", authority.folder / "revoked.pem")
    assert read_material(board).identity.name == "node-1"
    assert b"PRIVATE" not in request.parent.joinpath("cert.pem").read_bytes() + pem
    assert not (board / "request.pem").exists()
    assert not (board / "key.next.pem").exists()


def test_what_a_certificate_says_is_the_operators_word(authority: Authority, tmp_path: Path) -> None:
    request = handing_out.make_request(tmp_path / "board", "node-1", Role.NODE, ["10.0.0.5"])
    with pytest.raises(RequestInvalid, match="mixed up"):
        handing_out.sign_request(authority, request, "coordinator", Role.COORDINATOR, ["10.0.0.5"], 60)
    pem = handing_out.sign_request(authority, request, "node-1", Role.NODE, ["10.0.0.9"], 60)
    assert identity_of(x509.load_pem_x509_certificate(pem)).addresses == ("10.0.0.9",), "not what the request asked"


def test_a_certificate_for_another_key_is_not_installed(authority: Authority, tls, tmp_path: Path) -> None:
    mine, other = tls("node-1", Role.NODE), tls("node-2", Role.NODE)
    before = read_material(mine)
    with pytest.raises(TlsFolderInvalid, match="another key"):
        handing_out.install(mine, other / "cert.pem", authority.folder / "ca.pem", None)
    assert read_material(mine) == before


def test_revoking_an_identity_revokes_all_its_certificates_and_is_signed(authority: Authority, tls) -> None:
    first = read_material(tls("node-1", Role.NODE)).identity.serial
    second = read_material(tls("node-1", Role.NODE)).identity.serial
    other = tls("node-2", Role.NODE)
    assert {one.serial for one in authority.revoke(name="node-1")} == {f"{first:x}", f"{second:x}"}
    handing_out.hand_out_trust(authority, other)
    assert read_material(other).revoked == {first, second}
    assert authority.revoke(name="node-1") == [], "nothing is left to revoke"
    with pytest.raises(RequestInvalid, match="signed nothing"):
        authority.revoke(name="node-9")


def test_what_is_revoked_while_a_folder_is_renewed_is_revoked_there(
    authority: Authority, tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    stolen = read_material(tls("node-1", Role.NODE)).identity.serial
    folder = tls("node-2", Role.NODE)

    def revoke() -> None:
        authority.revoke(name="node-1")
        handing_out.hand_out_trust(authority, folder)

    read, revoking = handing_out._read, threading.Thread(target=revoke)

    def read_and_be_overtaken(path: Path) -> bytes:
        found = read(path)
        if not revoking.ident:
            revoking.start()
            revoking.join(0.3)
        return found

    monkeypatch.setattr(handing_out, "_read", read_and_be_overtaken)
    handing_out.renew(authority, folder, 30)
    revoking.join()
    assert read_material(folder).revoked == {stolen}


def test_a_list_that_another_authority_signed_is_not_believed(authority: Authority, tls, tmp_path: Path) -> None:
    folder = tls("node-1", Role.NODE)
    (folder / "revoked.pem").write_bytes((Authority.create(tmp_path / "x", "x").folder / "revoked.pem").read_bytes())
    with pytest.raises(TlsFolderInvalid, match="no authority"):
        read_material(folder)


def test_an_authority_is_replaced_without_a_gap(authority: Authority, tls) -> None:
    old = tls("node-1", Role.NODE)
    authority.renew_authority()
    new = tls("node-2", Role.NODE)
    handing_out.hand_out_trust(authority, old)
    assert read_material(old).identity.name == "node-1", "what the old key signed is still believed"
    certificate = x509.load_pem_x509_certificate((new / "cert.pem").read_bytes())
    assert is_signed_by(certificate, authority.trusted()[0])
    authority.forget_old()
    handing_out.hand_out_trust(authority, old)
    with pytest.raises(TlsFolderInvalid, match=r"has signed cert\.pem"):
        read_material(old)


def test_signing_at_once_loses_no_line_of_the_book(authority: Authority) -> None:
    def sign(number: int) -> None:
        authority.sign(new_key().public_key(), f"node-{number}", Role.NODE, ["10.0.0.5"])

    threads = [threading.Thread(target=sign, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.name for one in authority.book()} == {f"node-{number}" for number in range(8)}


def test_a_folder_is_read_again_when_it_changes_and_keeps_what_it_has_when_it_is_damaged(authority, tls) -> None:
    now = [0.0]
    path = tls("node-1", Role.NODE)
    folder = TlsFolder(path, clock=lambda: now[0])
    first, version = folder.material(), folder.version
    (path / "cert.pem").write_text("half a certif")
    now[0] = 1.0
    assert folder.material() == first
    handing_out.issue(authority, path, "node-1", Role.NODE, ["127.0.0.1"], 60)
    now[0] = 2.0
    assert folder.material().identity.serial != first.identity.serial
    assert folder.version == version + 1


def test_no_repr_shows_a_key(tls) -> None:
    material = read_material(tls("node-1", Role.NODE))
    assert "PRIVATE" not in repr(material)
    assert "BEGIN" not in repr(material.key_pem) or "key_pem" not in repr(material)


def test_the_command_line_from_init_to_show(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(certs, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    ca, out = str(tmp_path / "ca"), str(tmp_path / "gw")
    run("init", ca)
    run("issue", ca, "--role", "gateway", "--identity", "gw", "--out", out)
    run("renew", ca, out, "--days", "7")
    assert "revoked gateway gw" in run("revoke", ca, "gw", "--to", out)
    (shown,) = json.loads(run("show", out, "--json"))
    assert (shown["name"], shown["role"], shown["state"]) == ("gw", "gateway", "revoked")
    assert len(json.loads(run("show", ca, "--json"))) == 3, "the authority, the first certificate and the renewed one"
