"""Coordinators on real sockets, programs that talk to them, and real processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from free_ports import free_port
from scripted_worker import Script, ScriptedWorker

from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.coordinator.opening import open_registry
from kvferry.coordinator.registry import Registry
from kvferry.coordinator.server import serve
from kvferry.proto.channel import channel_options
from kvferry.proto.status import CODE_KEY, RETRY_AFTER_KEY
from kvferry.proto.v1 import chat_pb2, chat_pb2_grpc, common_pb2

PATIENCE_S = 20.0
"""For things that take milliseconds; on a busy machine they may take longer, never this long."""


async def eventually(condition: Callable[[], Any]) -> Any:
    """Wait until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not (result := condition()):  # noqa: ASYNC110 - what is waited for knows nothing of the test
            await asyncio.sleep(0.01)
        return result


async def until(question: Callable[[], Awaitable[bool]], patience_s: float = PATIENCE_S) -> None:
    """Ask again until the answer is yes."""
    async with asyncio.timeout(patience_s):
        while not await question():  # noqa: ASYNC110 - the other side knows nothing of the test
            await asyncio.sleep(0.02)


class Client:
    """A thin program over the stubs: what a test wants to say in one line."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=channel_options())
        self.stub = chat_pb2_grpc.ChatServiceStub(self.channel)

    async def new_session(self, session_id: str = "", tenant: str = "") -> str:
        response = await self.stub.CreateSession(
            chat_pb2.CreateSessionRequest(session_id=session_id, tenant=tenant), timeout=PATIENCE_S
        )
        return response.session.session_id

    def generate(
        self, session_id: str, text: str = "Say something.", **fields: Any
    ) -> AsyncIterator[chat_pb2.TurnEvent]:
        seed = fields.pop("seed", 0)
        request = {"messages": [chat_pb2.ChatMessage(role="user", content=text)], "max_tokens": 8, **fields}
        sampling = request.pop("sampling", common_pb2.SamplingSettings(seed=seed))
        return self._events(
            self.stub.Generate(
                chat_pb2.GenerateRequest(session_id=session_id, sampling=sampling, **request), timeout=60
            )
        )

    def resume(self, session_id: str, turn_id: str = "", from_index: int = 0) -> AsyncIterator[chat_pb2.TurnEvent]:
        request = chat_pb2.ResumeRequest(session_id=session_id, turn_id=turn_id, from_index=from_index)
        return self._events(self.stub.Resume(request, timeout=60))

    async def get(self, session_id: str) -> chat_pb2.GetSessionResponse:
        return await self.stub.GetSession(chat_pb2.GetSessionRequest(session_id=session_id), timeout=PATIENCE_S)

    async def status(self) -> chat_pb2.GetStatusResponse:
        return await self.stub.GetStatus(chat_pb2.GetStatusRequest(), timeout=PATIENCE_S)

    async def cancel(self, session_id: str) -> None:
        await self.stub.CancelTurn(chat_pb2.CancelTurnRequest(session_id=session_id), timeout=PATIENCE_S)

    async def delete(self, session_id: str) -> None:
        await self.stub.DeleteSession(chat_pb2.DeleteSessionRequest(session_id=session_id), timeout=PATIENCE_S)

    async def until_nodes(self, n: int, patience_s: float = PATIENCE_S) -> None:
        """Until n nodes are live."""

        async def are_live() -> bool:
            return sum(node.state == chat_pb2.NODE_STATE_LIVE for node in (await self.status()).nodes) == n

        await until(are_live, patience_s)

    async def _events(self, call: Any) -> AsyncIterator[chat_pb2.TurnEvent]:
        try:
            async for response in call:
                yield response.event
        finally:
            call.cancel()


async def all_of(events: AsyncIterator[chat_pb2.TurnEvent]) -> list[chat_pb2.TurnEvent]:
    return [event async for event in events]


async def read_while_it_lasts(
    stream: AsyncIterator[chat_pb2.TurnEvent],
) -> tuple[list[chat_pb2.TurnEvent], grpc.aio.AioRpcError | None]:
    """What arrived, and the error that ended it, if one did."""
    events: list[chat_pb2.TurnEvent] = []
    try:
        async for event in stream:
            events.append(event)  # noqa: PERF401 - what came before the error counts
    except grpc.aio.AioRpcError as e:
        return events, e
    return events, None


async def resume_until_served(client: Client, session: str, from_index: int) -> list[chat_pb2.TurnEvent]:
    """What a program does: ask again while the coordinator is away or has no node yet, from where it is."""
    events: list[chat_pb2.TurnEvent] = []
    async with asyncio.timeout(3 * PATIENCE_S):
        while True:
            more, error = await read_while_it_lasts(client.resume(session, from_index=from_index + len(ids_of(events))))
            events += more
            if error is None:
                return events
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error.details()
            await asyncio.sleep(0.1)


async def take_tokens(events: AsyncIterator[chat_pb2.TurnEvent], n: int) -> list[int]:
    """The first n token ids; the stream stays open."""
    ids: list[int] = []
    while len(ids) < n:
        event = await anext(events)
        if event.HasField("token"):
            assert event.sequence == len(ids)
            ids.append(event.token.token_id)
    return ids


def ids_of(events: list[chat_pb2.TurnEvent]) -> list[int]:
    return [e.token.token_id for e in events if e.HasField("token")]


def kinds_of(events: list[chat_pb2.TurnEvent]) -> list[str]:
    return [str(e.WhichOneof("event")) for e in events]


def code_of(error: grpc.aio.AioRpcError) -> str:
    return str(dict(error.trailing_metadata() or ()).get(CODE_KEY))


def retry_after_ms(error: grpc.aio.AioRpcError) -> int:
    return int(dict(error.trailing_metadata() or ())[RETRY_AFTER_KEY])


class Cluster:
    """One coordinator in the test's loop, and any number of scripted workers."""

    def __init__(self, state: Path, *models: LoadedModel, **settings: Any) -> None:
        self._settings = {
            "model": "unused",
            "listen": f"127.0.0.1:{free_port()}",
            "state": None if "registry" in settings else state,
            "lease": 0.6,
            "no_node_wait": 0.5,
            **settings,
        }
        self._models = models
        self._stack = contextlib.AsyncExitStack()
        self._workers: list[ScriptedWorker] = []
        self._clients: list[Client] = []
        self.address = ""
        self.registry: Registry | None = None

    async def start(self) -> None:
        settings = CoordinatorSettings(**self._settings)
        self.registry = await self._stack.enter_async_context(open_registry(settings))
        self.address = await self._stack.enter_async_context(serve(settings, self._models, self.registry))
        self._settings["listen"] = self.address  # a restarted one has the same address

    async def stop(self) -> None:
        await self._stack.aclose()

    async def restart(self, *models: LoadedModel) -> None:
        await self.stop()
        self._models = models or self._models
        await self.start()

    def client(self) -> Client:
        self._clients.append(Client(self.address))
        return self._clients[-1]

    async def worker(self, node_id: str, script: Script | None = None, **identity: Any) -> ScriptedWorker:
        """One that serves the first model to this coordinator, if nothing else is said."""
        coordinator = identity.pop("coordinator", self.address)
        text = self._models[0].text
        known = {"tokenizer_digest": text.digest, "vocabulary_size": text.vocab_size, **identity}
        worker = await ScriptedWorker(node_id, coordinator, script, **known).start()
        self._workers.append(worker)
        return worker

    def worker_named(self, node_id: str) -> ScriptedWorker:
        return next(w for w in self._workers if w.node_id == node_id)

    async def close(self) -> None:
        for client in self._clients:
            await client.channel.close()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        await self.stop()


class Processes:
    """Real processes of ours, each killed at the end whatever happened."""

    def __init__(self, folder: Path, model_path: Path, model: LoadedModel) -> None:
        self._folder = folder
        self._model_path = model_path
        self._model = model
        self._all: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
        log = (self._folder / f"process{len(self._all)}.log").open("w")
        process = subprocess.Popen(
            [*within, sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT, text=True
        )
        log.close()
        self._all.append(process)
        return process

    def coordinator(self, listen: str = "", *more: str) -> tuple[subprocess.Popen[str], str]:
        """Starts one on the same state each time, or on a ``--registry``; returns it with its address."""
        ready = self._folder / f"ready{len(self._all)}.json"
        kept = () if "--registry" in more else ("--state", str(self._folder / "state"))
        address = listen or f"127.0.0.1:{free_port()}"
        process = self.start(
            "-m", "kvferry.coordinator", "run", "--model", str(self._model_path), "--listen", address,
            "--ready-file", str(ready), *kept, *more,
        )  # fmt: skip
        deadline = time.monotonic() + 3 * PATIENCE_S
        while not (ready.exists() and json.loads(ready.read_text())["pid"] == process.pid):
            assert process.poll() is None, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)
        return process, json.loads(ready.read_text())["address"]

    def worker(self, node_id: str, coordinator: str, *more: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
        """``within``: a command to run it by, such as ``ip netns exec N``."""
        text = self._model.text
        return self.start(
            str(Path(__file__).parent / "scripted_worker.py"), "--node-id", node_id, "--coordinator", coordinator,
            "--tokenizer-digest", text.digest, "--vocabulary-size", str(text.vocab_size), *more, within=within,
        )  # fmt: skip

    def node(self, node_id: str, coordinator: str, store: Path, *more: str) -> subprocess.Popen[str]:
        """A real one, with the engine."""
        return self.start(
            "-c", "from kvferry.client.cli import main; main()", "node", "run", "--model", str(self._model_path),
            "--coordinator", coordinator, "--store", str(store), "--node-id", node_id, "--threads", "1",
            "--kv-memory", "256MiB", *more,
        )  # fmt: skip

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in sorted(self._folder.glob("process*.log")))

    def close(self) -> None:
        for process in self._all:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
