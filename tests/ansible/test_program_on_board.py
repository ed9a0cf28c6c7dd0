"""What a board is sent arrives whole and goes on after an interruption; a Python comes along where the board's is old.

Slow: one board, root, and the tools that boards.py installs.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from kvferry.engine.files.resolve import resolve_model

from . import boards
from .fleet import Fleet, Shape, ansible_playbook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOARD = 1
MODEL_AT = "/var/lib/kvferry/models"
PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - {ansible.builtin.import_role: {name: base}}
    - {ansible.builtin.import_role: {name: program}}
"""


@pytest.fixture(scope="module")
def base() -> Path:
    reason = boards.why_not() or (None if ansible_playbook() else "ansible-playbook is not installed")
    if reason:
        pytest.skip(reason)
    return boards.base_root(platformdirs.user_cache_path("kvferry") / "test-boards")


@pytest.fixture(scope="module")
def fleet(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One board that is up."""
    folder = tmp_path_factory.mktemp("rig") / "rig"
    with boards.Rig.make(folder, 1, base, shared_at="/srv/kvferry/store", memory_bytes=1 << 30) as rig:
        rig.start(BOARD)
        rig.wait_until_up(BOARD)
        yield Fleet(rig, Path(__file__).parents[2], tmp_path_factory.mktemp("bundles"), Shape((BOARD,), ()))


@pytest.fixture(scope="module")
def playbook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("playbook") / "program.yml"
    path.write_text(PLAYBOOK)
    return path


def python_build(base: Path, folder: Path) -> Path:
    """A tar such as an operator brings: one folder with a CPython that runs wherever it is unpacked."""
    tree = folder / "python"
    (tree / "bin").mkdir(parents=True)
    (tree / "lib").mkdir()
    subprocess.run(["cp", "-L", base / "usr/bin/python3.11", tree / "bin/python3"], check=True)
    subprocess.run(["cp", "-a", base / "usr/lib/python3.11", tree / "lib/python3.11"], check=True)
    tar = folder / "python.tar"
    subprocess.run(["tar", "-C", folder, "-cf", tar, "python"], check=True)
    return tar


def arriving(fleet: Fleet, digest: str, content: bytes) -> None:
    """As an interrupted transfer leaves it."""
    make = f"mkdir -p -m 0700 {MODEL_AT}/.arriving && cat > {MODEL_AT}/.arriving/{digest}"
    ssh = ["ssh", "-F", fleet.rig.ssh_config, fleet.rig.address(BOARD), make]
    subprocess.run(fleet.rig.beside(ssh), input=content, check=True)


def test_a_transfer_goes_on_where_it_ended_and_what_is_damaged_is_sent_anew(fleet: Fleet, playbook: Path) -> None:
    model = resolve_model("smollm2-135m")
    content = model.read_bytes()
    digest = hashlib.sha256(content).hexdigest()

    arriving(fleet, digest, b"\0" * 1_000_000)  # another file's beginning: it shows only if the rest is put behind it
    run = fleet.play(playbook, kvferry_model=str(model))
    assert run.returncode != 0
    assert "the model did not arrive whole on c1" in " ".join(run.output.split())

    arriving(fleet, digest, content[: len(content) // 2])
    run = fleet.play(playbook, kvferry_model=str(model))
    assert run.returncode == 0, run.output[-4000:]
    assert fleet.rig.ssh(BOARD, f"sha256sum {MODEL_AT}/{model.name}").stdout.split()[0] == digest
    assert fleet.rig.ssh(BOARD, f"stat -c '%U %a' {MODEL_AT}/{model.name}").stdout.split() == ["root", "644"]
    assert fleet.rig.ssh(BOARD, f"ls -A {MODEL_AT}").stdout.split() == [model.name]

    assert fleet.play(playbook, kvferry_model=str(model)).changed == {"c1": 0}


def test_a_board_with_an_older_python_gets_the_one_that_the_operator_brought(
    fleet: Fleet, playbook: Path, base: Path, tmp_path: Path
) -> None:
    """The board's 3.11 stands for an older one: the role is told to ask for 3.12."""
    tar = python_build(base, tmp_path)
    fleet.rig.ssh(BOARD, "rm -rf /opt/kvferry")
    build = {
        "kvferry_python_build": str(tar),
        "kvferry_python_build_sha256": hashlib.sha256(tar.read_bytes()).hexdigest(),
        "kvferry_python_build_version": "3.11",
        "base_python_min": "3.12",
    }
    run = fleet.play(playbook, kvferry_model=str(resolve_model("smollm2-135m")), **build)
    assert run.returncode == 0, run.output[-4000:]
    (release,) = fleet.rig.ssh(BOARD, "ls -d /opt/kvferry/0.*").stdout.split()
    python = fleet.rig.ssh(BOARD, f"readlink -f {release}/bin/python3").stdout.strip()
    assert python.startswith(f"/opt/kvferry/python-{build['kvferry_python_build_sha256'][:12]}/")
    assert fleet.rig.ssh(BOARD, f"{release}/bin/kvferry --version").stdout.startswith("kvferry")
    assert fleet.play(playbook, kvferry_model=str(resolve_model("smollm2-135m")), **build).changed == {"c1": 0}


def test_without_one_it_is_told_what_is_missing(fleet: Fleet, playbook: Path) -> None:
    run = fleet.play(playbook, kvferry_model=str(resolve_model("smollm2-135m")), base_python_min="3.12")
    assert run.returncode != 0
    assert "an older Python is made up for by kvferry_python_build" in " ".join(run.output.split())
