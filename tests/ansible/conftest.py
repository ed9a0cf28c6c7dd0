"""The folder of playbooks, and loading of the programs in it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.engine.files.resolve import resolve_model

from .fleet import ANSIBLE, ONE_COORDINATOR, Fleet, Run, bare_boards, copy_of_sources


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
    return copy_of_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def fleet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Four boards that are up and have nothing on them."""
    with bare_boards(ONE_COORDINATOR, source, tmp_path_factory.mktemp("rig")) as made:
        yield made


@pytest.fixture(scope="module")
def first_run(fleet: Fleet) -> Run:
    """From bare boards to a fleet that serves."""
    return fleet.play("site.yml", kvferry_model=str(resolve_model("smollm2-135m")))
