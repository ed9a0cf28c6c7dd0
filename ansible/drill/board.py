"""Strikes one board and heals it: `board.py probe STORE | strike WHAT SECONDS UNIT STORE | heal [WHAT]`.

Runs on the board, as root. Before a strike a timer of the board's own systemd is set that heals it after SECONDS, so
that nobody has to reach a board to put it right. A board may be struck in several ways at once, and each is healed by
itself. Everything is answered in JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path("/run/kvferry-drill")
# Not kvferry-…: what begins so is in the sandbox of our units, and may not put a network or a clock right.
HEALER = "drill-heals-kvferry"
TABLE = "kvferry_drill"
SLOW = ("tbf", "rate", "128kbit", "burst", "4kb", "latency", "2s")
HOUR_S = 3600
RECENT_S = 600
PATTERN = "kv*.kv"
NFS_PORT = 2049


def run(*argv: str, text: str | None = None) -> None:
    """A command that must succeed."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)}: {done.stderr.strip()}")


def quietly(*argv: str) -> None:
    """A command that may have nothing to do."""
    subprocess.run(argv, capture_output=True, check=False)


def succeeds(*argv: str) -> bool:
    """Whether a command is there and may do its work: in a container it is often there in vain."""
    with contextlib.suppress(OSError):
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0
    return False


def probe(store: str) -> dict[str, str]:
    """What can be done here, and by what means."""
    ways = {
        "kill": "SIGKILL to the unit's process; systemd starts it again",
        "freeze": "SIGSTOP to the unit's process",
        "power-cut": "its network is taken down, then reboot -ff",
    }
    if Path(store).is_dir():
        ways["store-rotten"] = "a bit of each snapshot file of the last ten minutes is flipped"
    if succeeds("nft", "list", "tables"):
        ways["cut"] = "nft drops everything but ssh, in both directions"
        ways["cut-outgoing"] = "nft drops everything but ssh that the board sends"
        if file_system_of(store).startswith("nfs"):
            ways["store-hung"] = "nft drops the board's packets to its NFS server"
    if shutil.which("tc") and succeeds("ip", "link", "set", "lo", "up"):
        ways["slow-link"] = "tc tbf with 128 kbit/s for what the board sends"
    with contextlib.suppress(OSError):
        time.clock_settime(time.CLOCK_REALTIME, time.time())
        ways["clock-forward"] = "the board's clock is set an hour ahead"
        ways["clock-back"] = "the board's clock is set an hour back"
    return ways


def file_system_of(folder: str) -> str:
    """Its type."""
    found = subprocess.run(["findmnt", "-n", "-o", "FSTYPE", "-T", folder], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def device() -> str:
    """The network device by which the board reaches others: that which has an address that is not the loopback's."""
    shown = subprocess.run(["ip", "-o", "-4", "addr", "show", "up"], capture_output=True, text=True, check=True).stdout
    return next(line.split()[1] for line in shown.splitlines() if line.split()[1] != "lo")


def table_of(what: str) -> str:
    """A table of its own for each strike."""
    return f"{TABLE}_{what.replace('-', '_')}"


def chains(what: str, *hooks: str) -> str:
    """Rules that let nothing pass but ssh and what the board says to itself."""
    keep = {"input": 'iifname "lo" accept; tcp dport 22 accept;', "output": 'oifname "lo" accept; tcp sport 22 accept;'}
    rules = "".join(
        f"chain {hook} {{ type filter hook {hook} priority -10; policy drop; {keep[hook]} }}\n" for hook in hooks
    )
    return f"table inet {table_of(what)} {{\n{rules}}}\n"


def strike(what: str, seconds: float, unit: str, store: str) -> dict[str, Any]:
    """Once it is written down how it is healed. Tells when it was done, by the board's clock."""
    flips = []
    if what == "store-rotten":
        with as_owner_of(store):
            flips = plan_flips(Path(store))
    struck = {
        "what": what,
        "unit": unit,
        "device": device(),
        "store": store,
        "flips": flips,
        "clock_at_boot": at_boot(),
    }
    state_of(what).write_text(json.dumps(struck))
    set_timer(what, seconds)
    process = main_process(unit)
    at = time.time()
    if what == "kill":
        send("KILL", process, unit)
    elif what == "freeze":
        send("STOP", process, unit)
    elif what == "cut":
        run("nft", "-f", "-", text=chains(what, "input", "output"))
    elif what == "cut-outgoing":
        run("nft", "-f", "-", text=chains(what, "output"))
    elif what == "store-hung":
        drop = f"chain output {{ type filter hook output priority -10; tcp dport {NFS_PORT} drop; }}"
        run("nft", "-f", "-", text=f"table inet {table_of(what)} {{ {drop} }}\n")
    elif what == "slow-link":
        run("tc", "qdisc", "add", "dev", device(), "root", *SLOW)
    elif what in {"clock-forward", "clock-back"}:
        time.clock_settime(time.CLOCK_REALTIME, at + (HOUR_S if what == "clock-forward" else -HOUR_S))
    elif what == "store-rotten":
        with as_owner_of(store):
            for flip in flips:
                put(flip, flip["damaged"])
    elif what == "power-cut":
        quietly("systemd-run", "--quiet", "sh", "-c", f"sleep 0.2; ip link set {device()} down; reboot -ff")
    else:
        sys.exit(f"there is no way to do {what}")
    return {"at": at, "n_flipped": len(flips)}


def set_timer(what: str, seconds: float) -> None:
    """The board heals itself after so long, whoever is left to do it."""
    healer = f"{HEALER}-{what}"
    quietly("systemctl", "stop", f"{healer}.timer", f"{healer}.service")
    quietly("systemctl", "reset-failed", f"{healer}.service")  # else its name is taken
    heal_command = [sys.executable, str(HERE / "board.py"), "heal", what]
    run(
        "systemd-run",
        "--quiet",
        f"--unit={healer}",
        f"--on-active={seconds}",
        "--timer-property=AccuracySec=100ms",
        *heal_command,
    )


def at_boot() -> float:
    """What the clock would have said when the board started: what runs on since then nobody sets."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


@contextlib.contextmanager
def as_owner_of(store: str) -> Iterator[None]:
    """As the services' user: on a share root is nobody."""
    status, user, group = Path(store).stat(), os.geteuid(), os.getegid()
    os.setegid(status.st_gid)
    os.seteuid(status.st_uid)
    try:
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)


def state_of(what: str) -> Path:
    """Says, while it is there, that the board is struck so, and how that is undone."""
    return HERE / f"struck-{what}.json"


def main_process(unit: str) -> int:
    """0: none."""
    told = subprocess.run(["systemctl", "show", "-p", "MainPID", "--value", unit], capture_output=True, check=False)
    return int(told.stdout or b"0")


def send(signal_name: str, process: int, unit: str) -> None:
    """By ourselves: systemctl takes part of a second, and the moment is what is measured. Ours have no children."""
    if process:
        os.kill(process, signal.Signals[f"SIG{signal_name}"])
    else:
        run("systemctl", "kill", "-s", signal_name, "--kill-whom=all", unit)


def heal(*names: str) -> dict[str, Any]:
    """These strikes or all. Does no harm when nothing was done, or when it was undone already."""
    with alone():
        return heal_alone(*names)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The board's timer and whoever comes over ssh often heal in the same moment."""
    with (HERE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def heal_alone(*names: str) -> dict[str, Any]:
    states = [state_of(name) for name in names] or sorted(HERE.glob("struck-*.json"))
    struck = [json.loads(state.read_text()) for state in states if state.exists()]
    healed, failures = [], []
    for one in struck:
        try:
            undo(one)
        except (SystemExit, OSError) as error:  # it stays written down and its timer set; the others are healed
            failures.append(f"{one['what']}: {error}")
            continue
        state_of(one["what"]).unlink()
        quietly("systemctl", "stop", f"{HEALER}-{one['what']}.timer")
        healed.append(one["what"])
    if failures:
        sys.exit(f"could not be healed: {'; '.join(failures)}")
    return {"healed": ", ".join(healed)}


def undo(struck: dict[str, Any]) -> None:
    what = struck["what"]
    if what == "freeze":
        quietly("systemctl", "kill", "-s", "CONT", "--kill-whom=all", struck["unit"])
    elif what in {"cut", "cut-outgoing", "store-hung"}:
        run("nft", "add", "table", "inet", table_of(what))  # so that there is one to delete, and refusing is an error
        run("nft", "delete", "table", "inet", table_of(what))
    elif what == "slow-link":
        quietly("tc", "qdisc", "del", "dev", struck["device"], "root")
    elif what in {"clock-forward", "clock-back"}:
        # whether it was set at all, or somebody has set it right by now
        right = struck["clock_at_boot"] + time.clock_gettime(time.CLOCK_BOOTTIME)
        time.clock_settime(time.CLOCK_REALTIME, right)
    elif what == "store-rotten":
        with as_owner_of(struck["store"]):
            for flip in struck["flips"]:
                with contextlib.suppress(FileNotFoundError):  # it was refused, and moved away
                    if Path(flip["path"]).stat().st_ino == flip["inode"]:
                        put(flip, flip["right"])


def plan_flips(store: Path) -> list[dict[str, Any]]:
    """A bit in the last half of every file that is new enough to be the drill's own.

    Where depends on the board: two that share a store would put right what the other damaged.
    """
    flips = []
    per_mille = 500 + zlib.crc32(os.uname().nodename.encode()) % 490
    for path in store.rglob(PATTERN):
        status = path.lstat()
        if path.is_symlink() or status.st_mtime < time.time() - RECENT_S:
            continue
        offset = (status.st_size - 1) * per_mille // 1000
        with path.open("rb") as file:
            file.seek(offset)
            right = file.read(1)[0]
        flips.append(
            {"path": str(path), "inode": status.st_ino, "offset": offset, "right": right, "damaged": right ^ 0x10}
        )
    return flips


def put(flip: dict[str, Any], value: int) -> None:
    """Nobody is told: its times stay."""
    path = Path(flip["path"])
    before = path.stat()
    path.chmod(before.st_mode | 0o200)
    with path.open("r+b") as file:
        file.seek(flip["offset"])
        file.write(bytes([value]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    path.chmod(before.st_mode)


def main(verb: str, *more: str) -> None:
    """See above."""
    if verb == "probe":
        told: dict[str, Any] = probe(*more)
    elif verb == "strike":
        what, seconds, unit, store = more
        told = strike(what, float(seconds), unit, store)
    else:
        told = heal(*more)
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
