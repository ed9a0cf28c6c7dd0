from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .scripted_coordinator import ScriptedCoordinator


@pytest.fixture
async def coordinator() -> AsyncIterator[ScriptedCoordinator]:
    """A started coordinator without scripts; its address is f"127.0.0.1:{coordinator.port}"."""
    scripted = ScriptedCoordinator()
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
def env(coordinator: ScriptedCoordinator) -> dict[str, str]:
    """Of a command that is to reach it."""
    return {"KVFERRY_COORDINATOR": f"127.0.0.1:{coordinator.port}"}
