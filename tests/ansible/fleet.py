"""A fleet of test boards for the playbooks: an inventory, ansible-playbook, and the kvferry command beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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


class Fleet:
    """Board 1 is the coordinator, the others are nodes named n2, n3, ...; the folder they share is the store."""

    def __init__(self, rig: Rig, source: Path, bundles: Path) -> None:
        self.rig = rig
        self.address = f"{rig.address(COORDINATOR)}:7070"
        self._inventory = rig.folder / "inventory.json"
        variables = {
            "ansible_ssh_common_args": f"-F {rig.ssh_config}",
            "program_source": str(source),
            "program_bundles": str(bundles),
            # Four boards share this machine's memory and its processors.
            "node_kv_memory": "256MiB",
            "node_threads": 1,
            "node_context": 2048,
            "node_drain_seconds": 30,
        }
        hosts = {"c1": {"ansible_host": rig.address(COORDINATOR)}}
        nodes = {f"n{board}": {"ansible_host": rig.address(board)} for board in NODES if board in rig.boards}
        inventory = {"coordinators": {"hosts": hosts}, "nodes": {"hosts": nodes}, "all": {"vars": variables}}
        self._inventory.write_text(json.dumps(inventory))  # JSON is YAML

    def play(self, playbook: str | Path, **variables: Any) -> Run:
        """Run it to its end, over ssh."""
        started = time.monotonic()
        program = ansible_playbook()
        assert program is not None
        settings = {
            "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.rig.folder / "cp"),
            "ANSIBLE_NOCOLOR": "1",
        }
        done = subprocess.run(
            self.rig.beside([program, "-i", self._inventory, playbook, "-e", json.dumps(variables)]),
            cwd=ANSIBLE,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return Run(done.returncode, done.stdout, time.monotonic() - started)

    def kvferry(self, *arguments: str) -> list[str]:
        """The command line of a person on the boards' network."""
        return self.rig.in_control([Path(sys.executable).with_name("kvferry"), *arguments])

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


def answer_of(turn: subprocess.Popen[str]) -> Answer:
    """All of it; raises with what the command said when it failed."""
    out, err = turn.communicate(timeout=300)
    assert turn.returncode == 0, err
    return Answer([json.loads(line) for line in out.splitlines()])
