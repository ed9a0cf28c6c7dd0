"""A real cluster on this machine: a coordinator and some nodes, each a process of its own on the loopback."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvferry.client.errors import ClientError
from kvferry.client.sdk import Client, NodeState
from kvferry.drills.cluster_folder import ClusterFolder
from kvferry.drills.errors import PortUnusable, ProcessFailed
from kvferry.drills.process import KILL_S, POLL_S, READY_S, STOP_S, ManagedProcess
from kvferry.terminal.interrupts import closed_terminal_ignored

REGISTER_S: Final = 30.0
"""From "the processes serve" to "the coordinator counts them as live": a heartbeat, in practice below a second."""


def default_threads_per_node() -> int:
    """Half of the CPUs this process may use: one session runs on one node at a time, and the machine has other work."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


LOOPBACK: Final = "127.0.0.1"

OPTIONS_TOLD: Final = {
    "coordinator": {"--listen": "--port", "--state": "--dir", "--store": "--dir"},
    "gateway": {"--listen": "--http-port"},
}
NODE_OPTIONS_TOLD: Final = {"--store": "--dir", "--threads": "--threads-per-node"}
"""What the options of a process are called by `up`, which has others."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one process of a cluster runs, if not simply on the loopback.

    `within` is a command that becomes the process, such as one that enters a namespace. `coordinator` and `advertise`:
    addresses on the way to the coordinator and to this node, should something stand between them.
    """

    host: str = LOOPBACK
    within: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    coordinator: str | None = None
    advertise: str | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What a cluster is made of. `directory` keeps sessions and snapshots; port 0: a free one, which it keeps.

    `http_port`: of the gateway, which serves the OpenAI API and the dashboard; None: there is none. `drill_reports`: a
    folder that the dashboard lists. `places` has the processes that run elsewhere, by name. `certificates`: a folder
    with the --tls-dir of each process under its name, and that of an operator; None: plaintext. `starts_whole`: a
    node that does not start fails the cluster's start; else only the first one's does, and somebody watches the rest.
    Raises PortUnusable.
    """

    model: str
    directory: Path
    n_nodes: int = 3
    port: int = 0
    http_port: int | None = None
    drill_reports: Path | None = None
    threads_per_node: int = 1
    kv_memory: str = "512MiB"
    context: int | None = None
    lease_s: float = 3.0
    node_arguments: tuple[str, ...] = ()
    coordinator_arguments: tuple[str, ...] = ()
    gateway_arguments: tuple[str, ...] = ()
    places: Mapping[str, Place] = field(default_factory=dict)
    certificates: Path | None = None
    starts_whole: bool = True

    def __post_init__(self) -> None:
        if self.port and self.port == self.http_port:
            raise PortUnusable(
                f"--port and --http-port are both {self.port}: give each its own, or 0 for any free one."
            )


class LocalCluster:
    """Starts, stops and breaks it. As a context manager it starts with `with` and leaves no process behind.

    Not safe for several threads. Ends only processes that it started itself; they end by themselves when this one does.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.directory = options.directory
        self._port = options.port
        self._http_port = options.http_port
        self.folder = ClusterFolder(self.directory)
        self.coordinator = self._process("coordinator", [])
        self.gateway = None if options.http_port is None else self._process("gateway", [])
        self.nodes = {name: self._process(name, []) for name in (f"node-{i + 1}" for i in range(options.n_nodes))}

    @property
    def address(self) -> str:
        """host:port of the coordinator; known once it has been ready."""
        return f"{self._place(self.coordinator.name).host}:{self._port}"

    @property
    def http_address(self) -> str:
        """host:port of the gateway; known once it has been ready."""
        return f"{LOOPBACK}:{self._http_port}"

    @property
    def processes(self) -> list[ManagedProcess]:
        """The nodes, then the coordinator, then the gateway if there is one."""
        return [*self.nodes.values(), self.coordinator, *([self.gateway] if self.gateway else [])]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """The coordinator, then the nodes; returns when all are live.

        Raises ProcessFailed, DirectoryBusy, PortUnusable.
        The first node goes ahead: on a machine that never ran one it compiles the kernels, and the others find them.
        """
        self.folder.lock()
        if self._place(self.coordinator.name).host == LOOPBACK:
            self._check_port(self._port, "--port")
        self._check_port(self._http_port or 0, "--http-port")
        self.start_coordinator()
        self.start_gateway()
        first, *others = self.nodes
        self.start_nodes([first])
        if self.options.starts_whole:
            self.start_nodes(others)
            self.wait_live(self.nodes)
        else:
            self._start_what_starts(others)

    def _start_what_starts(self, node_ids: Iterable[str]) -> None:
        """What does not run afterwards is for whoever watches the cluster.

        Raises ProcessFailed for one that runs and does not become live.
        """
        for node_id in node_ids:
            with suppress(ProcessFailed):
                self.begin(node_id)
        for node_id in node_ids:
            with suppress(ProcessFailed):
                self.nodes[node_id].wait_ready(READY_S)
        try:
            self.wait_live(name for name, process in self.nodes.items() if process.is_running)
        except ProcessFailed:
            if all(process.is_running for process in self.processes):
                raise

    def start_coordinator(self) -> None:
        """On the port it had before, if it had one; returns when it serves."""
        self.begin(self.coordinator.name)
        ready = self.coordinator.wait_ready()
        self._port = int(str(ready["address"]).rpartition(":")[2])

    def start_gateway(self) -> None:
        """If there is to be one; returns when it serves."""
        if self.gateway is not None:
            self.begin(self.gateway.name)
            ready = self.gateway.wait_ready()
            self._http_port = int(str(ready["address"]).rpartition(":")[2])

    def start_nodes(self, node_ids: Iterable[str]) -> None:
        """Returns when their processes serve."""
        processes = [self.nodes[node_id] for node_id in node_ids]
        for process in processes:
            self.begin(process.name)
        for process in processes:
            process.wait_ready(READY_S)

    def begin(self, name: str) -> None:
        """Starts the coordinator or a node, and does not wait until it serves."""
        if name == self.coordinator.name:
            self.coordinator.arguments = self._coordinator_arguments()
            self.coordinator.start()
        elif self.gateway is not None and name == self.gateway.name:
            self.gateway.arguments = self._gateway_arguments(self.gateway)
            self.gateway.start()
        else:
            self.nodes[name].arguments = self._node_arguments(name)
            self.nodes[name].start()

    def wait_live(self, node_ids: Iterable[str], timeout_s: float = REGISTER_S) -> None:
        """Until the coordinator counts all of these nodes as live. Raises ProcessFailed."""
        wanted = set(node_ids)
        live: set[str] = set()
        deadline = time.monotonic() + timeout_s
        with Client(self.address, patience_s=0, tls_dir=self._tls_dir("operator")) as client:
            while time.monotonic() < deadline:
                try:
                    live = {node.node_id for node in client.nodes() if node.state is NodeState.LIVE}
                except ClientError:
                    live = set()
                if wanted <= live:
                    return
                time.sleep(POLL_S)
        missing = ", ".join(sorted(wanted - live))
        raise ProcessFailed(
            f"{missing} did not become live within {timeout_s:.0f} s (logs: {self.directory / 'logs'})."
        )

    def ensure_all_live(self) -> None:
        """Starts again whatever was killed, and waits until the cluster is whole."""
        if not self.coordinator.is_running:
            self.start_coordinator()
        self.start_nodes([name for name, process in self.nodes.items() if not process.is_running])
        self.wait_live(self.nodes)

    def kill_node(self, node_id: str) -> None:
        """SIGKILL: a board whose plug is pulled."""
        self.nodes[node_id].kill()

    def freeze_node(self, node_id: str) -> None:
        """SIGSTOP: alive, connected, and silent."""
        self.nodes[node_id].signal(signal.SIGSTOP)

    def thaw_node(self, node_id: str) -> None:
        """SIGCONT."""
        self.nodes[node_id].signal(signal.SIGCONT)

    def kill_coordinator(self) -> None:
        """SIGKILL."""
        self.coordinator.kill()

    def kill_all(self) -> None:
        """SIGKILL to every process at once: a power cut."""
        for process in self.processes:
            process.send(signal.SIGKILL)
        for process in self.processes:
            process.wait_gone(KILL_S)

    def restart(self) -> None:
        """Stops everything in order and starts it again: new processes, the same directory and port."""
        self.stop_processes()
        self.start_coordinator()
        self.start_gateway()
        self.start_nodes(self.nodes)
        self.wait_live(self.nodes)

    def stop_processes(self, timeout_s: float = STOP_S) -> list[str]:
        """The nodes together, then the others; names of those that had to be killed."""
        forced: list[str] = []
        nodes = list(self.nodes.values())
        for group in (nodes, self.processes[len(nodes) :]):
            for process in group:
                process.ask_to_stop()
            deadline = time.monotonic() + timeout_s
            forced += [p.name for p in group if not p.end_within(max(0.0, deadline - time.monotonic()))]
        return forced

    def stop(self) -> list[str]:
        """Ends all processes and frees the directory; names of those that had to be killed.

        Interrupted, it kills all of them. Either way no half-written file is left.
        """
        try:
            with closed_terminal_ignored():
                return self.stop_processes()
        except KeyboardInterrupt:  # a second one means: now
            self.kill_all()
            raise
        finally:
            if self.folder.is_locked and not any(process.is_running for process in self.processes):
                self.folder.sweep()
            self.folder.unlock()

    def log_of(self, name: str) -> str:
        """What a process wrote so far."""
        return (self.directory / "logs" / f"{name}.log").read_text(errors="replace")

    def _process(self, name: str, arguments: list[str]) -> ManagedProcess:
        run, logs, place = self.directory / "run", self.directory / "logs", self._place(name)
        told = OPTIONS_TOLD.get(name, NODE_OPTIONS_TOLD)
        return ManagedProcess(
            name, arguments, run / f"{name}.ready", logs / f"{name}.log",
            environment=dict(place.environment), within=place.within, options_told=told,
        )  # fmt: skip

    def _place(self, name: str) -> Place:
        return self.options.places.get(name, Place())

    def _coordinator_arguments(self) -> list[str]:
        options = self.options
        return [
            *("coordinator", "run", "--model", options.model),
            *("--listen", f"{self._place(self.coordinator.name).host}:{self._port}"),
            *("--state", str(self.directory / "state"), "--store", str(self.directory / "store")),
            *("--lease", str(options.lease_s), "--ready-file", str(self.coordinator.ready_file)),
            *self._tls_arguments(self.coordinator.name),
            *options.coordinator_arguments,
        ]

    def _node_arguments(self, node_id: str) -> list[str]:
        options, place = self.options, self._place(node_id)
        context = [] if options.context is None else ["--context", str(options.context)]
        advertise = [] if place.advertise is None else ["--advertise", place.advertise]
        return [
            *("node", "run", "--model", options.model, "--node-id", node_id),
            *("--coordinator", place.coordinator or self.address),
            *("--store", str(self.directory / "store"), "--listen", f"{place.host}:0", *advertise),
            *("--threads", str(options.threads_per_node), "--kv-memory", options.kv_memory, *context),
            *("--ready-file", str(self.nodes[node_id].ready_file)),
            *self._tls_arguments(node_id),
            *options.node_arguments,
        ]

    def _gateway_arguments(self, gateway: ManagedProcess) -> list[str]:
        return [
            *("gateway", "run", "--coordinator", self.address, "--listen", self.http_address, "--allow-kill"),
            *([] if self.options.drill_reports is None else ["--drill-reports", str(self.options.drill_reports)]),
            *("--ready-file", str(gateway.ready_file)),
            *self._tls_arguments(gateway.name),
            *self.options.gateway_arguments,
        ]

    def _tls_arguments(self, name: str) -> list[str]:
        """Plaintext beyond the loopback is that of namespaces, which nobody else is in."""
        if (folder := self._tls_dir(name)) is not None:
            return ["--tls-dir", str(folder)]
        return [] if self._place(name).host == LOOPBACK else ["--insecure-plaintext"]

    def _tls_dir(self, name: str) -> Path | None:
        return None if self.options.certificates is None else self.options.certificates / name

    @staticmethod
    def _check_port(port: int, option: str) -> None:
        """Raises PortUnusable in the words of `up`: a process would speak of an option that it alone has."""
        if port == 0:
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server: old connections do not count
            try:
                probe.bind((LOOPBACK, port))
                probe.listen(1)
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise PortUnusable(
                    f"Cannot listen on 127.0.0.1:{port} ({reason}); choose another {option}, 0 for any free one, "
                    "or stop what uses it."
                ) from error
