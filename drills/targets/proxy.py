"""A TCP relay that can fall silent, in one direction or both, or become slow: cables, for processes of one machine.

What it cannot do is to lose packets: while it is silent a sender's data waits in buffers, as it would for a
retransmission, and a new connection is accepted although nobody answers on it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

T = TypeVar("T")

CHUNK_BYTES: Final = 1 << 14

Upstream = Callable[[], tuple[str, int] | None]
"""Where the relayed connection goes, None while nobody serves there."""


@dataclass
class Cable:
    """Between one part and the others. "out" is what the part says, "into" what it hears. Changed by `Relay` only."""

    into: asyncio.Event = field(default_factory=asyncio.Event)
    out: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


class Relay:
    """Its own event loop in a thread of its own. Cables have names."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._cables: dict[str, Cable] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    def listen(self, name: str, upstream: Upstream, *, part_dials: bool) -> int:
        """A port whose connections lead over that cable. `part_dials`: the part behind the cable is who connects."""
        return self._call(self._listen(name, upstream, part_dials))

    def set(
        self, name: str, *, into: bool = True, out: bool = True, delay_s: float = 0.0, bytes_per_s: float = 0.0
    ) -> None:
        """From now on; without arguments the cable is as good as new. 0 bytes per second: no limit."""
        self._call(self._set(name, into=into, out=out, delay_s=delay_s, bytes_per_s=bytes_per_s))

    def close(self) -> None:
        """Closes all connections."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self, name: str, upstream: Upstream, part_dials: bool) -> int:
        if name not in self._cables:
            self._cables[name] = Cable()
            await self._set(name, into=True, out=True, delay_s=0.0, bytes_per_s=0.0)
        cable = self._cables[name]

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            with suppress(OSError, asyncio.CancelledError):
                await _relay(cable, part_dials, upstream, reader, writer)
            writer.close()

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _set(self, name: str, *, into: bool, out: bool, delay_s: float, bytes_per_s: float) -> None:
        cable = self._cables[name]
        cable.delay_s, cable.bytes_per_s = delay_s, bytes_per_s
        for gate, is_open in ((cable.into, into), (cable.out, out)):
            gate.set() if is_open else gate.clear()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _relay(
    cable: Cable, part_dials: bool, upstream: Upstream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await cable.into.wait()
    await cable.out.wait()
    far_reader, far_writer = await _connect(upstream)
    asked, answered = (cable.out, cable.into) if part_dials else (cable.into, cable.out)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(cable, asked, reader, far_writer))
            group.create_task(_pump(cable, answered, far_reader, writer))
    except* OSError:
        pass
    finally:
        far_writer.close()


async def _connect(upstream: Upstream) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to nobody is closed at once, as the kernel would refuse it."""
    place = upstream()
    if place is None:
        raise ConnectionRefusedError
    return await asyncio.open_connection(*place)


async def _pump(cable: Cable, gate: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side closes; that, too, is not heard while the cable is silent."""
    try:
        while data := await reader.read(CHUNK_BYTES):
            seconds = cable.delay_s + (len(data) / cable.bytes_per_s if cable.bytes_per_s else 0.0)
            if seconds:
                await asyncio.sleep(seconds)
            await gate.wait()
            writer.write(data)
            await writer.drain()
    except OSError:  # a reset
        await gate.wait()
        writer.transport.abort()
        raise
    await gate.wait()
    writer.close()
