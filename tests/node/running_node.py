"""A node in a process of its own, spoken to over its socket."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc

KVFERRY = (sys.executable, "-c", "from kvferry.client.cli import main; main()")
SABOTAGED = (sys.executable, str(Path(__file__).parent / "sabotaged_node.py"))
BIG_LITTLE = (sys.executable, str(Path(__file__).parent / "big_little_node.py"))
START_SECONDS = 120.0  # the first start on a machine compiles the kernels
TURN_SECONDS = 120.0
ROW_BYTES = 46_080  # of the demo's model, float32

_epochs = itertools.count(1)


@dataclass
class Answer:
    """What one RunTurn call brought."""

    prefix: common_pb2.PrefixReport | None = None
    tokens: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    reason: int | None = None

    @property
    def sources(self) -> tuple[int, int, int]:
        """Rows from memory, from the store, computed."""
        assert self.prefix is not None
        return self.prefix.n_resident, self.prefix.n_restored, self.prefix.n_computed

    def take(self, response: worker_pb2.RunTurnResponse) -> None:
        """Add one message; the prefix report comes first and once."""
        match response.WhichOneof("event"):
            case "prefix":
                assert self.prefix is None
                assert not self.tokens
                self.prefix = response.prefix
            case "tokens":
                assert self.prefix is not None
                self.tokens += [token.token_id for token in response.tokens.tokens]
                self.indexes += [token.index for token in response.tokens.tokens]
            case "finished":
                self.reason = response.finished.reason

    def take_all(self, call: Iterable[worker_pb2.RunTurnResponse]) -> Answer:
        """Add all messages to the end; raises the call's error."""
        for response in call:
            self.take(response)
        return self


@dataclass
class RunningNode:
    """A started node process."""

    process: subprocess.Popen[str]
    address: str
    log_path: Path
    channel: grpc.Channel
    generation: int = 0  # of the coordinator we claim to be
    orders: Path = Path()  # tells a sabotaged node what to do wrong

    @property
    def stub(self) -> worker_pb2_grpc.WorkerServiceStub:
        """Its WorkerService."""
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    @property
    def log(self) -> str:
        """What it logged so far."""
        return self.log_path.read_text()

    def start_turn(
        self, tokens: Sequence[int], *, session: str = "s", epoch: int | None = None, **request: object
    ) -> grpc.CallIterator[worker_pb2.RunTurnResponse]:
        """Begin a turn; each gets an epoch higher than all before, unless told otherwise."""
        fields = {
            "n_prompt_tokens": len(tokens),
            "max_tokens": 16,
            "turn_id": "t",
            "end_token_ids": [2],
            "coordinator_generation": self.generation,
        } | request
        message = worker_pb2.RunTurnRequest(
            session_id=session,
            token_ids=tokens,
            epoch=next(_epochs) if epoch is None else epoch,
            **fields,
        )
        return self.stub.RunTurn(message, timeout=TURN_SECONDS)

    def run_turn(self, tokens: Sequence[int], **request: object) -> Answer:
        """A turn to its end."""
        return Answer().take_all(self.start_turn(tokens, **request))

    def drop(self, session: str = "s") -> None:
        """Forget a session's rows."""
        self.stub.DropSession(worker_pb2.DropSessionRequest(session_id=session), timeout=10)

    def drop_all(self) -> None:
        """Nothing that an earlier test left may be shared."""
        for resident in self.status().resident:
            self.drop(resident.session_id)
        self.wait_for("not resident and load.n_running + load.n_queued == 0")

    def status(self) -> worker_pb2.GetNodeStatusResponse:
        """How it is."""
        return self.stub.GetNodeStatus(worker_pb2.GetNodeStatusRequest(), timeout=10)

    def wait_for(self, condition: str, seconds: float = 20.0) -> worker_pb2.GetNodeStatusResponse:
        """Ask for the status until an expression over `load`, `resident` and `status` holds."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.status()
            names = {s.session_id: s.n_tokens for s in status.resident}
            if eval(condition, {"load": status.load, "resident": names, "status": status}):  # noqa: S307 - our own tests
                return status
            assert time.monotonic() < deadline, f"{condition} does not come true: {status}"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)


def node_command(model: Path, *flags: str) -> list[str]:
    """The command line of a node."""
    return [*KVFERRY, "node", "run", "--model", str(model), "--threads", "2", *flags]


@contextlib.contextmanager
def running_node(
    folder: Path,
    model: Path,
    *flags: str,
    program: Sequence[str] | None = None,
    wait: bool = True,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[RunningNode]:
    """Start a node, wait until it serves, and kill it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    ready_file, log_path, orders = folder / "ready.json", folder / "log.txt", folder / "orders"
    ready_file.unlink(missing_ok=True)
    command = node_command(model, "--node-id", folder.name, "--ready-file", str(ready_file), *flags)
    if program is not None:
        command[: len(KVFERRY)] = program
    with log_path.open("w") as log:
        env = os.environ | {"KVFERRY_TEST_SABOTAGE": str(orders)} | (environment or {})
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=env)
    try:
        deadline = time.monotonic() + start_seconds
        while wait and not ready_file.exists():
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.02)
        address = json.loads(ready_file.read_text())["address"] if wait else ""
        with grpc.insecure_channel(address, options=channel_options()) as channel:
            yield RunningNode(process, address, log_path, channel, orders=orders)
    finally:
        process.kill()
        process.wait(10)


def error_of(call: grpc.RpcError) -> tuple[str, str, str]:
    """Status, code and sentence of a failed call."""
    metadata = dict(call.trailing_metadata() or ())
    return call.code().name, str(metadata.get("kvferry-code", "")), str(call.details())
