"""What can be said about the playbooks without a board."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from .fleet import ansible_playbook

ROLES = ["kvferry", "base", "store", "program", "certs", "etcd", "coordinator", "node", "gateway", "monitoring"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_all_files_parse(ansible: Path) -> None:
    paths = sorted(ansible.rglob("*.yml"))
    assert len(paths) > 20
    for path in paths:
        assert read(path), path


def test_the_roles_are_those_we_know(ansible: Path) -> None:
    assert sorted(path.name for path in (ansible / "roles").iterdir()) == sorted(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_documented_and_every_documented_option_has_a_default(ansible: Path, role: str) -> None:
    defaults = read(ansible / "roles" / role / "defaults/main.yml")
    specs = read(ansible / "roles" / role / "meta/argument_specs.yml")["argument_specs"]
    assert set(defaults) == set(specs["main"]["options"])


@pytest.mark.parametrize("role", ROLES)
def test_documented_defaults_are_the_real_ones(ansible: Path, role: str) -> None:
    defaults = read(ansible / "roles" / role / "defaults/main.yml")
    options = read(ansible / "roles" / role / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    for name, option in options.items():
        assert option["description"], name
        if "default" in option:
            assert option["default"] == defaults[name], name
        else:  # a list, or computed from other variables
            assert isinstance(defaults[name], list | dict) or "{{" in defaults[name] or len(defaults[name]) > 40, name


@pytest.mark.parametrize("role", ROLES)
def test_every_default_has_its_reason_above_it(ansible: Path, role: str) -> None:
    """A comment heads each block of defaults."""
    text = (ansible / "roles" / role / "defaults/main.yml").read_text().removeprefix("---\n").strip()
    for block in text.split("\n\n"):
        assert block.startswith("#"), block


@pytest.mark.parametrize("role", [role for role in ROLES if role != "kvferry"])
def test_roles_share_names_through_one_role(ansible: Path, role: str) -> None:
    assert read(ansible / "roles" / role / "meta/main.yml") == {"dependencies": [{"role": "kvferry"}]}


def test_nodes_change_one_at_a_time(ansible: Path) -> None:
    for playbook in ("site.yml", "rollout.yml"):
        plays = [play for play in read(ansible / playbook) if play.get("hosts") == "nodes"]
        assert plays, playbook
        assert all(play["serial"] == 1 and play["any_errors_fatal"] for play in plays), playbook


def test_the_mount_asks_for_all_that_is_asserted_after_mounting(ansible: Path) -> None:
    defaults = read(ansible / "roles/store/defaults/main.yml")
    assert set(defaults["store_nfs_asserted_options"]) <= set(defaults["store_nfs_mount_options"].split(","))
    assert {"vers=4.2", "hard", "lookupcache=pos"} <= set(defaults["store_nfs_asserted_options"])
    assert {"sync", "no_subtree_check", "root_squash"} <= set(defaults["store_nfs_export_options"].split(","))


@pytest.mark.parametrize(
    ("name", "n_coordinators", "n_etcd"), [("inventory.example.yml", 1, 0), ("inventory.etcd.example.yml", 2, 3)]
)
def test_the_examples_are_of_both_shapes_and_set_what_there_is(
    ansible: Path, name: str, n_coordinators: int, n_etcd: int
) -> None:
    inventory = read(ansible / name)
    hosts = {group: list(inventory.get(group, {"hosts": {}})["hosts"]) for group in ("coordinators", "etcd", "nodes")}
    assert [len(names) for names in hosts.values()] == [n_coordinators, n_etcd, 3]
    assert set(hosts["etcd"]) <= {*hosts["coordinators"], *hosts["nodes"]}
    known = set[str]().union(*(read(ansible / "roles" / role / "defaults/main.yml") for role in ROLES))
    assert {name for name in inventory["all"]["vars"] if not name.startswith("ansible_")} <= known


def test_all_that_is_served_can_be_uninstalled(ansible: Path) -> None:
    removed = (ansible / "uninstall.yml").read_text()
    units = {path.name.removesuffix(".j2") for path in ansible.glob("roles/*/templates/kvferry*.service.j2")}
    assert {unit for unit in units if f"/etc/systemd/system/{unit}" not in removed} == set()


def test_what_is_exported_is_so_no_more_after_uninstalling(ansible: Path) -> None:
    """An NFS server that is not told goes on exporting what its file no longer says."""
    tasks = {task["name"]: task for task in read(ansible / "uninstall.yml")[0]["tasks"]}
    server = (ansible / "roles/store/tasks/nfs_server.yml").read_text()
    (exports,) = (path for path in tasks["Remove what was installed"]["loop"] if path in server)
    told = tasks["Export the snapshots no more"]
    assert (told["ansible.builtin.command"]["cmd"], exports in told["when"]) == ("exportfs -ra", True)
    assert list(tasks).index("Export the snapshots no more") > list(tasks).index("Remove what was installed")


PLAYBOOK = ansible_playbook()


@pytest.mark.slow
@pytest.mark.skipif(PLAYBOOK is None, reason="ansible is not installed (extra fleet)")
def test_going_back_when_no_board_answers_says_so(ansible: Path, tmp_path: Path) -> None:
    hosts = {"coordinators": {"hosts": {"desk": None}}, "nodes": {"hosts": {"board1": None}}}
    nobody = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_become": False}
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(hosts | {"all": {"vars": nobody}}))
    assert PLAYBOOK is not None
    done = subprocess.run(
        [PLAYBOOK, "-i", str(tmp_path / "inventory.yml"), "rollback.yml"], cwd=ansible,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "desk, board1 did not answer and keep what they have" in " ".join(done.stdout.split())
    assert "No board answered, so nothing was taken back" in " ".join(done.stdout.split())


def test_no_key_is_fetched_from_a_board_or_sent_to_one(ansible: Path) -> None:
    tasks = [task for path in (ansible / "roles/certs/tasks").glob("*.yml") for task in read(path)]
    tasks += [inner for task in tasks for inner in task.get("block", [])]
    travels = [
        task[kind]["src"]
        for task in tasks
        for kind in ("ansible.builtin.fetch", "ansible.builtin.copy")
        if kind in task
    ]
    assert len(travels) == 4
    assert not [source for source in travels if "key" in source]


def test_the_first_token_is_its_owners_alone_and_folders_that_are_there_stay_as_they_are(
    ansible: Path, tmp_path: Path
) -> None:
    """The file of tokens may be told to lie in any folder, such as /etc."""
    tasks = {task["name"]: task for task in read(ansible / "roles/coordinator/tasks/tokens.yml")}
    assert not [name for name, task in tasks.items() if "ansible.builtin.file" in task]
    shared, program = tmp_path / "shared", tmp_path / "kvferry"
    shared.mkdir()
    shared.chmod(0o755)
    program.write_text('#!/bin/sh\necho hash > "$4" && echo kvf_secret\n')
    program.chmod(0o755)
    token = tmp_path / "new" / "token"
    environment = {"KVFERRY": str(program), "TOKENS": str(shared / "tokens.json"), "TOKEN": str(token)}
    first = tasks["Make the first one"]
    assert set(first["environment"]) == set(environment)
    cmd = first["ansible.builtin.shell"]["cmd"]
    subprocess.run(["sh", "-c", cmd], env={**os.environ, **environment}, check=True)
    assert token.read_text() == "kvf_secret\n"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (shared, token.parent, token, shared / "tokens.json")]
    assert modes == [0o755, 0o700, 0o600, 0o600]


LINT = shutil.which("ansible-lint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.slow
@pytest.mark.skipif(LINT is None, reason="ansible-lint is not installed (extra fleet)")
def test_ansible_lint_has_nothing_to_say_in_its_strictest_profile(ansible: Path) -> None:
    assert "profile: production" in (ansible / ".ansible-lint").read_text()
    assert LINT is not None
    path = f"{Path(LINT).parent}:{os.environ['PATH']}"  # it runs ansible-playbook
    done = subprocess.run(
        [LINT, "--strict", "--nocolor", "-q"], cwd=ansible, env={**os.environ, "PATH": path},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
