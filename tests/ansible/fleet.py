"""A fleet of test boards for the playbooks: an inventory, ansible-playbook, and the kvferry command beside it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import platformdirs
import pytest

from . import boards
from .boards import Rig

ANSIBLE: Final = Path(__file__).parents[2] / "ansible"
COORDINATOR: Final = 1
NODES: Final = (2, 3, 4)
ALL_LIVE: Final = [f"n{board}" for board in NODES]


def ansible_playbook() -> str | None:
    """The command, from this environment or from the path."""
    return shutil.which("ansible-playbook", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@dataclass(frozen=True)
class Run:
    """One run of a playbook."""

    returncode: int
    output: str
    seconds: float

    @property
    def changed(self) -> dict[str, int]:
        """Host → number of changed tasks."""
        recap = self.output.rpartition("PLAY RECAP")[2]
        lines = [line.split() for line in recap.splitlines() if "changed=" in line]
        return {line[0]: int(next(word for word in line if word.startswith("changed="))[8:]) for line in lines}


@dataclass(frozen=True)
class Shape:
    """Which boards are what."""

    coordinators: tuple[int, ...]
    nodes: tuple[int, ...]
    etcd: tuple[int, ...] = ()

    def name(self, board: int) -> str:
        """In the inventory."""
        return f"c{board}" if board in self.coordinators else f"n{board}"

    def groups(self, rig: Rig) -> dict[str, Any]:
        """The inventory's groups."""
        return {
            group: {"hosts": {self.name(board): {"ansible_host": rig.address(board)} for board in boards}}
            for group, boards in (("coordinators", self.coordinators), ("nodes", self.nodes), ("etcd", self.etcd))
            if boards
        }


ONE_COORDINATOR: Final = Shape(coordinators=(COORDINATOR,), nodes=NODES)
TWO_COORDINATORS: Final = Shape(coordinators=(1, 2), nodes=(3, 4), etcd=(1, 2, 3))


class Fleet:
    """Boards of a shape; the folder they share is the store. The controller's secrets lie in a folder of the rig."""

    def __init__(self, rig: Rig, source: Path, bundles: Path, shape: Shape = ONE_COORDINATOR) -> None:
        self.rig = rig
        self.shape = shape
        self.address = ",".join(f"{rig.address(board)}:7070" for board in shape.coordinators)
        self._secrets = rig.folder / "secrets"
        self.inventory = rig.folder / "inventory.json"
        variables = {
            "ansible_ssh_common_args": f"-F {rig.ssh_config}",
            "program_source": str(source),
            "program_bundles": str(bundles),
            "kvferry_authority": str(self._secrets / "authority"),
            "kvferry_operator": str(self._secrets / "operator"),
            "kvferry_tokens": str(self._secrets / "tokens.json"),
            "kvferry_token": str(self._secrets / "token"),
            "etcd_program": shutil.which("etcd") or "",
            # Four boards share this machine's memory and its processors.
            "node_kv_memory": "256MiB",
            "node_threads": 1,
            "node_context": 2048,
            "node_drain_seconds": 30,
        }
        inventory = {**shape.groups(rig), "all": {"vars": variables}}
        self.inventory.write_text(json.dumps(inventory))  # JSON is YAML

    @property
    def token(self) -> str:
        """The API token that the first rollout made."""
        return (self._secrets / "token").read_text().strip()

    def play(self, playbook: str | Path, **variables: Any) -> Run:
        """Run it to its end, over ssh."""
        started = time.monotonic()
        program = ansible_playbook()
        assert program is not None
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # the controller's kvferry
            "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.rig.folder / "cp"),
            "ANSIBLE_NOCOLOR": "1",
        }
        done = subprocess.run(
            self.rig.beside([program, "-i", self.inventory, playbook, "-e", json.dumps(variables)]),
            cwd=ANSIBLE, env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return Run(done.returncode, done.stdout, time.monotonic() - started)

    def as_operator(self, argv: Sequence[str | Path]) -> list[str]:
        """A command on the boards' network that has the operator's certificate; it ends with the rig."""
        return self.rig.in_control(["env", f"KVFERRY_TLS_DIR={self._secrets / 'operator'}", *argv])

    def kvferry(self, *arguments: str) -> list[str]:
        """The command line of the operator."""
        return self.as_operator([Path(sys.executable).with_name("kvferry"), *arguments])

    def run_in_control(self, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        """A command on the boards' network, to its end."""
        return subprocess.run(self.rig.in_control(argv), capture_output=True, text=True, check=False, timeout=120)

    def connections_of(self, pid: int) -> list[str]:
        """Whom a process on the boards' network is connected to, HOST:PORT each."""
        shown = self.run_in_control(["ss", "--no-header", "--tcp", "--numeric", "--processes", "state", "established"])
        return [line.split()[3].replace("[::ffff:", "").replace("]:", ":") for line in shown.stdout.splitlines()
                if f"pid={pid}," in line]  # fmt: skip

    def openai(self, board: int, path: str, body: dict[str, Any] | None = None, *, token: str | None = None) -> Any:
        """What the gateway on a board answers to a person's curl: status, and the body if it is JSON."""
        authority = self._secrets / "operator/ca.pem"
        url = f"https://{self.rig.address(board)}:8080{path}"
        argv = ["curl", "--silent", "--show-error", "--cacert", authority, "--write-out", "\n%{http_code}", url]
        argv += ["--header", f"authorization: Bearer {token or self.token}"]
        if body is not None:
            argv += ["--json", json.dumps(body)]
        done = self.run_in_control(argv)
        assert done.returncode == 0, done.stderr
        text, _, status = done.stdout.rpartition("\n")
        return int(status), json.loads(text) if text.startswith(("{", "[")) else text

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            self.kvferry("status", "--json", "--coordinator", self.address),
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def live(self) -> list[str]:
        return sorted(node["node_id"] for node in self.status()["nodes"] if node["state"] == "live")

    def release_on(self, board: int) -> str:
        """The release that people's shells get there."""
        return self.rig.ssh(board, "basename $(readlink /opt/kvferry/current)").stdout.strip()

    def wait_until_live(self, names: list[str], seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.live() != names:
            assert time.monotonic() < until, f"live after {seconds} s: {self.live()}, not {names}"
            time.sleep(0.5)

    def chat(self, text: str, n_tokens: int, *more: str) -> subprocess.Popen[str]:
        """One turn; its events come as JSON, one a line."""
        arguments = ["--coordinator", self.address, "--json", "--max-tokens", str(n_tokens), "--message", text, *more]
        return subprocess.Popen(
            self.kvferry("chat", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def copy_of_sources(folder: Path) -> Path:
    """What a bundle is made of, so that a test may change it and nobody edits it meanwhile."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ANSIBLE.parent / name, folder / name)
    rooms = ANSIBLE.parent / "src/kvferry"
    shutil.copytree(rooms, folder / "src/kvferry", symlinks=True)
    for room in rooms.iterdir():
        shutil.copytree(room.resolve(), folder / room.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@contextlib.contextmanager
def bare_boards(shape: Shape, source: Path, folder: Path) -> Iterator[Fleet]:
    """As many boards as the shape needs, up, with nothing on them. Skips the test where there can be none."""
    reason = boards.why_not() or (None if ansible_playbook() else "ansible-playbook is not installed")
    if reason:
        pytest.skip(reason)
    base = boards.base_root(platformdirs.user_cache_path("kvferry") / "test-boards")
    n_boards = max(*shape.coordinators, *shape.nodes)
    with Rig.make(folder / "rig", n_boards, base, shared_at="/srv/kvferry/store", memory_bytes=2 << 30) as rig:
        for board in rig.boards:
            rig.start(board)
        for board in rig.boards:
            rig.wait_until_up(board)
        yield Fleet(rig, source, folder / "bundles", shape)


@dataclass(frozen=True)
class Answer:
    """What a turn's events say."""

    events: list[dict[str, Any]]

    @property
    def token_ids(self) -> list[int]:
        return [event["token_id"] for event in self.events if event["event"] == "token"]

    @property
    def sequence(self) -> list[int]:
        return [event["sequence"] for event in self.events if event["event"] == "token"]

    @property
    def nodes(self) -> list[str]:
        """Who had the turn, in order."""
        names = [event["node_id"] for event in self.events if event["event"] == "placed"]
        return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]

    @property
    def finished(self) -> dict[str, Any]:
        return next(event for event in self.events if event["event"] == "finished")


def begun(turn: subprocess.Popen[str], n_tokens: int) -> list[dict[str, Any]]:
    """Its events until that many tokens have come; the rest is `answer_of`'s."""
    assert turn.stdout is not None
    events = []
    for line in turn.stdout:
        events.append(json.loads(line))
        if len(Answer(events).token_ids) == n_tokens:
            break
    return events


def answer_of(turn: subprocess.Popen[str]) -> Answer:
    """All of it; raises with what the command said when it failed."""
    out, err = turn.communicate(timeout=300)
    assert turn.returncode == 0, err
    return Answer([json.loads(line) for line in out.splitlines()])
