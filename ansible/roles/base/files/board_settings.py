#!/usr/bin/python3
"""Sets the board up for the engine, and says what is not so: board_settings.py apply|check SETTING=VALUE...

    governor=performance      of every processor that has one
    huge_pages=madvise        /sys/kernel/mm/transparent_hugepage/enabled
    swappiness=10             vm.swappiness
    swap=not-on-flash         swap areas on SD cards and eMMC are turned off; keep: they stay
    noatime=yes               / is mounted with noatime, where it lies on one; keep: it stays

The kernel forgets all of it at each start, so a unit applies it again. ``check`` prints one sentence for each thing
that is otherwise, and nothing when all is well. What the board does not have needs no setting; in a container all of
it belongs to the host, so nothing is set and nothing is said.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FLASH = re.compile(r"/dev/mmcblk")


@dataclass(frozen=True)
class Board:
    """The system's files; under another root in tests."""

    root: Path = Path("/")

    def wrong_files(self, settings: dict[str, str]) -> Iterator[tuple[Path, str, str]]:
        """Files of the kernel that hold something else: path, what it holds, what it shall hold."""
        wanted = {
            "governor": sorted(self.root.glob("sys/devices/system/cpu/cpufreq/policy*/scaling_governor")),
            "huge_pages": [self.root / "sys/kernel/mm/transparent_hugepage/enabled"],
            "swappiness": [self.root / "proc/sys/vm/swappiness"],
        }
        for name, paths in wanted.items():
            for path in paths:
                if name in settings and path.exists() and (has := chosen(path.read_text())) != settings[name]:
                    yield path, has, settings[name]

    def swap_on_flash(self) -> list[str]:
        """Swap areas, partitions or files, that lie on an SD card or eMMC."""
        lines = (self.root / "proc/swaps").read_text().splitlines()[1:]
        areas = [line.split()[0].replace(r"\040", " ") for line in lines]
        return [area for area in areas if FLASH.match(area) or (area[:5] != "/dev/" and self._mount_of(area)[0])]

    def root_writes_times(self) -> bool:
        """Whether reading a file writes to the card or eMMC that / lies on."""
        on_flash, options = self._mount_of("/")
        return on_flash and "noatime" not in options

    def _mount_of(self, path: str) -> tuple[bool, list[str]]:
        """Whether the file system that ``path`` is in lies on flash, and its options."""
        best = ("", "", "")
        for line in (self.root / "proc/self/mounts").read_text().splitlines():
            source, target, _, options, *_ = line.split()
            if Path(path).is_relative_to(target) and len(target) >= len(best[1]):
                best = (source, target, options)
        return FLASH.match(best[0]) is not None, best[2].split(",")


def chosen(text: str) -> str:
    """What a file of the kernel says is set: the word in brackets where it lists the possible ones."""
    found = re.search(r"\[(\S+)\]", text)
    return found[1] if found else text.strip()


def apply(board: Board, settings: dict[str, str]) -> None:
    """Raises OSError and CalledProcessError."""
    for path, _, wanted in board.wrong_files(settings):
        path.write_text(f"{wanted}\n")
    if settings.get("swap") == "not-on-flash":
        for area in board.swap_on_flash():
            subprocess.run(["swapoff", area], check=True)
    if settings.get("noatime") == "yes" and board.root_writes_times():
        subprocess.run(["mount", "-o", "remount,noatime", "/"], check=True)


def check(board: Board, settings: dict[str, str]) -> list[str]:
    """A sentence for each thing that is otherwise."""
    found = [f"{path} holds {has}, not {wanted}" for path, has, wanted in board.wrong_files(settings)]
    if settings.get("swap") == "not-on-flash":
        found += [f"{area} swaps to an SD card or eMMC" for area in board.swap_on_flash()]
    if settings.get("noatime") == "yes" and board.root_writes_times():
        found.append("/ lies on an SD card or eMMC and is mounted without noatime")
    return found


def in_container() -> bool:
    """As systemd sees it."""
    return subprocess.run(["systemd-detect-virt", "--quiet", "--container"], check=False).returncode == 0


def main(verb: str, *given: str) -> None:
    settings = dict(word.split("=", 1) for word in given)
    if in_container():
        return
    if verb == "apply":
        apply(Board(), settings)
    else:
        print("\n".join(check(Board(), settings)))


if __name__ == "__main__":
    main(*sys.argv[1:])
