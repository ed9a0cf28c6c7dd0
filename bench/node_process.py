"""Real nodes in processes of their own, driven over gRPC as the coordinator drives them."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc

_KVFERRY: Final = (sys.executable, "-c", "from kvferry.client.cli import main; main()")
_PATIENCE_S: Final = 120.0  # the first start on a machine compiles the kernels

_numbers = itertools.count(1)


@dataclass(slots=True)
class Answer:
    """A turn as its caller saw it: seconds from the call to the first and to the last token."""

    prefix: common_pb2.PrefixReport
    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True)
class NodeProcess:
    """A node that serves."""

    process: subprocess.Popen[bytes]
    stub: worker_pb2_grpc.WorkerServiceStub

    def run_turn(self, session: str, tokens: Sequence[int], n_new: int, *, recompute: bool = False) -> Answer:
        """A greedy turn of exactly ``n_new`` tokens."""
        request = worker_pb2.RunTurnRequest(
            session_id=session,
            turn_id="t",
            epoch=next(_numbers),
            token_ids=tokens,
            n_prompt_tokens=len(tokens),
            max_tokens=n_new,
            recompute=recompute,
        )
        answer = Answer(common_pb2.PrefixReport())
        began_at = time.perf_counter()
        for response in self.stub.RunTurn(request, timeout=_PATIENCE_S):
            now = time.perf_counter() - began_at
            if response.HasField("prefix"):
                answer.prefix = response.prefix
            for token in response.tokens.tokens:
                answer.first_s = answer.first_s if answer.tokens else now
                answer.last_s = now
                answer.tokens.append(token.token_id)
        return answer

    def save(self, session: str) -> None:
        """Returns when all of its rows are in the store."""
        self.stub.SaveSession(worker_pb2.SaveSessionRequest(session_id=session), timeout=_PATIENCE_S)

    def drop(self, session: str) -> None:
        """Forgets its rows."""
        self.stub.DropSession(worker_pb2.DropSessionRequest(session_id=session), timeout=_PATIENCE_S)

    def status(self) -> worker_pb2.GetNodeStatusResponse:
        """How it is."""
        return self.stub.GetNodeStatus(worker_pb2.GetNodeStatusRequest(), timeout=_PATIENCE_S)

    def wait_until(self, holds: Callable[[worker_pb2.NodeLoad], bool]) -> None:
        """Returns when something is true of its load."""
        deadline = time.monotonic() + _PATIENCE_S
        while not holds(self.status().load):
            if time.monotonic() > deadline:
                raise TimeoutError("a node of the bench does not get on")
            time.sleep(0.02)


@contextlib.contextmanager
def node_process(folder: Path, model: str, *flags: str) -> Iterator[NodeProcess]:
    """Starts a node, and kills it at the end. ``folder`` takes its log and what says where it serves."""
    name = f"bench-{next(_numbers)}"
    ready_file, log_path = folder / f"{name}.json", folder / f"{name}.log"
    command = [*_KVFERRY, "node", "run", "--model", model, "--node-id", name, "--ready-file", str(ready_file), *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"a node of the bench did not start:\n{log_path.read_text()}")
            time.sleep(0.02)
        address = json.loads(ready_file.read_text())["address"]
        with grpc.insecure_channel(address, options=channel_options()) as channel:
            yield NodeProcess(process, worker_pb2_grpc.WorkerServiceStub(channel))
    finally:
        process.kill()
        process.wait(10)
