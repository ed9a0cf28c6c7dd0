"""`kvferry security check`: everything that is open is found, and nothing that is not."""

from __future__ import annotations

import json
from pathlib import Path

import grpc.aio
import pytest
from click.testing import CliRunner

from kvferry.doctor.finding import Verdict
from kvferry.trust.certificates import Role
from kvferry.trust.doors import bind, open_folder
from kvferry.trust.security_cli import security
from kvferry.trust.security_probe import findings_at
from kvferry.trust.security_settings import findings_of, processes_in
from kvferry.trust.tokens import new_token, write_tokens

OPEN_COORDINATOR = """
listen = "10.0.0.1:7070"
insecure_plaintext = true
reflection = true
metrics = "10.0.0.1:9100"
registry = "etcd://127.0.0.1:2379,10.0.0.2:2379/k"
store = "/mnt/kvferry"
"""


def found(path: Path) -> dict[str, set[str]]:
    """By verdict, what of which file."""
    findings = [finding for process in processes_in(path) for finding in findings_of(process)]
    assert all(finding.advice and finding.means for finding in findings if finding.verdict is not Verdict.OK)
    return {str(verdict): {f.check for f in findings if f.verdict is verdict} for verdict in Verdict}


def test_all_that_is_open_is_found(tmp_path: Path) -> None:
    (tmp_path / "coordinator.toml").write_text(OPEN_COORDINATOR)
    (tmp_path / "gateway.env").write_text('KVFERRY_GATEWAY_LISTEN="10.0.0.1:8080"\nKVFERRY_GATEWAY_ALLOW_KILL=true\n')
    seen = found(tmp_path)
    assert seen["fail"] == {
        "coordinator.toml: listens", "coordinator.toml: registry", "gateway.env: listens", "gateway.env: allow_kill",
    }  # fmt: skip
    assert seen["warn"] == {
        f"coordinator.toml: {what}" for what in ("reflection", "metrics", "tokens", "snapshots")
    }  # fmt: skip


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:gRPC"])
def test_an_address_that_is_none_is_not_taken_for_a_closed_one(tmp_path: Path, address: str) -> None:
    (tmp_path / "node.toml").write_text(f'listen = "{address}"\n')
    assert found(tmp_path)["fail"] == {"node.toml: listens"}


def test_a_fleet_that_is_closed_has_nothing_to_say(tmp_path: Path, tls) -> None:
    key, tokens = tmp_path / "store.key", tmp_path / "tokens.json"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    write_tokens(tokens, [new_token("acme", days=90, requests_per_minute=60)[1]])
    sealed = f'store = "/mnt/kvferry"\nstore_key_file = "{key}"\nstore_encrypted = true\n'
    coordinator, node = tls("coordinator", Role.COORDINATOR), tls("node-1", Role.NODE)
    folder = tmp_path / "etc"
    folder.mkdir()
    listens = 'listen = "10.0.0.1:7070"\n'
    (folder / "coordinator.toml").write_text(f'{listens}tls_dir = "{coordinator}"\ntokens = "{tokens}"\n{sealed}')
    (folder / "node.toml").write_text(f'{listens}tls_dir = "{node}"\n{sealed}')
    seen = found(folder)
    assert seen["fail"] == seen["warn"] == set()
    assert "node.toml: cert.pem" in seen["ok"]


@pytest.mark.parametrize("name", ["key.pem", "store.key", "tokens.json"])
def test_what_others_may_read_is_told(tmp_path: Path, tls, name: str) -> None:
    folder = tls("coordinator", Role.COORDINATOR)
    write_tokens(folder / "tokens.json", [new_token("acme", days=1, concurrent_turns=1)[1]])
    (folder / "store.key").write_bytes(bytes(32))
    (folder / "store.key").chmod(0o600)
    (folder / name).chmod(0o644)
    file = tmp_path / "coordinator.toml"
    file.write_text(
        f'listen = "10.0.0.1:7070"\ntls_dir = "{folder}"\ntokens = "{folder}/tokens.json"\n'
        f'store = "/mnt"\nstore_key_file = "{folder}/store.key"\nstore_encrypted = true\n'
    )
    seen = found(file)
    assert len(seen["fail"] | seen["warn"]) == 1


def test_a_certificate_that_ends_soon_and_a_missing_list_are_told(tmp_path: Path, tls) -> None:
    folder = tls("node-1", Role.NODE, days=7)
    (folder / "revoked.pem").unlink()
    file = tmp_path / "node.toml"
    file.write_text(f'listen = "10.0.0.1:7071"\ntls_dir = "{folder}"\n')
    assert found(file)["warn"] == {"node.toml: cert.pem", "node.toml: revoked.pem"}


async def test_a_running_server_is_asked_as_a_stranger_would(tls) -> None:
    import asyncio

    server, plain = grpc.aio.server(), grpc.aio.server()
    secured = bind(server, "127.0.0.1:0", open_folder(tls("node-1", Role.NODE, days=7)))
    open_to_all = bind(plain, "127.0.0.1:0", None)
    await server.start()
    await plain.start()
    try:
        of_secured = await asyncio.to_thread(lambda: list(findings_at(f"127.0.0.1:{secured}")))
        of_plain = await asyncio.to_thread(lambda: list(findings_at(f"127.0.0.1:{open_to_all}")))
    finally:
        await server.stop(0)
        await plain.stop(0)
    assert (of_secured[0].verdict, of_secured[0].found) == (Verdict.OK, "with certificates")
    assert of_secured[1].verdict is Verdict.WARN, "it ends soon"
    assert [f.found for f in of_plain] == ["gRPC in plaintext, on this machine only"]


def test_the_exit_code_and_the_json(tmp_path: Path) -> None:
    (tmp_path / "coordinator.toml").write_text('listen = "127.0.0.1:7070"\nreflection = true\n')
    for flags, code in (([], 0), (["--strict"], 1)):
        result = CliRunner().invoke(security, ["check", str(tmp_path), "--json", *flags])
        assert result.exit_code == code, result.output
        assert json.loads(result.output)["ok"] is (code == 0)
    (tmp_path / "coordinator.toml").write_text(OPEN_COORDINATOR)
    assert CliRunner().invoke(security, ["check", str(tmp_path)]).exit_code == 1
    assert CliRunner().invoke(security, ["check"]).exit_code == 2
    assert CliRunner().invoke(security, ["check", str(tmp_path / "nothing.toml")]).exit_code == 2
