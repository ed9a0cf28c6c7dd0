"""A WorkerService without an engine, over real gRPC: its tokens are a pure function of those before them and the seed.

So a coordinator that sends a wrong prefix, loses a token or takes one twice gets other tokens than an undisturbed run.
Used in the test's own loop (``ScriptedWorker``) and as a process that can be killed (``python scripted_worker.py``).
"""

# ruff: noqa: N802 - the proto gives the names of handlers

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import struct
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from uuid import uuid4

import grpc
import grpc.aio

from kvferry.proto.channel import channel_options, server_options
from kvferry.proto.status import status_of, trailing_metadata
from kvferry.proto.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, worker_pb2, worker_pb2_grpc

FIRST_TEXT_TOKEN, N_TEXT_TOKENS = 300, 30_000


def scripted_token(token_ids: Sequence[int], seed: int) -> int:
    """The token after ``token_ids``: any change before it changes it."""
    digest = zlib.crc32(struct.pack(f"<{len(token_ids) + 1}q", seed, *token_ids))
    return FIRST_TEXT_TOKEN + digest % N_TEXT_TOKENS


def scripted_answer(prompt_ids: Sequence[int], seed: int, n_tokens: int) -> list[int]:
    """What an undisturbed worker answers."""
    ids = list(prompt_ids)
    for _ in range(n_tokens):
        ids.append(scripted_token(ids, seed))
    return ids[len(prompt_ids) :]


@dataclasses.dataclass(kw_only=True)
class Script:
    """How the worker behaves; may be changed while it runs."""

    token_seconds: float = 0.0
    tokens_per_message: int = 1
    # The answer ends by itself, with an end token, after this many tokens.
    end_after: int | None = None
    # Exactly these tokens, and then an end token.
    answer: Sequence[int] | None = None
    # Refuse RunTurn with this code.
    refuse: str = ""
    # Break the stream (or kill the process) once this many tokens were sent in one RunTurn.
    break_after: int | None = None
    kill_after: int | None = None
    # Send each message twice.
    repeat: bool = False
    # Leave out the token with this index.
    skip_index: int | None = None
    # Say nothing more to the coordinator.
    mute: bool = False
    # The engine hangs since then (of the monotonic clock), with heartbeats that go on.
    hangs_since: float | None = None
    draining: bool = False
    # As a node with that seal says.
    store_seal: str = ""


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, node_id: str, coordinator: str, script: Script | None = None, **identity: object) -> None:
        self.node_id = node_id
        self.boot_id = uuid4().hex
        self.script = script or Script()
        self.address = ""
        self.requests: list[worker_pb2.RunTurnRequest] = []
        self.times_left: list[float | None] = []
        self.stopped: list[worker_pb2.StopTurnRequest] = []
        self.dropped: list[str] = []
        self.published: list[worker_pb2.SnapshotInfo] = []
        self.resident: dict[str, int] = {}
        self.n_running = 0
        self.error: grpc.aio.AioRpcError | None = None
        self._coordinator = coordinator
        self._host = str(identity.pop("host", "127.0.0.1"))
        self._identity = {
            "model": "scripted",
            "fingerprint": "f" * 32,
            "context_length": 8192,
            "tokenizer_digest": "",
            **identity,
        }
        self._server = grpc.aio.server(options=server_options())
        self._channels = [grpc.aio.insecure_channel(a, options=channel_options()) for a in coordinator.split(",")]
        self._fleets = [fleet_pb2_grpc.FleetServiceStub(channel) for channel in self._channels]
        self._beating: list[asyncio.Task[None]] = []

    async def start(self) -> ScriptedWorker:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.address = f"{self._host}:{self._server.add_insecure_port(f'{self._host}:0')}"
        await self._server.start()
        self._beating = [asyncio.create_task(self._beat(fleet)) for fleet in self._fleets]
        return self

    async def stop(self) -> None:
        """Vanish: nothing is said, connections break."""
        for beating in self._beating:
            beating.cancel()
        await asyncio.gather(*self._beating, return_exceptions=True)
        await self._server.stop(None)
        for channel in self._channels:
            await channel.close()

    async def register(self, fleet: fleet_pb2_grpc.FleetServiceAsyncStub | None = None) -> fleet_pb2.RegisterResponse:
        request = fleet_pb2.RegisterRequest(
            node_id=self.node_id,
            boot_id=self.boot_id,
            address=self.address,
            geometry=common_pb2.KvGeometry(n_layers=30, n_kv_heads=3, head_dim=64, block_size=32),
            max_running=8,
            n_threads=1,
            kernel_path="scripted",
            load=self._load(),
            resident=self._resident(),
            **self._identity,
        )
        return await (fleet or self._fleets[0]).Register(request, timeout=2)

    async def heartbeat(self, fleet: fleet_pb2_grpc.FleetServiceAsyncStub | None = None) -> fleet_pb2.HeartbeatResponse:
        told = list(self.published)
        request = fleet_pb2.HeartbeatRequest(
            node_id=self.node_id, boot_id=self.boot_id, load=self._load(), resident=self._resident(),
            published=told, draining=self.script.draining,
        )  # fmt: skip
        response = await (fleet or self._fleets[0]).Heartbeat(request, timeout=2)
        self.published[:] = [one for one in self.published if one not in told]  # not what came meanwhile
        return response

    async def deregister(self) -> None:
        await self._fleets[0].Deregister(
            fleet_pb2.DeregisterRequest(node_id=self.node_id, boot_id=self.boot_id), timeout=2
        )

    async def _beat(self, fleet: fleet_pb2_grpc.FleetServiceAsyncStub) -> None:
        registered, pause_s = False, 0.05
        while True:
            if not self.script.mute:
                try:
                    if not registered:
                        pause_s = (await self.register(fleet)).heartbeat_seconds
                        registered = True
                    else:
                        registered = not (await self.heartbeat(fleet)).register_again
                        if not registered:
                            continue
                except grpc.aio.AioRpcError as e:
                    self.error = e
            await asyncio.sleep(pause_s if registered else 0.05)

    def _load(self) -> worker_pb2.NodeLoad:
        since = self.script.hangs_since
        return worker_pb2.NodeLoad(
            n_running=self.n_running, store_ok=True, kv_bytes_budget=1 << 30, store_seal=self.script.store_seal,
            stalled_seconds=0.0 if since is None else time.monotonic() - since, stall_limit_seconds=0.5,
        )  # fmt: skip

    def _resident(self) -> list[worker_pb2.ResidentSession]:
        return [worker_pb2.ResidentSession(session_id=s, n_tokens=n) for s, n in self.resident.items()]

    async def RunTurn(self, request: worker_pb2.RunTurnRequest, context) -> AsyncIterator[worker_pb2.RunTurnResponse]:
        self.requests.append(request)
        self.times_left.append(context.time_remaining())
        if self.script.refuse:
            code = self.script.refuse
            await context.abort(status_of(code), f"scripted to say {code}", trailing_metadata(code))
        self.n_running += 1
        try:
            async for response in self._answer(request, context):
                yield response
        finally:
            self.n_running -= 1

    async def _answer(self, request, context) -> AsyncIterator[worker_pb2.RunTurnResponse]:
        ids = list(request.token_ids)
        n_resident = min(self.resident.get(request.session_id, 0), len(ids) - 1)
        yield worker_pb2.RunTurnResponse(
            prefix=common_pb2.PrefixReport(n_tokens=len(ids), n_resident=n_resident, n_computed=len(ids) - n_resident)
        )
        n_sent, batch = 0, []
        while True:
            index = len(ids) - request.n_prompt_tokens
            end_after = len(self.script.answer) + 1 if self.script.answer is not None else self.script.end_after
            ends = end_after is not None and index + 1 >= end_after
            if ends:
                ids.append(request.end_token_ids[0])
            elif self.script.answer is not None:
                ids.append(self.script.answer[index])
            else:
                ids.append(scripted_token(ids, request.sampling.seed))
            self.resident[request.session_id] = len(ids) - 1
            token = common_pb2.GeneratedToken(index=index, token_id=ids[-1])
            if request.sampling.logprobs:
                token.logprob = -float(index)
                token.top_logprobs.add(token_id=ids[-1], logprob=-float(index))
            if index != self.script.skip_index:
                batch.append(token)
            last = ends or index + 1 == request.max_tokens
            if len(batch) >= self.script.tokens_per_message or last:
                for _ in range(2 if self.script.repeat else 1):
                    yield worker_pb2.RunTurnResponse(tokens=worker_pb2.GeneratedTokens(tokens=batch))
                n_sent += len(batch)
                batch = []
            if last:
                reason = common_pb2.FINISH_REASON_END if ends else common_pb2.FINISH_REASON_LENGTH
                yield worker_pb2.RunTurnResponse(finished=worker_pb2.RunFinished(reason=reason))
                return
            if self.script.kill_after is not None and n_sent >= self.script.kill_after:
                await asyncio.sleep(0.02)  # let the bytes leave
                os.kill(os.getpid(), signal.SIGKILL)
            if self.script.break_after is not None and n_sent >= self.script.break_after:
                await context.abort(grpc.StatusCode.UNKNOWN, "scripted to break")
            if self.script.draining:
                await context.abort(status_of("draining"), "scripted to drain", trailing_metadata("draining"))
            await self._pause()

    async def _pause(self) -> None:
        """Between two tokens; without end when it hangs."""
        await asyncio.sleep(self.script.token_seconds)
        if self.script.hangs_since is not None:
            await asyncio.Event().wait()

    async def StopTurn(self, request, context) -> worker_pb2.StopTurnResponse:
        self.stopped.append(request)
        return worker_pb2.StopTurnResponse()

    async def DropSession(self, request, context) -> worker_pb2.DropSessionResponse:
        self.dropped.append(request.session_id)
        self.resident.pop(request.session_id, None)
        return worker_pb2.DropSessionResponse()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node-id", required=True, help="of one worker, or of several with commas between them")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--tokenizer-digest", required=True)
    parser.add_argument("--vocabulary-size", type=int, required=True)
    parser.add_argument("--token-seconds", type=float, default=0.01)
    parser.add_argument("--kill-after", type=int)
    options = parser.parse_args()
    script = Script(token_seconds=options.token_seconds, kill_after=options.kill_after)
    identity = {
        "tokenizer_digest": options.tokenizer_digest, "vocabulary_size": options.vocabulary_size, "host": options.host,
    }  # fmt: skip
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGUSR1, lambda: setattr(script, "hangs_since", time.monotonic())
    )
    workers = []
    for node_id in options.node_id.split(","):
        workers.append(await ScriptedWorker(node_id, options.coordinator, script, **identity).start())
        await asyncio.sleep(random.uniform(0.0, 0.1))  # their beats are not one
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
