"""The services' units and settings as ansible renders them, judged by systemd and by the programs that read them."""

from __future__ import annotations

import json
import os
import posixpath
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from kvferry.coordinator.config import CoordinatorSettings
from kvferry.gateway.config import GatewayConfig
from kvferry.node.config import NodeConfig
from kvferry.store.place import StorePlace

from .fleet import ansible_playbook

SYSTEMD = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(SYSTEMD is None, reason="systemd-analyze is not installed (package systemd)")
# Named after the folder that is mounted.
STORE_UNITS = {"srv-kvferry-store.mount": "store.mount", "srv-kvferry-store.automount": "store.automount"}
BOARD_UNIT = "kvferry_board.service"
UNITS = {
    "kvferry-coordinator.service": "coordinator",
    "kvferry-etcd.service": "etcd",
    "kvferry-gateway.service": "gateway",
    "kvferry-node.service": "node",
    "kvferry-prometheus.service": "monitoring",
    "kvferry-warm-up@.service": "node",
}
PROGRAMS = ["board_settings.py", "warm_up.py"]
# What defaults compute from facts and from the inventory.
BOARD = {
    "ansible_managed": "Ansible managed",
    "kvferry_address": "192.168.7.11",
    "kvferry_coordinators": "192.168.7.10:7070,192.168.7.9:7070",
    "kvferry_tls": "/etc/kvferry/tls",
    "kvferry_store_place": "/srv/kvferry/store",
    "coordinator_registry": "sqlite",
    "coordinator_registry_url": "etcds://192.168.7.10:2379,192.168.7.9:2379,192.168.7.11:2379/kvferry",
    "etcd_binary": "/bin/true",
    "etcd_deployed": "0123456789ab",
    "etcd_members": "desk=https://192.168.7.10:2380",
    "gateway_deployed": "0.1.0-3fa9c1d2:0123456789ab",
    "kvferry_model": "/home/admin/model.gguf",
    "program_wanted": "0.1.0-3fa9c1d2",
    "monitoring_binary": "/bin/true",
    "monitoring_deployed": "0123456789ab",
    "monitoring_folder": "/etc/kvferry/prometheus",
    "node_id": "board1",
    "node_deployed": "0.1.0-3fa9c1d2:0123456789ab",
    "coordinator_deployed": "0.1.0-3fa9c1d2:0123456789ab",
    "store_nfs_server": "desk",
    "store_nfs_clients": ["desk", "board1", "192.168.7.99"],
    "hostvars": {"desk": {"ansible_host": "192.168.7.10"}, "board1": {"kvferry_address": "192.168.7.11"}},
}


def render(ansible: Path, role: str, template: str, **more: Any) -> str:
    variables: dict[str, Any] = {}
    for name in ("kvferry", role):
        variables |= yaml.safe_load((ansible / "roles" / name / "defaults/main.yml").read_text())
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ansible / "roles" / role / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,  # as ansible does
        autoescape=False,  # noqa: S701 - not HTML
    )
    environment.filters |= {"basename": posixpath.basename, "dirname": posixpath.dirname}
    return environment.get_template(f"{template}.j2").render(variables | BOARD | more)


@pytest.fixture
def unit_folder(ansible: Path, tmp_path: Path) -> Path:
    """All units and their sandbox, with stand-ins for the programs that they name."""
    root = tmp_path / "kvferry"
    for program in [f"{BOARD['program_wanted']}/bin/kvferry", *(f"libexec/{name}" for name in PROGRAMS)]:
        path = root / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    folder = tmp_path / "units"
    (folder / "kvferry-.service.d").mkdir(parents=True)
    shutil.copy(ansible / "roles/base/files/sandbox.conf", folder / "kvferry-.service.d")
    for unit, role in UNITS.items():
        (folder / unit).write_text(render(ansible, role, unit, kvferry_root=root))
    (folder / BOARD_UNIT).write_text(render(ansible, "base", BOARD_UNIT, kvferry_root=root))
    for unit, template in STORE_UNITS.items():
        (folder / unit).write_text(render(ansible, "store", template))
    return folder


def analyze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:", "SYSTEMD_LOG_LEVEL": "notice"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def complaints(folder: Path, unit: str) -> list[str]:
    """What `systemd-analyze verify` says about our files; its exit code is 0 whatever it finds."""
    instance = unit.replace("@.", "@0.1.0.")
    done = analyze(folder, "verify", "--man=no", f"{folder}/{instance}")
    return [line for line in (done.stdout + done.stderr).splitlines() if "kvferry" in line or str(folder) in line]


@needs_systemd
@pytest.mark.parametrize("unit", [*UNITS, *STORE_UNITS, BOARD_UNIT])
def test_systemd_has_nothing_to_say_about_a_unit(unit_folder: Path, unit: str) -> None:
    assert complaints(unit_folder, unit) == []


@needs_systemd
@pytest.mark.parametrize("broken", ["MemoryMaximum=1G", "RestartSec=soon", "Type=sometimes"])
def test_systemd_would_say_so(unit_folder: Path, broken: str) -> None:
    unit = unit_folder / "kvferry-node.service"
    unit.write_text(unit.read_text().replace("KillMode=mixed", f"KillMode=mixed\n{broken}"))
    assert complaints(unit_folder, unit.name)


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_exposed_to_little(unit_folder: Path, unit: str) -> None:
    done = analyze(unit_folder, "security", "--offline=yes", "--threshold=25", str(unit_folder / unit))
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze cannot judge units offline (needs systemd 250)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overall exposure level" in done.stdout


def test_the_sandbox_lets_kernels_be_compiled(ansible: Path) -> None:
    lines = (ansible / "roles/base/files/sandbox.conf").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert "MemoryDenyWriteExecute" not in settings
    assert settings["NoNewPrivileges"] == "yes"


@pytest.mark.parametrize("role", ["node", "coordinator"])
def test_systemd_believes_a_service_and_not_its_process(ansible: Path, role: str) -> None:
    unit = render(ansible, role, f"kvferry-{role}.service", **{f"{role}_watchdog_seconds": 17}).splitlines()
    assert {"Type=notify", "NotifyAccess=main", "WatchdogSec=17", "Restart=always"} <= set(unit)


def test_a_service_may_drain_before_it_is_killed(ansible: Path) -> None:
    unit = render(ansible, "node", "kvferry-node.service", node_drain_seconds=90, node_stop_margin_seconds=15)
    assert "TimeoutStopSec=105" in unit
    assert "Restart=always" in unit
    assert "StartLimitIntervalSec=0" in unit


def test_a_node_starts_without_its_store(ansible: Path) -> None:
    """Neither a requirement nor the automount itself in the sandbox, which would wait for a server that is away."""
    lines = render(ansible, "node", "kvferry-node.service").splitlines()
    assert not [line for line in lines if line.startswith(("Requires", "BindsTo"))]
    assert [line for line in lines if line.startswith("ReadWritePaths")] == ["ReadWritePaths=-/srv/kvferry"]


def test_the_store_is_mounted_from_the_host_that_exports_it_to_the_boards_alone(ansible: Path) -> None:
    mount = render(ansible, "store", "store.mount").splitlines()
    assert "What=192.168.7.10:/srv/kvferry/export" in mount
    assert "Where=/srv/kvferry/store" in mount
    exports = render(ansible, "store", "exports").splitlines()[1:]
    options = "rw,sync,no_subtree_check,root_squash,sec=sys"
    assert exports == [
        f"/srv/kvferry/export {address}({options})" for address in ("192.168.7.10", "192.168.7.11", "192.168.7.99")
    ]


def test_a_node_understands_its_settings(ansible: Path, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(render(ansible, "node", "node.toml", node_context=4096, node_kv_memory="2GiB"))
    config = NodeConfig.load({}, path)
    assert config.model == "/var/lib/kvferry/models/model.gguf"
    assert config.coordinators == ("192.168.7.10:7070", "192.168.7.9:7070")
    assert config.metrics == "192.168.7.11:7081"
    assert config.listen == "192.168.7.11:7071"
    assert config.node_id == "board1"
    assert config.kv_memory == 2 << 30
    assert config.context == 4096
    assert config.store == "/srv/kvferry/store"
    assert config.drain_timeout_seconds == 90
    assert config.ready_file == Path("/run/kvferry-node/ready.json")


def test_snapshots_are_signed_with_the_fleets_key_where_there_is_one(ansible: Path, tmp_path: Path) -> None:
    for role, settings in (("node", NodeConfig), ("coordinator", CoordinatorSettings)):
        path = tmp_path / f"{role}.toml"
        key = {"kvferry_store_key": "/home/admin/key", "kvferry_store_encrypted": True}
        path.write_text(render(ansible, role, path.name, **key))
        loaded = settings.load({}, path)
        assert loaded.store_key_file == Path("/etc/kvferry/store.key")
        assert loaded.store_encrypted


PLAYBOOK = ansible_playbook()


@pytest.mark.slow
@pytest.mark.skipif(PLAYBOOK is None, reason="ansible is not installed (extra fleet)")
@pytest.mark.parametrize("role", ["node", "coordinator"])
def test_another_store_key_is_a_reason_to_start_anew_and_none_is_not(ansible: Path, tmp_path: Path, role: str) -> None:
    """Else a board would take it up whenever it happens to start, and the others could not read what it saves."""
    key = tmp_path / "the key"
    told = {"gather_facts": False, "hosts": "localhost", "connection": "local"}
    told |= {"vars_files": [str(ansible / f"roles/{role}/vars/main.yml")]}
    told["tasks"] = [{"ansible.builtin.debug": {"msg": f"{{{{ {role}_parts[-1] }}}}"}}]
    (tmp_path / "play.yml").write_text(json.dumps([told]))
    assert PLAYBOOK is not None

    def part(store_key: str) -> str:
        given = BOARD | {"kvferry_store_key": store_key, "kvferry_config": "/etc/kvferry"}
        argv = [PLAYBOOK, str(tmp_path / "play.yml"), "-e", json.dumps(given)]
        environment = {**os.environ, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json", "ANSIBLE_NOCOLOR": "1"}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        (line,) = (line for line in done.stdout.splitlines() if '"msg": ' in line)
        return str(json.loads(f"{{{line}}}")["msg"])

    assert part("") == ""
    seen = set()
    for content in (bytes(range(200, 232)), bytes(range(201, 233))):  # 32 bytes are rarely text
        key.write_bytes(content)
        seen.add(part(str(key)))
    assert len(seen - {""}) == 2


@pytest.mark.parametrize(
    ("tasks", "secret"), [("store/tasks/main.yml", "store.key"), ("coordinator/tasks/tokens.yml", "tokens.json")]
)
def test_secrets_on_a_board_are_the_services_users_alone(
    ansible: Path, tmp_path: Path, tasks: str, secret: str
) -> None:
    """Services refuse a key that others may read, and `kvferry security check` tells of tokens that they may."""
    copies = [task.get("ansible.builtin.copy", {}) for task in yaml.safe_load((ansible / "roles" / tasks).read_text())]
    (copied,) = (copy for copy in copies if copy.get("dest") == f"{{{{ kvferry_config }}}}/{secret}")
    assert copied["owner"] == "{{ kvferry_user }}"
    key = tmp_path / secret
    key.write_bytes(bytes(range(100, 132)))
    key.chmod(int(copied["mode"], 8))
    StorePlace(str(tmp_path), key).seal()


def test_a_node_takes_what_the_model_says_when_no_context_is_set(ansible: Path, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(render(ansible, "node", "node.toml"))
    assert NodeConfig.load({}, path).context is None


def test_a_coordinator_understands_its_settings(ansible: Path, tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(
        render(ansible, "coordinator", "coordinator.toml", coordinator_lease_seconds=5, kvferry_address="192.168.7.10")
    )
    settings = CoordinatorSettings.load({}, path)
    assert settings.listen == "192.168.7.10:7070"
    assert settings.metrics == "192.168.7.10:7080"
    assert settings.state == Path("/var/lib/kvferry/coordinator")
    assert settings.registry is None
    assert settings.store == "/srv/kvferry/store"
    assert settings.lease == 5
    assert settings.ready_file == Path("/run/kvferry-coordinator/ready.json")


def test_several_coordinators_share_a_registry(ansible: Path, tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(render(ansible, "coordinator", "coordinator.toml", coordinator_registry="etcd"))
    settings = CoordinatorSettings.load({}, path)
    assert settings.registry == BOARD["coordinator_registry_url"]
    assert settings.state is None


def test_a_gateway_understands_its_settings(ansible: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in render(ansible, "gateway", "gateway.env").splitlines()[1:]:
        monkeypatch.setenv(*line.split("=", 1))
    config = GatewayConfig.load({})
    assert config.coordinator == "192.168.7.10:7070,192.168.7.9:7070"
    assert config.listen == "192.168.7.11:8080"
    assert config.https
    assert not config.insecure_plaintext
    assert config.patience_seconds == 60


def test_etcd_lets_coordinators_and_its_members_in_and_nobody_else(ansible: Path) -> None:
    lines = render(ansible, "etcd", "etcd.env", inventory_hostname="desk").splitlines()
    settings = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert settings["ETCD_INITIAL_CLUSTER"] == BOARD["etcd_members"]
    urls = {name: value for name, value in settings.items() if name.endswith("_URLS")}
    assert all("//192.168.7.11:" in url for url in urls.values())
    assert [name for name, url in urls.items() if not url.startswith("https://")] == ["ETCD_LISTEN_METRICS_URLS"]
    assert settings["ETCD_CLIENT_CERT_AUTH"] == settings["ETCD_PEER_CLIENT_CERT_AUTH"] == "true"
    assert settings["ETCD_CLIENT_CERT_ALLOWED_HOSTNAME"] == "coordinator.kvferry.internal"
    assert settings["ETCD_PEER_CERT_ALLOWED_HOSTNAME"] == "etcd.kvferry.internal"
    assert settings["ETCD_CLIENT_CRL_FILE"] == settings["ETCD_PEER_CRL_FILE"] == "/etc/kvferry/tls/etcd/revoked.pem"


def test_the_keys_of_an_object_store_are_those_that_were_given(ansible: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "s/e+c=r", "AWS_REGION": ""}
    text = render(ansible, "store", "store.env", kvferry_s3_environment=keys)
    assert text.splitlines()[1:] == ["AWS_ACCESS_KEY_ID=AKIA", "AWS_SECRET_ACCESS_KEY=s/e+c=r"]
