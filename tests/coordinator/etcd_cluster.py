"""Real etcd members on the loopback, each a process that can be killed, stopped and started again on its data."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

from free_ports import free_port

BINARY = shutil.which("etcd")
WHY_NOT = "etcd is not installed (Debian: etcd-server)"

COORDINATOR = "coordinator.kvferry.internal"

READY_S = 30.0
"""Members are ready within seconds; on a busy machine it may take longer, never this long."""


class EtcdCluster:
    """Members ``0`` to ``n - 1``. Elections take about half a second, so that tests need not wait for real ones."""

    def __init__(self, folder: Path, n_members: int = 1, tls_dir: Path | None = None) -> None:
        """``tls_dir``: clients must show a certificate that has the name of `COORDINATOR`; None: plaintext."""
        self._folder = folder
        ports = [free_port() for _ in range(3 * n_members)]
        self._client_ports, self._peer_ports = ports[:n_members], ports[n_members : 2 * n_members]
        self._metrics_ports = ports[2 * n_members :]
        self._tls_dir = tls_dir
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for number in range(len(self._client_ports)):
            self.start(number)
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._processes):
            self.kill(number)

    @property
    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._client_ports]

    @property
    def url(self) -> str:
        """For ``--registry``."""
        return f"{'etcds' if self._tls_dir else 'etcd'}://{','.join(self.endpoints)}"

    def start(self, number: int) -> None:
        client = f"{'https' if self._tls_dir else 'http'}://127.0.0.1:{self._client_ports[number]}"
        peer, metrics = (f"http://127.0.0.1:{ports[number]}" for ports in (self._peer_ports, self._metrics_ports))
        members = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peer_ports))
        with (self._folder / f"etcd{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [
                    str(BINARY), "--name", f"m{number}", "--data-dir", str(self._folder / f"etcd{number}"),
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", members, "--initial-cluster-state", "new",
                    "--listen-metrics-urls", metrics, "--heartbeat-interval", "50", "--election-timeout", "500",
                    *self._certificates(),
                ],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _certificates(self) -> list[str]:
        if self._tls_dir is None:
            return []
        files = {"cert-file": "cert.pem", "key-file": "key.pem", "trusted-ca-file": "ca.pem"}
        paths = [f"--{flag}={self._tls_dir / name}" for flag, name in files.items()]
        return [*paths, "--client-cert-auth", f"--client-cert-allowed-hostname={COORDINATOR}"]

    def kill(self, number: int) -> None:
        process = self._processes.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def freeze(self, number: int) -> None:
        os.kill(self._processes[number].pid, signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        os.kill(self._processes[number].pid, signal.SIGCONT)

    def wait_ready(self) -> None:
        """Until every member that runs has a leader."""
        for number in self._processes:
            deadline = time.monotonic() + READY_S
            while not self._is_healthy(number):
                assert time.monotonic() < deadline, self.logs()
                time.sleep(0.02)

    def leader(self) -> int:
        """The member that leads."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            for number in self._processes:
                if "etcd_server_is_leader 1" in self._get(number, "metrics"):
                    return number
            time.sleep(0.02)
        raise AssertionError(self.logs())

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self._folder.glob("etcd*.log")))

    def _is_healthy(self, number: int) -> bool:
        return '"true"' in self._get(number, "health")

    def _get(self, number: int, page: str) -> str:
        try:
            url = f"http://127.0.0.1:{self._metrics_ports[number]}/{page}"
            with urllib.request.urlopen(url, timeout=2) as response:
                return response.read().decode()
        except (urllib.error.URLError, OSError):
            return ""
