"""Boards made of namespaces: each a network of its own behind a cable to one switch, and a control group of its own.

The drill has moved into a network and a mount namespace of its own before (`enter`), which is the switch. No namespace
has a name: each exists as long as a process is in it, so killing one control group takes everything down: processes,
networks, cables and mounts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvferry.drills.errors import DrillImpossible
from kvferry.drills.journal import Journal
from kvferry.drills.undo import RemoveGroup

INSIDE: Final = "KVFERRY_DRILL_NAMESPACES"
"""Set once the drill is in namespaces of its own."""

NETWORK: Final = "10.213.0"
"""Nobody else's: it is in a namespace of its own."""

TOOLS: Final = ("unshare", "nsenter", "ip", "tc", "nft", "mount")

HOLDER_S: Final = 5.0


def why_not() -> str | None:
    """The reason why boards cannot be made here, or None."""
    if os.geteuid() != 0:
        return "namespaces as boards need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"boards are made with {', '.join(missing)}, which is not installed"
    root = control_groups()
    if root is None:
        return "there are no control groups of version 2"
    if not os.access(root, os.W_OK):  # as in most containers
        return f"no control groups can be made in {root}"
    return None


def control_groups() -> Path | None:
    """Where version 2 is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


def enter() -> None:
    """Goes on in namespaces of its own, as the same process, with the same command line; returns when it is there."""
    if INSIDE in os.environ:
        return
    os.environ[INSIDE] = "1"
    command = [sys.executable, "-m", "kvferry.client.cli", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "--net", "--mount", "--propagation", "private", *command])  # noqa: S606


class Boards:
    """One for each name, with addresses from .10 on; the drill itself is .1."""

    def __init__(self, journal: Journal, names: Sequence[str]) -> None:
        root = control_groups()
        if root is None or INSIDE not in os.environ:
            raise DrillImpossible("The drill is not in namespaces of its own.")
        self.group = root / f"kvferry-{journal.folder.name}"
        self._numbers = {name: number for number, name in enumerate(names)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        journal.write(f"{self.group} has the processes of boards", RemoveGroup(str(self.group)))
        self.group.mkdir()
        (self.group / "networks").mkdir()
        run("ip", "link", "set", "lo", "up")
        subprocess.run(["ip", "link", "delete", "switch"], capture_output=True, check=False)  # of the drill before
        run("ip", "link", "add", "switch", "type", "bridge")
        run("ip", "address", "add", f"{NETWORK}.1/24", "dev", "switch")
        run("ip", "link", "set", "switch", "up")
        for name in names:
            self._make(name)

    def address(self, name: str) -> str:
        """Of a board."""
        return f"{NETWORK}.{10 + self._numbers[name]}"

    def within(self, name: str) -> tuple[str, ...]:
        """A command that becomes a process of that board."""
        join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ("nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net", "sh", "-c", join, str(self.group / name))

    def plug(self, name: str, *, is_in: bool) -> None:
        """The board's cable."""
        run("ip", "link", "set", self._cable(name), "up" if is_in else "down")

    def silence(self, name: str) -> None:
        """What the board sends vanishes at the switch."""
        table = f"table bridge drill-{self._numbers[name]}"
        chains = "".join(
            f'  chain {hook} {{ type filter hook {hook} priority 0; iifname "{self._cable(name)}" drop; }}\n'
            for hook in ("forward", "input")
        )
        run("nft", "-f", "-", text=f"{table} {{\n{chains}}}\n")

    def unsilence(self, name: str) -> None:
        """It is heard again."""
        run("nft", "delete", "table", "bridge", f"drill-{self._numbers[name]}")

    def slow(self, name: str, rate: str) -> None:
        """Both directions of the cable, such as 128kbit; what does not fit waits for at most two seconds."""
        for where in (("tc",), (*self._in_network(name), "tc")):
            device = self._cable(name) if len(where) == 1 else "eth0"
            run(*where, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "4kb", "latency", "2s")

    def unslow(self, name: str) -> None:
        """As fast as it was."""
        run("tc", "qdisc", "del", "dev", self._cable(name), "root")
        run(*self._in_network(name), "tc", "qdisc", "del", "dev", "eth0", "root")

    def freeze(self, name: str, *, is_frozen: bool) -> None:
        """All processes of the board."""
        (self.group / name / "cgroup.freeze").write_text("1" if is_frozen else "0")

    def kill(self, name: str) -> None:
        """All processes of the board, at one instant."""
        (self.group / name / "cgroup.kill").write_text("1")

    def left_behind(self) -> list[str]:
        """After the journal was undone."""
        for holder in self._holders.values():
            with suppress(subprocess.TimeoutExpired):  # then its control group is there as well, and told
                holder.wait(HOLDER_S)
        left = [f"control group {self.group}"] if self.group.exists() else []
        until = time.monotonic() + 5
        while (
            cables := _cables()
        ) and time.monotonic() < until:  # the kernel takes networks down after their processes
            time.sleep(0.05)
        return left + [f"cable {cable}" for cable in cables]

    def _make(self, name: str) -> None:
        (self.group / name).mkdir()
        join = f'echo $$ > "{self.group}/networks/cgroup.procs" && exec unshare --net sleep infinity'
        holder = subprocess.Popen(["sh", "-c", join], start_new_session=True, stdin=subprocess.DEVNULL)
        self._holders[name] = holder
        ours = Path("/proc/self/ns/net").readlink()
        until = time.monotonic() + HOLDER_S
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == ours or not _is_sleep(holder.pid):
            if time.monotonic() > until or holder.poll() is not None:
                raise DrillImpossible(f"No network namespace could be made for {name}.")
            time.sleep(0.01)
        cable = self._cable(name)
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        run("ip", "link", "set", cable, "master", "switch", "up")
        inside = self._in_network(name)
        run(*inside, "ip", "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run(*inside, "ip", "link", "set", device, "up")

    def _in_network(self, name: str) -> tuple[str, ...]:
        return ("nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net")

    def _cable(self, name: str) -> str:
        return f"cable{self._numbers[name]}"


def _is_sleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"


def _cables() -> list[str]:
    listed = subprocess.run(["ip", "-o", "link", "show", "type", "veth"], capture_output=True, text=True, check=False)
    return [line.split(":")[1].strip() for line in listed.stdout.splitlines()]


def run(*argv: str, text: str | None = None) -> None:
    """A command that must succeed; `text` is its input. Raises DrillImpossible."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DrillImpossible(f"{' '.join(argv)}: {done.stderr.strip()}")
