"""The modules that decide know no clock, no loop, no socket and no log: a simulator can run them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvferry.coordinator.turn

ROOM = Path(kvferry.coordinator.turn.__file__).parent
IMPURE = {"time", "datetime", "os", "asyncio", "grpc", "logging", "random", "threading", "socket", "sqlite3", "uuid"}


@pytest.mark.parametrize(
    "module",
    [
        "turn",
        "turn_events",
        "routing",
        "prediction",
        "rates",
        "backlog",
        "cutting",
        "forecasts",
        "membership",
        "requests",
        "registry",
    ],
)
def test_a_deciding_module_imports_nothing_that_acts(module: str) -> None:
    tree = ast.parse((ROOM / f"{module}.py").read_text())
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & IMPURE == set()
