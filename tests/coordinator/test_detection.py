"""How soon a lost node is left, on real processes and with the default lease (promise 18)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_kit import Client, Processes

BOUNDS_S = {"killed": 0.5, "frozen": 3.5, "cut": 3.5, "hung": 3.5}
N_WORKERS = 5

pytestmark = pytest.mark.alone  # its times are promises
HOST, BOARD = "10.213.77.1", "10.213.77.2"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def board_of_its_own() -> Iterator[str]:
    """A network namespace with one cable to this one."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nft")):
        pytest.skip("a cut cable needs root, iproute2 and nftables")
    name = f"kvferry{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"no network namespaces here: {e.stderr.decode()}")
    try:
        run("ip", "link", "add", f"v{os.getpid()}", "type", "veth", "peer", "name", "board", "netns", name)
        run("ip", "addr", "add", f"{HOST}/30", "dev", f"v{os.getpid()}")
        run("ip", "link", "set", f"v{os.getpid()}", "up")
        run("ip", "-n", name, "addr", "add", f"{BOARD}/30", "dev", "board")
        run("ip", "-n", name, "link", "set", "board", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        run("ip", "netns", "del", name)  # and with it both ends of the cable


def cut(namespace: str) -> None:
    """Every packet vanishes, in both directions; nobody is told."""
    rules = "".join(
        f"add chain inet cut {hook} {{ type filter hook {hook} priority 0; policy drop; }}\n"
        for hook in ("input", "output")
    )
    subprocess.run(
        ["ip", "netns", "exec", namespace, "nft", "-f", "-"], input=f"add table inet cut\n{rules}".encode(), check=True
    )


@pytest.mark.parametrize("n_rounds", [1, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_18_a_lost_node_is_left_in_time(processes: Processes, tmp_path: Path, n_rounds: int) -> None:
    left_s: dict[str, list[float]] = {kind: [] for kind in BOUNDS_S}
    with board_of_its_own() as namespace:
        for number in range(n_rounds):
            # a new one each time: what it learned of nodes that are gone would send all turns to few of them
            coordinator, address = processes.coordinator(
                "0.0.0.0:0", "--state", str(tmp_path / f"state{number}"), "--insecure-plaintext"
            )
            port = address.rpartition(":")[2]
            client = Client(f"127.0.0.1:{port}")
            try:
                await one_round(processes, client, port, namespace, number, left_s)
            finally:
                await client.channel.close()
                coordinator.kill()
                coordinator.wait()
    for kind, spans in left_s.items():
        print(f"{kind}: {len(spans)} times, at most {max(spans):.2f} s")
        assert len(spans) >= n_rounds * N_WORKERS
        assert max(spans) <= BOUNDS_S[kind], kind


async def one_round(
    processes: Processes, client: Client, port: str, namespace: str, number: int, left_s: dict[str, list[float]]
) -> None:
    """All four faults at once, each on five nodes that answer."""
    started = {}
    for kind in BOUNDS_S:
        names = ",".join(f"{kind}-{number}-{i}" for i in range(N_WORKERS))
        where = ("--host", BOARD) if kind == "cut" else ()
        within = ("ip", "netns", "exec", namespace) if kind == "cut" else ()
        coordinator = f"{HOST if kind == 'cut' else '127.0.0.1'}:{port}"
        started[kind] = processes.worker(names, coordinator, "--token-seconds", "0.02", *where, within=within)
    await client.until_nodes(len(started) * N_WORKERS)
    watches: dict[str, list[Watch]] = {}
    while len(watches) < len(started) * N_WORKERS:  # one on every node; some get two
        watch = Watch(client, await client.new_session())
        watches.setdefault(await asyncio.wait_for(watch.node_id, 20), []).append(watch)
        assert sum(map(len, watches.values())) < 8 * len(started) * N_WORKERS
    survivors = processes.worker(f"survivor-{number}", f"127.0.0.1:{port}", "--token-seconds", "0.02")
    await client.until_nodes(len(started) * N_WORKERS + 1)
    began_s = {}
    for kind, act in (
        ("killed", started["killed"].kill),
        ("frozen", lambda: started["frozen"].send_signal(signal.SIGSTOP)),
        ("hung", lambda: started["hung"].send_signal(signal.SIGUSR1)),
        ("cut", lambda: cut(namespace)),
    ):
        act()
        began_s[kind] = time.monotonic()
    for node_id, watching in watches.items():
        kind = node_id.partition("-")[0]
        for watch in watching:
            left_s[kind].append(await asyncio.wait_for(watch.left_s, 20) - began_s[kind])
            watch.task.cancel()
    for process in (*started.values(), survivors):
        process.kill()
        process.wait()
    run("ip", "netns", "exec", namespace, "nft", "flush", "ruleset")


class Watch:
    """Reads one answer: which node gave it first, and when it was left."""

    def __init__(self, client: Client, session: str) -> None:
        loop = asyncio.get_running_loop()
        self.node_id: asyncio.Future[str] = loop.create_future()
        self.left_s: asyncio.Future[float] = loop.create_future()
        self.task = asyncio.create_task(self._read(client, session))

    async def _read(self, client: Client, session: str) -> None:
        async for event in client.generate(session, f"{session} says hello.", max_tokens=4000):
            if event.HasField("placed") and not self.node_id.done():
                self.node_id.set_result(event.placed.node_id)
            if event.HasField("node_lost") and not self.left_s.done():
                self.left_s.set_result(time.monotonic())
