"""`kvferry kv fsck | scrub | gc | du`: what an operator does to a store, by hand or from ansible.

Exit codes: 0 nothing is wrong, 3 something is (fsck, scrub), others as in docs/format.md.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import uuid4

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from kvferry.store.commands.shared import OpenStore, console, json_option, print_json, store_argument
from kvferry.store.directory import FOREIGN_TEMP_S, NS_PER_S, TRASH_GRACE_S, StoreDirectory
from kvferry.store.errors import SnapshotGone, SnapshotRejected
from kvferry.store.folder import FileView, Folder, look, model_folders, read_rows_of
from kvferry.store.fs import FileSystem
from kvferry.store.repair import salvage
from kvferry.store.segment_file import BlockDamagedError

EXIT_PROBLEMS: Final = 3
# Refusals that say that a file is damaged; others say that it is not for this reader, and it stays where it is.
_DAMAGE: Final = frozenset(
    {"truncated_header", "size_mismatch", "head_digest_mismatch", "token_hash_mismatch", "extension_malformed"}
    | {"prefix_digest_mismatch", "filename_hash_mismatch", "bad_magic", "reserved_not_zero", "bad_scale"}
)


def directory_of(fs: FileSystem, folder: Path) -> StoreDirectory:
    """The folder as the store's own operations see it."""
    return StoreDirectory(fs, folder.parent, folder.name, "operator", lambda: uuid4().hex)


@contextmanager
def _progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; nothing when that is no terminal, or JSON is asked for."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)


@click.command()
@store_argument
@click.option("--repair", is_flag=True, help="Quarantine what is damaged; save again what is good before it.")
@click.option("--quick", is_flag=True, help="Heads, ids and chains only: do not read the rows.")
@json_option
def fsck(store: OpenStore, repair: bool, quick: bool, as_json: bool) -> None:
    """Check every file of a store: heads, ids, chains, and all rows that have digests.

    Exit code 3 when something is damaged (also when it was repaired just now), 0 when nothing is.
    """
    found: list[dict[str, object]] = []
    n_files = n_orphans = 0
    for folder in model_folders(store.fs, store.root):
        state = look(store.fs, folder, store.terms())
        n_files += len(state.files)
        n_orphans += len(state.chains.orphans())
        found += [_problem(folder / name, view.problem) for name, view in state.files.items() if view.problem]
        damages = [] if quick else _read_all(store, state, as_json=as_json, on_read=lambda _: None)
        found += [_problem(folder / d.name, "block_digest_mismatch", d) for d in damages]
        if repair:
            _repair(store, state, damages, found)
    damaged = [problem for problem in found if problem["problem"] != "orphan_segment"]
    if as_json:
        print_json({"directory": store.said, "n_files": n_files, "n_orphans": n_orphans, "problems": found})
    else:
        _print_problems(found, n_files)
    click.get_current_context().exit(EXIT_PROBLEMS if damaged else 0)


def _problem(path: Path, reason: str, damage: BlockDamagedError | None = None) -> dict[str, object]:
    where = {} if damage is None else {"layer": damage.layer, "position": damage.position}
    return {"file": str(path), "problem": reason, "repaired": "", **where}


def _read_all(
    store: OpenStore, state: Folder, *, as_json: bool, on_read: Callable[[int], None]
) -> list[BlockDamagedError]:
    views = [view for view in state.files.values() if not view.problem or view.problem == "orphan_segment"]
    damages: list[BlockDamagedError] = []
    with _progress(state.path.name[:16], sum(view.n_bytes for view in views), quiet=as_json) as advance:

        def told(n_bytes: int) -> None:
            advance(n_bytes)
            on_read(n_bytes)

        for view in views:
            try:
                damages += read_rows_of(store.fs, view, store.terms(), told)
            except (SnapshotGone, SnapshotRejected):  # evicted meanwhile, or refused since
                continue
    return damages


def _repair(store: OpenStore, state: Folder, damages: list[BlockDamagedError], found: list[dict[str, object]]) -> None:
    """Good rows before the first damage are saved as a segment of their own; then the file goes to quarantine."""
    first: dict[str, int] = {}
    for damage in damages:
        first[damage.name] = min(damage.position, first.get(damage.name, damage.position))
    said = {name: "quarantined" for name, view in state.files.items() if view.problem in _DAMAGE}
    for name, position in first.items():
        kept = salvage(store.fs, state, name, position, uuid4().hex, store.seal)
        said[name] = "quarantined" if kept is None else f"quarantined; rows up to {position - 1} are in {kept.name}"
    directory = directory_of(store.fs, state.path)
    for name in said:
        directory.quarantine(name)
    for problem in found:
        path = Path(str(problem["file"]))
        if path.parent == state.path and path.name in said:
            problem["repaired"] = said[path.name]


def _print_problems(found: list[dict[str, object]], n_files: int) -> None:
    out = console()
    if found:
        table = Table("file", "problem", "where", "repaired", box=None, pad_edge=False)
        for problem in found:
            where = f"layer {problem['layer']}, position {problem['position']}" if "layer" in problem else ""
            table.add_row(Path(str(problem["file"])).name, str(problem["problem"]), where, str(problem["repaired"]))
        out.print(table)
    out.print(f"{n_files} files, {len(found)} problems", markup=False)


@click.command()
@store_argument
@click.option("--rate", default=0.0, metavar="MB/S", type=click.FloatRange(min=0), help="Read no faster; 0: no limit.")
@json_option
def scrub(store: OpenStore, rate: float, as_json: bool) -> None:
    """Read all rows that have digests at a given rate, and quarantine what rotted. Exit code 3 when something did."""
    started_s = time.monotonic()
    n_read = 0

    def slow_down(n_bytes: int) -> None:
        nonlocal n_read
        n_read += n_bytes
        due_s = n_read / (rate * 1e6) if rate else 0.0
        wait_s = started_s + due_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)

    rotten: list[str] = []
    for folder in model_folders(store.fs, store.root):
        state = look(store.fs, folder, store.terms())
        damaged = {damage.name for damage in _read_all(store, state, as_json=as_json, on_read=slow_down)}
        damaged |= {name for name, view in state.files.items() if view.problem in _DAMAGE}
        for name in sorted(damaged):
            directory_of(store.fs, folder).quarantine(name)
            rotten.append(str(folder / name))
    seconds = time.monotonic() - started_s
    if as_json:
        print_json({"directory": store.said, "n_bytes": n_read, "seconds": seconds, "quarantined": rotten})
    else:
        for name in rotten:
            click.echo(f"quarantined {name}")
        click.echo(f"{decimal(n_read)} read in {seconds:.1f} s, {len(rotten)} files quarantined")
    click.get_current_context().exit(EXIT_PROBLEMS if rotten else 0)


@click.command()
@store_argument
@click.option("--quarantine", is_flag=True, help="Empty the quarantine as well.")
@json_option
def gc(store: OpenStore, quarantine: bool, as_json: bool) -> None:
    """Remove trash, temporary files a day old, and segments that waited a day for what comes before them."""
    gone: dict[str, int] = defaultdict(int)
    for folder in model_folders(store.fs, store.root):
        directory = directory_of(store.fs, folder)
        report = directory.reap(TRASH_GRACE_S)
        gone["temps"] += report.n_foreign_temps + report.n_own_temps
        gone["trash"] += report.n_trashed
        now_s = directory.now_ns() / NS_PER_S
        state = look(store.fs, folder, store.terms())
        for name in state.chains.orphans():
            if now_s - state.files[name].mtime_s > FOREIGN_TEMP_S:
                directory.delete(name)
                gone["orphans"] += 1
        for entry in directory.quarantined() if quarantine else ():
            directory.release_quarantined(entry.name)
            gone["quarantined"] += 1
    if as_json:
        print_json(dict(gone))
    else:
        click.echo(", ".join(f"{n} {what}" for what, n in gone.items() if n) or "nothing to remove")


@click.command()
@store_argument
@json_option
def du(store: OpenStore, as_json: bool) -> None:
    """How much each model takes, by version and kind of rows, and how much sharing saves."""
    rows = []
    for folder in model_folders(store.fs, store.root):
        state = look(store.fs, folder, store.terms())
        by_kind: dict[tuple[int, str], list[FileView]] = defaultdict(list)
        for view in state.files.values():
            by_kind[view.version, view.kind.name].append(view)
        for (version, kind), views in sorted(by_kind.items()):
            n_bytes = sum(view.n_bytes for view in views)
            unshared = sum(_unshared_bytes(state, view) for view in views)
            rows.append(
                {
                    "model": folder.name,
                    "version": version,
                    "rows": kind,
                    "n_files": len(views),
                    "n_bytes": n_bytes,
                    "n_bytes_if_not_shared": unshared,
                }
            )
    if as_json:
        print_json(rows)
        return
    table = Table("model", "version", "rows", "files", "size", "not shared", box=None, pad_edge=False)
    for row in rows:
        sizes = (decimal(int(str(row["n_bytes"]))), decimal(int(str(row["n_bytes_if_not_shared"]))))
        table.add_row(*(str(row[key]) for key in ("model", "version", "rows", "n_files")), *sizes)
    console().print(table)


def _unshared_bytes(state: Folder, view: FileView) -> int:
    """What the conversations that end here would take as files of their own."""
    name = view.path.name
    if view.version != 3 or not state.chains.is_linked(name):
        return view.n_bytes
    if state.chains.children(name):
        return 0
    return sum(part.n_bytes * (stop - part.start) // len(part.token_ids) for part, stop in state.chains.chain(name))
