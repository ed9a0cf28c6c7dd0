"""The folder of playbooks, and loading of the programs in it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import platformdirs
import pytest

from kvferry.engine.files.resolve import resolve_model

from . import boards
from .fleet import ANSIBLE, NODES, Fleet, Run, ansible_playbook


@pytest.fixture(scope="session")
def ansible() -> Path:
    return ANSIBLE


def load_program(path: Path) -> ModuleType:
    """A program that belongs to no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"kvferry_program_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def bundle(ansible: Path) -> ModuleType:
    return load_program(ansible.parent / "fleet" / "bundle.py")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that nobody edits it during the test."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ANSIBLE.parent / name, folder / name)
    rooms = ANSIBLE.parent / "src/kvferry"
    shutil.copytree(rooms, folder / "src/kvferry", symlinks=True)
    for room in rooms.iterdir():
        shutil.copytree(room.resolve(), folder / room.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def fleet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Four boards that are up and have nothing on them."""
    reason = boards.why_not() or (None if ansible_playbook() else "ansible-playbook is not installed")
    if reason:
        pytest.skip(reason)
    cache = platformdirs.user_cache_path("kvferry")
    base = boards.base_root(cache / "test-boards")
    folder = tmp_path_factory.mktemp("rig") / "rig"
    n_boards = 1 + len(NODES)
    with boards.Rig.make(folder, n_boards, base, shared_at="/srv/kvferry/store", memory_bytes=2 << 30) as rig:
        for board in rig.boards:
            rig.start(board)
        for board in rig.boards:
            rig.wait_until_up(board)
        yield Fleet(rig, source, tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def first_run(fleet: Fleet) -> Run:
    """From bare boards to a fleet that serves."""
    return fleet.play("site.yml", kvferry_model=str(resolve_model("smollm2-135m")))
