"""What every turn of a coordinator has around it; a simulator brings its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvferry.coordinator.admission import Admission
from kvferry.coordinator.fleet import Fleet
from kvferry.coordinator.registry import Registry
from kvferry.coordinator.routing import Rule, route
from kvferry.coordinator.snapshots import StoredPrefixes
from kvferry.coordinator.tasks import Background
from kvferry.coordinator.transport import WorkerTransport

T = TypeVar("T")


class InThread(Protocol):
    """``asyncio.to_thread``, or a stand-in where there are no threads."""

    async def __call__(self, function: Callable[[], T], /) -> T: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What every runner of a coordinator shares."""

    registry: Registry
    fleet: Fleet
    transport: WorkerTransport
    snapshots: StoredPrefixes
    background: Background
    # Seconds of a clock that does not jump.
    clock: Callable[[], float]
    wall_ms: Callable[[], int]
    # Runs what takes long away from the loop.
    in_thread: InThread
    admission: Admission = dataclasses.field(default_factory=Admission)
    # Set once nodes that outlived the last coordinator had time to register.
    settled: asyncio.Event
    # Which node answers.
    rule: Rule = route
