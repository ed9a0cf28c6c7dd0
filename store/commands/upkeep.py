"""`kvferry kv gc | du`: what an operator does to a store, by hand or from ansible."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from uuid import uuid4

import click
from rich.filesize import decimal
from rich.table import Table

from kvferry.store.commands.shared import OpenStore, operator_id, store_argument
from kvferry.store.directory import FOREIGN_TEMP_S, NS_PER_S, TRASH_GRACE_S, StoreDirectory
from kvferry.store.errors import StoreError
from kvferry.store.folder import FileView, Folder
from kvferry.store.reader import Identity
from kvferry.terminal.output import console, json_option, print_json
from kvferry.terminal.words import say


@click.command(epilog="Example: kvferry kv gc /mnt/kvferry")
@store_argument
@click.option("--quarantine", is_flag=True, help="Empty the quarantine as well.")
@json_option
def gc(store: OpenStore, quarantine: bool, as_json: bool) -> None:
    """Remove trash, temporary files a day old, and segments that waited a day for what comes before them."""
    gone: dict[str, int] = defaultdict(int)
    for folder in store.folders(quiet=as_json):
        try:
            _clean(store, folder, gone, quarantine=quarantine)
        except StoreError as error:  # read-only, or another's: the other folders may not be
            store.troubles.append(str(error))
    if as_json:
        print_json(dict(gone))
    else:
        say(", ".join(f"{n} {what}" for what, n in gone.items() if n) or "nothing to remove")
    store.finish()


def _clean(store: OpenStore, folder: Folder, gone: dict[str, int], *, quarantine: bool) -> None:
    directory = StoreDirectory(store.fs, folder.path.parent, folder.path.name, operator_id(), lambda: uuid4().hex)
    report = directory.reap(TRASH_GRACE_S)
    gone["temps"] += report.n_foreign_temps + report.n_own_temps
    gone["trash"] += report.n_trashed
    gone["orphans"] += _remove_old_orphans(store, folder, directory)
    for entry in directory.quarantined() if quarantine else ():
        directory.release_quarantined(entry.name)
        gone["quarantined"] += 1


def _remove_old_orphans(store: OpenStore, folder: Folder, directory: StoreDirectory) -> int:
    """Each only if it still waits, and has not been saved again, when it is its turn."""
    n_gone = 0
    old_ns = directory.now_ns() - FOREIGN_TEMP_S * NS_PER_S

    def is_needed(name: str, now: Identity) -> bool:
        return name not in folder.chains.orphans() or now.mtime_ns >= old_ns

    def is_needed_though_taken(name: str, now: Identity) -> bool:
        return not store.is_still_whole(folder, name) or is_needed(name, now)

    waiting = [name for name in folder.chains.orphans() if folder.files[name].mtime_s * NS_PER_S < old_ns]
    for name in sorted(waiting, key=lambda name: -folder.files[name].start):  # what continues others comes first
        if not store.is_still_whole(folder):  # what seems to wait may continue what cannot be read
            break
        identity = directory.identity(name)
        if identity is None or is_needed(name, identity):
            continue
        if directory.delete_unless(name, partial(is_needed_though_taken, name)):
            folder.forget(name)
            n_gone += 1
    return n_gone


@click.command(epilog="Example: kvferry kv du /mnt/kvferry")
@store_argument
@json_option
def du(store: OpenStore, as_json: bool) -> None:
    """How much each model takes, by version and kind of rows, and how much sharing saves."""
    rows = []
    for folder in store.folders(quiet=as_json):
        by_kind: dict[tuple[int, str], list[FileView]] = defaultdict(list)
        for view in folder.files.values():
            by_kind[view.version, view.kind.name].append(view)
        for (version, kind), views in sorted(by_kind.items()):
            n_bytes = sum(view.n_bytes for view in views)
            unshared = sum(_unshared_bytes(folder, view) for view in views)
            rows.append(
                {
                    "model": folder.path.name,
                    "version": version,
                    "rows": kind,
                    "n_files": len(views),
                    "n_bytes": n_bytes,
                    "n_bytes_if_not_shared": unshared,
                }
            )
    if as_json:
        print_json(rows)
        store.finish()
    table = Table("model", "version", "rows", "files", "size", "not shared", box=None, pad_edge=False)
    for row in rows:
        sizes = (decimal(int(str(row["n_bytes"]))), decimal(int(str(row["n_bytes_if_not_shared"]))))
        table.add_row(*(str(row[key]) for key in ("model", "version", "rows", "n_files")), *sizes)
    console().print(table)
    store.finish()


def _unshared_bytes(folder: Folder, view: FileView) -> int:
    """What the conversations that end here would take as files of their own."""
    name = view.path.name
    if view.version != 3 or not folder.chains.is_linked(name):
        return view.n_bytes
    if folder.chains.children(name):
        return 0
    return sum(part.n_bytes * (stop - part.start) // len(part.token_ids) for part, stop in folder.chains.chain(name))
