"""`kvferry kv fsck | scrub`: is every file what it should be? By hand or from ansible.

Exit codes: 0 nothing is wrong, 3 something is, others as in docs/format.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import click
from rich.filesize import decimal
from rich.table import Column, Table

from kvferry.store.commands.shared import EXIT_INTERRUPTED, OpenStore, operator_id, progress, store_argument
from kvferry.store.directory import StoreDirectory
from kvferry.store.errors import SnapshotGone, SnapshotRejected, StoreError, StoreUnavailable
from kvferry.store.folder import ORPHAN, UNREADABLE, FileView, Folder, read_rows_of
from kvferry.store.pace import Pace
from kvferry.store.reader import Identity
from kvferry.store.repair import salvage
from kvferry.store.segment_file import BlockDamagedError
from kvferry.terminal.output import console, json_option, print_json
from kvferry.terminal.words import say

EXIT_PROBLEMS: Final = 3
# Refusals that say that a file is damaged; others say that it is not for this reader, and it stays where it is.
_DAMAGE: Final = frozenset(
    {"truncated_header", "size_mismatch", "head_digest_mismatch", "token_hash_mismatch", "extension_malformed"}
    | {"prefix_digest_mismatch", "filename_hash_mismatch", "bad_magic", "reserved_not_zero", "bad_scale"}
)


@dataclass(slots=True)
class Problem:
    """What is wrong with a file, and where when that is known. ``judged``: the file that was looked at."""

    path: Path
    problem: str
    damage: BlockDamagedError | None = None
    repaired: str = ""
    judged: Identity | None = None

    @property
    def is_damage(self) -> bool:
        """Whether the file itself is bad, and to be put into quarantine."""
        return self.damage is not None or self.problem in _DAMAGE

    def facts(self) -> dict[str, object]:
        """For a program."""
        where = {} if self.damage is None else {"layer": self.damage.layer, "position": self.damage.position}
        return {"file": str(self.path), "problem": self.problem, "repaired": self.repaired, **where}


@click.command(epilog="Example: kvferry kv fsck /mnt/kvferry --repair")
@store_argument
@click.option("--repair", is_flag=True, help="Quarantine what is damaged; save again what is good before it.")
@click.option("--quick", is_flag=True, help="Heads, ids and chains only: do not read the rows.")
@json_option
def fsck(store: OpenStore, repair: bool, quick: bool, as_json: bool) -> None:
    """Check every file of a store: heads, ids, chains, and all rows that have digests.

    Exit code 3 when something is damaged (also when it was repaired just now), 0 when nothing is.
    """
    found: list[Problem] = []
    n_files = n_orphans = 0
    interrupted = False
    try:
        for folder in store.folders(quiet=as_json):
            n_files += len(folder.files)
            n_orphans += len(folder.chains.orphans())
            for problems in _problems(store, folder, Pace(0), quick=quick, quiet=as_json):
                found += problems
                if repair:
                    _repair(store, folder, problems)
    except KeyboardInterrupt:
        interrupted = True
    if as_json:
        facts = [problem.facts() for problem in found]
        print_json({"directory": store.said, "n_files": n_files, "n_orphans": n_orphans, "problems": facts})
    else:
        _print_problems(found, n_files)
    _finish(store, interrupted=interrupted, bad=any(problem.problem != ORPHAN for problem in found))


@click.command(epilog="Example: kvferry kv scrub /mnt/kvferry --rate 20")
@store_argument
@click.option("--rate", default=0.0, metavar="MB/S", type=click.FloatRange(min=0), help="Read no faster; 0: no limit.")
@json_option
def scrub(store: OpenStore, rate: float, as_json: bool) -> None:
    """Read all rows at a given rate, and quarantine at once what rotted.

    Exit code 3 when something did, or when there are files that are not for this reader: with another key, say.
    """
    pace = Pace(rate * 1e6)
    rotten: list[Problem] = []
    unreadable: list[Problem] = []
    refused: Counter[str] = Counter()
    interrupted = False
    try:
        for folder in store.folders(quiet=as_json):
            for problems in _problems(store, folder, pace, quick=False, quiet=as_json):
                if any(problem.is_damage for problem in problems):
                    _quarantine(store, problems)
                    rotten.append(problems[0])
                    continue
                refused.update(p.problem for p in problems if p.problem != ORPHAN and UNREADABLE not in p.problem)
                unreadable += [problem for problem in problems if problem.problem.startswith(UNREADABLE)]
    except KeyboardInterrupt:
        interrupted = True
    if as_json:
        facts = {
            "directory": store.said,
            "n_bytes": pace.n_bytes,
            "seconds": pace.seconds,
            "quarantined": [str(problem.path) for problem in rotten],
            "unreadable": [str(problem.path) for problem in unreadable],
            "refused": dict(refused),
        }
        print_json(facts)
    else:
        for problem in rotten:
            say(f"{problem.repaired} {problem.path}")
        for problem in unreadable:
            say(f"{problem.problem}")
        for reason, n_files in refused.items():
            say(f"{n_files} files not read ({reason})")
        say(f"{decimal(pace.n_bytes)} read in {pace.seconds:.1f} s, {len(rotten)} files quarantined")
    _finish(store, interrupted=interrupted, bad=bool(rotten or unreadable or refused))


def _finish(store: OpenStore, *, interrupted: bool, bad: bool) -> None:
    if interrupted:
        say("interrupted: what is said above is true of the part that was read; nothing is half done", err=True)
        store.finish(EXIT_INTERRUPTED)
    store.finish(EXIT_PROBLEMS if bad else 0)


def _problems(store: OpenStore, folder: Folder, pace: Pace, *, quick: bool, quiet: bool) -> Iterator[list[Problem]]:
    """Of each file that has any."""
    views = list(folder.files.values())
    with progress(folder.path.name[:16], sum(view.n_bytes for view in views), quiet=quiet) as advance:
        for view in views:
            n_before = pace.n_bytes

            def told(n_bytes: int) -> None:
                pace.read(n_bytes)
                advance(n_bytes)

            refusal = folder.refusals.get(view.path.name)
            judged = None if refusal is None else refusal.judged
            found = [Problem(view.path, view.problem, judged=judged)] if view.problem else []
            if not quick and view.problem in {"", ORPHAN}:
                found += _damage(store, view, told)
            advance(max(0, view.n_bytes - (pace.n_bytes - n_before)))  # its head, or all of what is not read
            if found:
                yield found


def _damage(store: OpenStore, view: FileView, told: Callable[[int], None]) -> list[Problem]:
    try:
        damages = read_rows_of(store.fs, view, store.terms(folder=view.path.parent), told)
    except SnapshotGone:  # evicted meanwhile
        return []
    except SnapshotRejected as error:
        return [Problem(view.path, error.reason, judged=error.judged)]
    except StoreUnavailable as error:
        return [Problem(view.path, f"{UNREADABLE}: {error}")]
    return [Problem(view.path, "block_digest_mismatch", damage, judged=damage.judged) for damage in damages]


def _repair(store: OpenStore, folder: Folder, problems: list[Problem]) -> None:
    """Good rows before the first damage are saved as a segment of their own; then the file goes to quarantine."""
    positions = [problem.damage.position for problem in problems if problem.damage is not None]
    kept = None
    if positions:
        seal = store.terms(folder=folder.path).seal  # a tenant's folder has a key of its own
        try:
            kept = salvage(store.fs, folder, problems[0].path.name, min(positions), uuid4().hex, operator_id(), seal)
        except StoreError as error:  # a full disk, or more is damaged: the rows can be recomputed
            store.troubles.append(str(error))
    _quarantine(store, problems)
    if kept is not None:
        for problem in problems:
            problem.repaired += f"; rows up to {min(positions) - 1} are in {kept.name}"


def _quarantine(store: OpenStore, problems: list[Problem]) -> None:
    """Sets a file aside whose problems these are, if any of them is damage and it is the one that was looked at."""
    damaged = next((problem for problem in problems if problem.is_damage), None)
    if damaged is None:
        return
    path = damaged.path
    directory = StoreDirectory(store.fs, path.parent.parent, path.parent.name, operator_id(), lambda: uuid4().hex)
    try:
        is_aside = directory.quarantine(path.name, damaged.judged) is not None
    except StoreError as error:
        store.troubles.append(str(error))
        return
    for problem in problems:
        problem.repaired = "quarantined" if is_aside else "gone meanwhile"


def _print_problems(found: list[Problem], n_files: int) -> None:
    out = console()
    if found:
        table = Table(Column("file", overflow="fold"), "problem", "where", "repaired", box=None, pad_edge=False)
        for problem in found:
            at = problem.damage
            where = "" if at is None else f"layer {at.layer}, position {at.position}"
            table.add_row(problem.path.name, problem.problem, where, problem.repaired)
        out.print(table)
    out.print(f"{n_files} files, {len(found)} problems", markup=False)
