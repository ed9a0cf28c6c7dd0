"""Role monitoring on a test board, over ssh: installed, left alone by a second run, an alert raised, taken off."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from . import boards
from .fleet import ANSIBLE, Run, ansible_playbook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAMS = [shutil.which("prometheus"), shutil.which("promtool")]
TASKS = [
    {"name": "Say whom to trust", "include_role": {"name": "certs", "tasks_from": "trust"}},
    {"name": "Watch", "include_role": {"name": "monitoring"}},
]
PLAY = [{"name": "Watch", "hosts": "monitors", "gather_facts": False, "roles": ["base"], "tasks": TASKS}]


def play(rig: boards.Rig, playbook: Path) -> Run:
    """Board 1 is to watch a coordinator that is not there."""
    started = time.monotonic()
    host = {"hosts": {"m1": {"ansible_host": rig.address(1)}}}
    variables = {
        "ansible_ssh_common_args": f"-F {rig.ssh_config}",
        "kvferry_store": "/srv/kvferry/store",
        "kvferry_authority": str(rig.folder / "authority"),
    }
    inventory = {"coordinators": host, "monitors": host, "all": {"vars": variables}}
    (rig.folder / "inventory.json").write_text(json.dumps(inventory))
    command = rig.beside([ansible_playbook() or "", "-i", rig.folder / "inventory.json", playbook])
    environment = {**os.environ, "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"), "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(
        command, cwd=ANSIBLE, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return Run(done.returncode, done.stdout, time.monotonic() - started)


def asked(rig: boards.Rig, path: str) -> Any:
    """What Prometheus answers, at its address in the fleet."""
    program = (
        f"import urllib.request as u; print(u.urlopen('http://{rig.address(1)}:7090/api/v1/{path}').read().decode())"
    )
    return json.loads(rig.ssh(1, f'python3 -c "{program}"').stdout)["data"]


@pytest.fixture
def rig(tmp_path: Path):
    reason = boards.why_not() or (None if ansible_playbook() else "ansible-playbook is not installed")
    if reason or not all(PROGRAMS):
        pytest.skip(reason or "prometheus is not installed (package prometheus)")
    base = boards.base_root(platformdirs.user_cache_path("kvferry") / "test-boards")
    with boards.Rig.make(tmp_path / "rig", 1, base, shared_at="/srv/kvferry/store") as rig:
        installed = rig.folder / rig.name(1) / "upper/usr/bin"
        installed.mkdir(parents=True)
        for program in PROGRAMS:
            shutil.copy(str(program), installed)
        command = [Path(sys.executable).with_name("kvferry"), "certs", "init", rig.folder / "authority"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rig.start(1)
        rig.wait_until_up(1)
        yield rig


def test_a_board_watches_the_fleet_and_is_left_as_it_was(rig: boards.Rig, tmp_path: Path) -> None:
    playbook = tmp_path / "watch.yml"
    playbook.write_text(json.dumps(PLAY))
    first = play(rig, playbook)
    assert first.returncode == 0, first.output[-4000:]
    assert play(rig, playbook).changed == {"m1": 0}

    urls = {target["scrapeUrl"] for target in asked(rig, "targets")["activeTargets"]}
    assert urls == {f"http://{rig.address(1)}:7080/metrics", f"https://{rig.address(1)}:8080/metrics"}
    rules = [rule for group in asked(rig, "rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    until = time.monotonic() + 60
    while "KvferryCoordinatorDown" not in {a["labels"]["alertname"] for a in firing(rig)}:
        assert time.monotonic() < until, "no alert for a coordinator that is not there"
        time.sleep(1)
    listening = rig.ssh(1, "ss -Hltn sport = 7090").stdout.split()
    assert f"{rig.address(1)}:7090" in listening

    removed = play(rig, ANSIBLE / "uninstall.yml")
    assert removed.returncode == 0, removed.output[-4000:]
    assert rig.ssh(1, "systemctl is-active kvferry-prometheus", check=False).stdout.strip() == "inactive"
    assert rig.ssh(1, "ls /etc/kvferry /etc/systemd/system/kvferry-prometheus.service", check=False).stdout == ""


def firing(rig: boards.Rig) -> list[dict[str, Any]]:
    return [alert for alert in asked(rig, "alerts")["alerts"] if alert["state"] == "firing"]
