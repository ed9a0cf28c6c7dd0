"""Test boards: each a network namespace with its own root file system, systemd as PID 1, sshd and control groups.

A rig is a switch, a controller's namespace and N boards behind it; no board has a way out. Everything carries the rig's
prefix, and nothing outlives the rig: a reaper process, in a session of its own, waits for the rig's owner to end, by
whatever signal, and then takes down what is still there.

Run as a program it is that reaper; ``boards.py up FOLDER N_BOARDS CACHE SHARED_AT`` holds a rig to play with until
Ctrl-C; ``boards.py down FOLDER`` takes down one whose reaper was killed as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

CGROUPS: Final = Path("/sys/fs/cgroup")
# What a systemd inside a namespace needs of its own; "unified" has cgroup.kill and cgroup.freeze.
CONTROLLERS: Final = ("systemd", "unified", "memory", "cpu", "pids")
PACKAGES: Final = (
    "systemd", "systemd-sysv", "nftables", "dbus", "libpam-systemd", "openssh-server", "python3", "iproute2", "procps",
)  # fmt: skip
SUBNET: Final = "10.77.0"
STATE_FILE: Final = "rig.json"

LINK_UP: Final = """\
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=ip link set eth0 up
"""


class CannotMakeBoards(Exception):
    """This machine cannot run boards; the sentence says why."""


def why_not() -> str | None:
    """The reason why this machine cannot run boards, or None."""
    if os.geteuid() != 0:
        return "boards need root"
    missing = [str(CGROUPS / name) for name in CONTROLLERS if not (CGROUPS / name).is_dir()]
    if missing:
        return f"boards are made for a hybrid cgroup hierarchy; missing: {', '.join(missing)}"
    install = subprocess.run(
        [Path(__file__).with_name("install_tools.sh")], capture_output=True, text=True, check=False
    )
    if install.returncode:
        return f"the tools for boards cannot be installed: {install.stderr.strip().splitlines()[-1:]}"
    return None


def base_root(cache: Path) -> Path:
    """A minimal root file system of this machine's own Debian release; made once (a minute), kept in ``cache``."""
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )  # VERSION_CODENAME=bookworm
    suite = release["VERSION_CODENAME"].strip('"')
    final = cache / f"board-root-{suite}-2"
    if final.is_dir():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    temp = cache / f"{final.name}.{os.getpid()}.tmp"
    made = subprocess.run(
        ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={','.join(PACKAGES)}",
         suite, str(temp), f"deb {_mirror()} {suite} main"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        shutil.rmtree(temp, ignore_errors=True)
        raise CannotMakeBoards(f"mmdebstrap failed: {made.stderr.strip()[-400:]}")
    (temp / "etc/hostname").unlink(missing_ok=True)
    (temp / "etc/machine-id").write_text("")  # each board draws its own at its first start
    temp.rename(final)
    return final


def _mirror() -> str:
    """The package mirror this machine is set up with."""
    sites = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    if not sites:
        raise CannotMakeBoards("apt knows no package mirror")
    return sites[0]


@dataclass(frozen=True)
class Rig:
    """Boards 1 .. ``n_boards``. Make it with `Rig.make`, use it as a context manager."""

    folder: Path
    prefix: str
    n_boards: int
    shared_at: str
    memory_bytes: int
    _reaper: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)
    _machines: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)

    @classmethod
    def make(cls, folder: Path, n_boards: int, base: Path, *, shared_at: str, memory_bytes: int = 1 << 30) -> Self:
        """``folder`` must be new and on a local disk; ``shared_at`` is where boards see the one folder they share."""
        rig = cls(folder, f"kv{secrets.token_hex(2)}", n_boards, shared_at, memory_bytes)
        folder.mkdir(parents=True)
        (folder / "shared").mkdir()
        facts = {"prefix": rig.prefix, "n_boards": n_boards, "shared_at": shared_at, "memory_bytes": memory_bytes}
        (folder / STATE_FILE).write_text(json.dumps(facts))
        rig._reaper.append(
            subprocess.Popen(
                [sys.executable, __file__, "reap", str(folder)], stdin=subprocess.PIPE, start_new_session=True
            )
        )
        try:
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
            rig.ssh_config.write_text(rig._ssh_config())
            rig._make_network()
            for board in rig.boards:
                rig._make_root(board, base)
        except BaseException:
            rig.down()
            raise
        return rig

    @classmethod
    def at(cls, folder: Path) -> Self:
        """The rig that was made in ``folder``."""
        return cls(folder, **json.loads((folder / STATE_FILE).read_text()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def boards(self) -> range:
        return range(1, self.n_boards + 1)

    def name(self, board: int | str) -> str:
        return f"{self.prefix}-{board}"

    def address(self, board: int) -> str:
        return f"{SUBNET}.{10 + board}"

    def in_control(self, argv: Sequence[str | Path]) -> list[str]:
        """``argv`` as a command on the boards' network; it ends with the rig."""
        return ["nsenter", f"--net=/run/netns/{self.name('ctl')}", *self.beside(argv)]

    def beside(self, argv: Sequence[str | Path]) -> list[str]:
        """``argv`` as a command on this machine's own network that ends with the rig; ssh reaches boards from it."""
        join = f'echo $$ > {CGROUPS}/unified/{self.name("ctl")}/cgroup.procs; exec "$@"'
        return ["sh", "-c", join, "sh", *map(str, argv)]

    def ssh(
        self, board: int, command: str, *, check: bool = True, seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """A shell command on the board; silence for ``seconds`` counts as exit code 255, ssh's own."""
        argv = self.beside(["ssh", "-F", self.ssh_config, self.address(board), command])
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(argv, 255, "", f"no answer for {seconds} s\n")
        if check and done.returncode:
            raise AssertionError(f"on board {board}: {command}\nexit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    @property
    def ssh_config(self) -> Path:
        """Configuration with which ssh reaches the boards, in their own network, as root."""
        return self.folder / "ssh_config"

    def start(self, board: int) -> None:
        """Power on. Returns at once; see `wait_until_up`."""
        folder = self.folder / self.name(board)
        root = folder / "root"
        if not root.is_mount():
            layers = f"lowerdir={folder / 'lower'},upperdir={folder / 'upper'},workdir={folder / 'work'}"
            _run("mount", "-t", "overlay", "overlay", "-o", layers, root)
        groups = self._cgroups(board)
        for group in groups:
            group.mkdir(parents=True, exist_ok=True)
        (CGROUPS / "memory" / self.name(board) / "memory.limit_in_bytes").write_text(str(self.memory_bytes))
        join = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
        nspawn = [
            "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--link-journal=no",
            f"--machine={self.name(board)}", f"--hostname={self.name(board)}",
            f"--network-namespace-path=/run/netns/{self.name(board)}", "--capability=CAP_NET_ADMIN",
            f"--bind={self.folder / 'shared'}:{self.shared_at}", f"--directory={root}", "--boot",
        ]  # fmt: skip
        # After `reboot -ff` nspawn ends where /run is on a disk: its power comes back then.
        again = 'while :; do "$@"; sleep 2; done'
        with (folder / "console.log").open("ab") as console:
            machine = subprocess.Popen(
                ["sh", "-c", f"{join} {again}", "sh", *nspawn],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        self._machines.append(machine)

    def wait_until_up(self, board: int, seconds: float = 60) -> None:
        """Until ssh answers; raises with the console's last lines."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.ssh(board, "true", check=False, seconds=10).returncode == 0:
                return
            time.sleep(0.2)
        console = (self.folder / self.name(board) / "console.log").read_text(errors="replace")
        raise CannotMakeBoards(f"board {board} does not answer after {seconds} s; its console:\n{console[-2000:]}")

    def power_cut(self, board: int) -> None:
        """All processes of the board end at once; its disk keeps what was written."""
        _kill_group(CGROUPS / "unified" / self.name(board))

    def freeze(self, board: int) -> None:
        """The board hangs: its connections stay open and nothing answers."""
        (CGROUPS / "unified" / self.name(board) / "cgroup.freeze").write_text("1")

    def thaw(self, board: int) -> None:
        (CGROUPS / "unified" / self.name(board) / "cgroup.freeze").write_text("0")

    def cut(self, board: int) -> None:
        """Pull the network cable."""
        _run("ip", "-n", self.name("sw"), "link", "set", f"v{board}", "down")

    def heal(self, board: int) -> None:
        _run("ip", "-n", self.name("sw"), "link", "set", f"v{board}", "up")

    def down(self) -> None:
        """Remove processes, mounts, namespaces, control groups and the folder. Safe to repeat, and after a crash."""
        names = [self.name(board) for board in self.boards]
        for name in [*names, self.name("ctl")]:
            with contextlib.suppress(FileNotFoundError):
                _kill_group(CGROUPS / "unified" / name)
        for machine in self._machines:
            machine.wait(30)
        for name in names:
            root = self.folder / name / "root"
            if root.is_mount():
                _until(functools.partial(_unmounted, root), 5)
        for name in [*names, self.name("ctl"), self.name("sw")]:
            if Path("/run/netns", name).exists():
                _run("ip", "netns", "delete", name)
        for controller in CONTROLLERS:
            for name in [*names, self.name("ctl")]:
                _until(functools.partial(_group_removed, CGROUPS / controller / name), 5)
        shutil.rmtree(self.folder, ignore_errors=True)
        for reaper in self._reaper:
            if reaper.stdin is not None:
                reaper.stdin.close()
            reaper.wait(30)

    def _ssh_config(self) -> str:
        relay = "exec 3<>/dev/tcp/%h/%p; cat <&3 & reader=$!; cat >&3; kill $reader"
        return f"""\
User root
IdentityFile {self.folder / "key"}
IdentitiesOnly yes
BatchMode yes
ConnectTimeout 5
# A board that loses its power says nothing more.
ServerAliveInterval 5
ServerAliveCountMax 3
StrictHostKeyChecking accept-new
UserKnownHostsFile {self.folder / "known_hosts"}
LogLevel ERROR
ProxyCommand nsenter --net=/run/netns/{self.name("ctl")} bash -c '{relay}'
"""

    def _make_network(self) -> None:
        switch = self.name("sw")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        (CGROUPS / "unified" / self.name("ctl")).mkdir()
        for board in ("ctl", *self.boards):
            space = self.name(board)
            address = f"{SUBNET}.1" if isinstance(board, str) else self.address(board)
            _run("ip", "netns", "add", space)
            _run(
                "ip", "link", "add", f"v{board}", "netns", switch,
                "type", "veth", "peer", "name", "eth0", "netns", space,
            )  # fmt: skip
            _run("ip", "-n", switch, "link", "set", f"v{board}", "master", "br0", "up")
            _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", device, "up")

    def _make_root(self, board: int, base: Path) -> None:
        folder = self.folder / self.name(board)
        for layer in ("upper", "work", "root"):
            (folder / layer).mkdir(parents=True)
        (folder / "lower").symlink_to(base)
        keys = folder / "upper/root/.ssh"
        keys.mkdir(parents=True)
        keys.parent.chmod(0o700)
        keys.chmod(0o700)
        (keys / "authorized_keys").write_bytes((self.folder / "key.pub").read_bytes())
        (keys / "authorized_keys").chmod(0o600)
        # What takes its network down expects that it is up again after a reboot; the address stays in the namespace.
        units = folder / "upper/etc/systemd/system"
        (units / "sysinit.target.wants").mkdir(parents=True)
        (units / "link-up.service").write_text(LINK_UP)
        (units / "sysinit.target.wants/link-up.service").symlink_to("../link-up.service")

    def _cgroups(self, board: int) -> list[Path]:
        return [CGROUPS / controller / self.name(board) for controller in CONTROLLERS]


def _run(*argv: str | Path) -> None:
    done = subprocess.run([str(arg) for arg in argv], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMakeBoards(f"{' '.join(map(str, argv))}: {done.stderr.strip()}")


def _kill_group(group: Path) -> None:
    (group / "cgroup.kill").write_text("1")
    _until(lambda: "populated 0" in (group / "cgroup.events").read_text(), 10)


def _unmounted(root: Path) -> bool:
    return not root.is_mount() or subprocess.run(["umount", root], capture_output=True, check=False).returncode == 0


def _group_removed(group: Path) -> bool:
    for path, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):  # its last process is on its way out
            Path(path).rmdir()
    return not group.exists()


def _until(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {seconds} s: {condition}")
        time.sleep(0.02)


def _hold(folder: Path, n_boards: int, cache: Path, shared_at: str) -> None:
    with Rig.make(folder, n_boards, base_root(cache), shared_at=shared_at) as rig:
        for board in rig.boards:
            rig.start(board)
        for board in rig.boards:
            rig.wait_until_up(board)
            print(f"board {board}: ssh -F {rig.ssh_config} {rig.address(board)}")
        print("up; ends with this process", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


def _main(verb: str, folder: Path, *more: str) -> None:
    if verb == "up":  # up FOLDER N_BOARDS CACHE SHARED_AT
        _hold(folder, int(more[0]), Path(more[1]), more[2])
        return
    if verb == "reap":
        sys.stdin.buffer.read()  # ends when the owner has ended
    if (folder / STATE_FILE).exists():
        Rig.at(folder).down()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
