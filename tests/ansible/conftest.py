"""The folder of playbooks, and loading of the programs in it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

ANSIBLE: Final = Path(__file__).parents[2] / "ansible"


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
