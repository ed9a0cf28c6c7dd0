"""Namespaces of this machine as boards; needs root, and no service manager."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from kvferry.drills.cluster import Place
from kvferry.drills.journal import Journal
from kvferry.drills.process import KILL_S
from kvferry.drills.scenarios import Disturbance, Scenario
from kvferry.drills.targets import boards, fuse
from kvferry.drills.targets.boards import Boards
from kvferry.drills.targets.processes import OwnClusterOptions, ProcessTarget
from kvferry.drills.undo import RemoveFile, Unmount

SLOW_RATE: Final = "128kbit"

SMALL_STORE_BYTES: Final = 192 << 20
"""Room for the drill's conversations, until it is filled."""

FILL_BYTES: Final = 1 << 20


class NetnsTarget(ProcessTarget):
    """The coordinator and each node on a board of its own; the store is a folder that all of them see."""

    kind = "netns"
    _boards: Boards | None = None

    def __init__(self, journal: Journal, options: OwnClusterOptions) -> None:
        super().__init__(journal, options)
        self._held_open: list[int] = []

    @property
    def ways(self) -> Mapping[Disturbance, str]:
        if boards.why_not() is not None:
            return {}
        return dict(super().ways) | {
            Disturbance.FREEZE: "the board's control group is frozen",
            Disturbance.CUT: "the board's cable (veth) is taken down at the switch",
            Disturbance.CUT_OUTGOING: "an nft rule at the switch drops what comes from the board",
            Disturbance.SLOW_LINK: f"tc tbf with {SLOW_RATE} on both ends of the board's cable",
            Disturbance.POWER_CUT: "the board's cable is taken down, then its control group is killed",
            Disturbance.STORE_FULL: "a tmpfs that is filled to its last byte; evicting snapshots frees nothing there",
        }

    def why_not(self, what: Disturbance) -> str:
        reason = boards.why_not()
        if reason is not None:
            return reason
        return fuse.why_no_fuse() or "" if what is Disturbance.STORE_HUNG else "libfaketime is not installed"

    def left_behind(self) -> list[str]:
        left = super().left_behind()
        return left if self._boards is None else left + self._boards.left_behind()

    def _prepare_store(self, scenario: Scenario) -> None:
        if Disturbance.STORE_FULL not in scenario.disturbances:
            super()._prepare_store(scenario)
            return
        store = self.journal.work / "store"
        store.mkdir(mode=0o700)
        self.journal.write(f"a small file system at {store}", Unmount(str(store)))
        boards.run("mount", "-t", "tmpfs", "-o", f"size={SMALL_STORE_BYTES},mode=0700", "kvferry-drill", str(store))

    def _places(self, scenario: Scenario) -> Mapping[str, Place]:
        del scenario
        made = self._boards = Boards(self.journal, self._all_names)
        return {name: Place(host=made.address(name), within=made.within(name)) for name in self._all_names}

    def _acts(self) -> dict[Disturbance, tuple[Callable[[str], None], Callable[[str], None]]]:
        made = self._boards
        assert made is not None  # noqa: S101 - made in _places
        acts = super()._acts() | {
            Disturbance.FREEZE: (
                lambda part: made.freeze(part, is_frozen=True),
                lambda part: made.freeze(part, is_frozen=False),
            ),
            Disturbance.CUT: (lambda part: made.plug(part, is_in=False), lambda part: made.plug(part, is_in=True)),
            Disturbance.CUT_OUTGOING: (made.silence, made.unsilence),
            Disturbance.SLOW_LINK: (lambda part: made.slow(part, SLOW_RATE), made.unslow),
            Disturbance.POWER_CUT: (self._power_off, self._power_on),
        }
        if self._store is None:
            acts[Disturbance.STORE_FULL] = (lambda _part: self._fill(), lambda _part: self._make_room())
        return acts

    def _power_off(self, part: str) -> None:
        assert self._boards is not None  # noqa: S101
        self._boards.plug(part, is_in=False)
        self._boards.kill(part)
        self._process(part).wait_gone(KILL_S)

    def _power_on(self, part: str) -> None:
        assert self._boards is not None  # noqa: S101
        self._boards.plug(part, is_in=True)
        self._begin(part)

    def _fill(self) -> None:
        """A node would evict the undisturbed conversations' snapshots and save in their place: as long as somebody has
        them open, that gives no room."""
        store = self.journal.work / "store"
        for path in store.rglob("*"):
            with suppress(FileNotFoundError):  # a node renames what it has written
                self._held_open.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        filler = store / "filler"
        self.journal.write(f"{filler} takes up all room", RemoveFile(str(filler)))
        with filler.open("wb", buffering=0) as file:
            n_bytes = FILL_BYTES
            while n_bytes:
                try:
                    os.posix_fallocate(file.fileno(), file.tell(), n_bytes)
                    file.seek(n_bytes, os.SEEK_CUR)
                except OSError:
                    n_bytes //= 2

    def _make_room(self) -> None:
        while self._held_open:
            os.close(self._held_open.pop())
        (self.journal.work / "store" / "filler").unlink(missing_ok=True)
