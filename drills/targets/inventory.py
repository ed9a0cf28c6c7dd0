"""Real boards of an ansible inventory, struck through `ansible/drill.yml` over ssh.

The play that strikes is started before the conversations begin and waits for a file, so that a strike takes a fraction
of a second. Every board heals itself by a timer of its own, set before it was struck; healing from here comes on top.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from kvferry.client.sdk import Client
from kvferry.drills.errors import DrillImpossible
from kvferry.drills.journal import Journal
from kvferry.drills.scenarios import COORDINATOR, STORE, Disturbance, Injection, Scenario, Where
from kvferry.drills.targets.base import Target
from kvferry.drills.undo import RunCommand, SignalProcess

PLAY_S: Final = 120.0

SELF_HEAL_MARGIN_S: Final = 2.0
"""A board heals itself so much later than it is to be healed from here, should that fail."""

Connect = Callable[[str, float], Client]
"""A client of this address with this patience, and with the operator's certificate and token."""


class InventoryTarget(Target):
    """A fleet that was rolled out by `site.yml`; nothing of it is started or stopped but what a drill breaks."""

    kind = "inventory"
    answer_tokens = 384  # a strike through ansible takes seconds, and must come before the answer's end

    def __init__(self, journal: Journal, inventory: Path, connect: Connect, *, allow_power_cut: bool) -> None:
        super().__init__(journal)
        self._connect = connect
        self._inventory = inventory.resolve()
        self._allow_power_cut = allow_power_cut
        self._plays: dict[int, subprocess.Popen[bytes]] = {}

    @cached_property
    def ways(self) -> Mapping[Disturbance, str]:
        """What every board can do."""
        self.journal.write("boards have the drill's program", RunCommand(tuple(self._argv("clean"))))
        self._play("probe", drill_folder=str(self.journal.work))
        told = [json.loads(path.read_text()) for path in self.journal.work.glob("probe-*.json")]
        if len(told) < len(self._hosts):
            raise DrillImpossible("Not every board of the inventory could be asked what can be done there.")
        shared = set.intersection(*(set(ways) for ways in told))
        if not self._allow_power_cut:
            shared.discard(Disturbance.POWER_CUT)
        return {what: told[0][what] for what in Disturbance if what in shared}

    def why_not(self, what: Disturbance) -> str:
        if what is Disturbance.POWER_CUT:
            return "boards are rebooted with --allow-power-cut only"
        if what is Disturbance.STORE_FULL:
            return "the disk of a real board is not filled; --target netns has one to fill"
        if what is Disturbance.STORE_HUNG:
            return "the store is not on NFS, or a board has no nft that works"
        return "a board lacks the means: nft or tc, or the right to use them, or to set its clock"

    @property
    def address(self) -> str:
        """All coordinators, with commas: a client asks another one when the first is struck."""
        addresses = []
        for host in self._members("coordinators"):
            told = self._variables.get(host, {})
            name = told.get("kvferry_address", told.get("ansible_host", host))
            addresses.append(f"{name}:{told.get('kvferry_coordinator_port', 7070)}")
        return ",".join(addresses)

    def connect(self, patience_s: float) -> Client:
        return self._connect(self.address, patience_s)

    @property
    def node_ids(self) -> frozenset[str]:
        """The role `node` names nodes after their hosts, unless told otherwise."""
        return frozenset(self._node_hosts)

    def start(self, scenario: Scenario) -> None:
        both = sorted(set(self._members("coordinators")) & set(self._members("nodes")))
        if both and any(injection.where is not Where.COORDINATOR for injection in scenario.injections):
            raise DrillImpossible(
                f"{', '.join(both)} is a coordinator and a node: a strike there would hit the coordinator alone."
            )
        for number, injection in enumerate(scenario.injections):
            self._arm(number, injection)

    def inject(self, number: int, what: Disturbance, parts: tuple[str, ...]) -> float:
        trigger = self._trigger(number)
        hosts = [host for part in parts for host in self._hosts_of(part)]
        temp = trigger.with_suffix(".new")
        temp.write_text(json.dumps(hosts))
        temp.rename(trigger)
        play = self._plays.pop(number)
        until = time.monotonic() + PLAY_S
        told = [trigger.with_name(f"{trigger.name}.{host}") for host in hosts]
        while not all(path.exists() for path in told):
            if play.poll() is not None or time.monotonic() > until:
                raise DrillImpossible(f"The boards could not be struck: {self._last_words(number)}")
            time.sleep(0.02)
        answers = [json.loads(path.read_text()) for path in told]
        if what is Disturbance.STORE_ROTTEN and not any(answer["n_flipped"] for answer in answers):
            raise DrillImpossible("There is no new snapshot in the boards' stores whose bits could be flipped.")
        struck = min(float(answer["at"]) for answer in answers)
        return time.monotonic() - max(0.0, time.time() - struck)  # boards' clocks are asserted to be right

    def heal(self, what: Disturbance, parts: tuple[str, ...]) -> None:
        del what, parts
        self._play("heal")

    def stop(self) -> None:
        for play in self._plays.values():
            play.kill()
            play.wait()
        self._plays = {}

    def keep_logs(self, folder: Path) -> None:
        for log in self.journal.work.glob("play-*.log"):
            shutil.copy(log, folder)

    def _arm(self, number: int, injection: Injection) -> None:
        """Returns when the play waits for its moment."""
        trigger = self._trigger(number)
        with self._log(number).open("wb") as log:
            play = subprocess.Popen(
                self._argv(
                    "strike",
                    drill_trigger=str(trigger),
                    drill_what=injection.what.value,
                    drill_seconds=injection.hold_s + SELF_HEAL_MARGIN_S,
                ),
                cwd=self._playbooks,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._plays[number] = play
        self.journal.write(f"a play waits to strike, process {play.pid}", SignalProcess.to(play.pid, signal.SIGKILL))
        until = time.monotonic() + PLAY_S
        while not trigger.with_name(f"{trigger.name}.armed").exists():
            if play.poll() is not None or time.monotonic() > until:
                raise DrillImpossible(f"The boards could not be prepared: {self._last_words(number)}")
            time.sleep(0.05)

    def _hosts_of(self, part: str) -> list[str]:
        if part == COORDINATOR:
            return self._members("coordinators")[:1]
        return (
            [self._node_hosts[node_id] for node_id in self._node_hosts] if part == STORE else [self._node_hosts[part]]
        )

    def _trigger(self, number: int) -> Path:
        return self.journal.work / f"strike-{number}"

    def _log(self, number: int) -> Path:
        return self.journal.work / f"play-{number}.log"

    def _last_words(self, number: int) -> str:
        return _last_failure(self._log(number).read_text(errors="replace"))

    @cached_property
    def _listed(self) -> dict[str, Any]:
        command = [_program("ansible-inventory"), "-i", str(self._inventory), "--list"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self._playbooks)
        if done.returncode:
            raise DrillImpossible(f"{self._inventory} is no inventory: {done.stderr.strip()[-300:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def _members(self, group: str) -> list[str]:
        """The hosts of a group, and of the groups in it. Raises DrillImpossible when there are none."""
        groups, hosts = [group], list[str]()
        for name in groups:  # it grows; a group is never in itself
            told = self._listed.get(name, {})
            groups += told.get("children", [])
            hosts += told.get("hosts", [])
        if not hosts:
            raise DrillImpossible(f"{self._inventory} has no hosts in its group {group}.")
        return list(dict.fromkeys(hosts))

    @property
    def _variables(self) -> dict[str, Any]:
        return dict(self._listed["_meta"]["hostvars"])

    @property
    def _hosts(self) -> set[str]:
        return {host for group in ("coordinators", "nodes") for host in self._members(group)}

    @cached_property
    def _node_hosts(self) -> dict[str, str]:
        """Node id → host."""
        return {self._variables.get(host, {}).get("node_id", host): host for host in self._members("nodes")}

    @cached_property
    def _playbooks(self) -> Path:
        """Where drill.yml is: beside the inventory, in the tree that this program is of, or here."""
        tree = Path(__file__).resolve().parents[2]
        for folder in (self._inventory.parent, tree / "ansible", Path.cwd() / "ansible", Path.cwd()):
            if (folder / "drill.yml").is_file():
                return folder
        raise DrillImpossible("There is no drill.yml beside the inventory; run this in the folder of the playbooks.")

    def _argv(self, verb: str, **variables: object) -> list[str]:
        told = json.dumps({"drill_verb": verb, **variables})
        playbook = str(self._playbooks / "drill.yml")
        # by itself it would look for ansible.cfg where it is started: in the journal that may be anywhere
        configured = f"ANSIBLE_CONFIG={self._playbooks / 'ansible.cfg'}"
        return ["env", configured, _program("ansible-playbook"), "-i", str(self._inventory), playbook, "-e", told]

    def _play(self, verb: str, **variables: object) -> None:
        done = subprocess.run(
            self._argv(verb, **variables), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise DrillImpossible(f"drill.yml could not {verb} the boards: {_last_failure(done.stdout + done.stderr)}")


def _last_failure(output: str) -> str:
    """Of a play; ansible tells the reason in the lines below."""
    _, found, told = output.rpartition("fatal: ")
    return " ".join((told if found else output[-600:]).split())[:600]


def _program(name: str) -> str:
    """Of ansible, from this environment or from the path."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        raise DrillImpossible(f"{name} is not installed: pip install 'kvferry[fleet]'.")
    return found
