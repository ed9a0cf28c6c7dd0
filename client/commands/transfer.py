"""`kvferry sessions export | import`: a conversation from one cluster to another, with its rows if they are wanted."""

from __future__ import annotations

from pathlib import Path

import click

from kvferry.client.commands.options import connect, coordinator_option
from kvferry.client.errors import InvalidImport, InvalidRequest
from kvferry.client.sdk import ExportedSession
from kvferry.client.session_file import SessionFile, read_session_file, write_session_file
from kvferry.terminal.completing import completes
from kvferry.terminal.output import json_option, print_json
from kvferry.terminal.output_file import is_stdout
from kvferry.terminal.words import say

_FILE = click.Path(path_type=Path, dir_okay=False)
store_option = click.option("--store", metavar="DIR", help="The cluster's snapshot folder, for the rows.")


@click.command("export", epilog="Example: kvferry sessions export SESSION trip.session --rows --store /mnt/kvferry")
@click.argument("session_id", shell_complete=completes("sessions"))
@click.argument("file", type=_FILE)
@coordinator_option
@click.option("--rows", is_flag=True, help="Its snapshots as well, which can be large; needs --store.")
@store_option
@click.option(
    "--store-key-file",
    "key_file",
    type=click.Path(path_type=Path),
    envvar="KVFERRY_STORE_KEY_FILE",
    show_envvar=True,
    help="The fleet's key, where the nodes have one: without it none of their rows is found.",
)
@click.option("--store-encrypted", "encrypted", is_flag=True, help="The files are encrypted with that key.")
@json_option
def export_session(
    session_id: str,
    file: Path,
    coordinator: str,
    rows: bool,
    store: str | None,
    key_file: Path | None,
    encrypted: bool,
    as_json: bool,
) -> None:
    """Write a conversation to FILE, for another cluster."""
    if rows and store is None:
        raise click.UsageError("--rows needs --store DIR, the folder that the nodes share.")
    with connect(coordinator) as client:
        session = client.session(session_id).export()
    paths = _rows_of(session, store, key_file, encrypted) if rows and store is not None else []
    try:
        n_rows = write_session_file(file, session.data, paths)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {(error.strerror or str(error)).lower()}.") from error
    facts = {"session_id": session_id, "file": str(file), "n_tokens": len(session.token_ids), "n_row_files": n_rows}
    to_stderr = is_stdout(file)
    if as_json:
        print_json(facts, err=to_stderr)
    else:
        say(f"{file}: session {session_id}, {len(session.token_ids)} tokens, {n_rows} files of rows", err=to_stderr)


@click.command("import", epilog="Example: kvferry sessions import trip.session")
@click.argument("file", type=_FILE)
@coordinator_option
@click.option("--name", default=None, help="Of the session here. [default: as it was]")
@store_option
@json_option
def import_session(file: Path, coordinator: str, name: str | None, store: str | None, as_json: bool) -> None:
    """Go on with a conversation of another cluster. Rows of another model than the one here are left out."""
    found = read_session_file(file)
    if store is not None:
        _check_store(found, store)
    with connect(coordinator) as client:
        fingerprints = {f for model in client.models() for f in model.fingerprints}
        session = client.import_session(found.session, name)
    n_rows, why_not = _take_in(found, store, fingerprints)
    if as_json:
        print_json({"session_id": session.id, "n_row_files": n_rows, "rows_refused": why_not})
        return
    say(session.id)
    if why_not:
        say(f"rows are not imported: {why_not}; they are computed anew", err=True)


def _rows_of(session: ExportedSession, store: str, key_file: Path | None, encrypted: bool) -> list[Path]:
    import numpy as np  # neither it nor the store is needed by those who carry no rows

    from kvferry.store.carrying import rows_of
    from kvferry.store.place import StorePlace
    from kvferry.store.vlkv3 import ContentSpan

    spans = [ContentSpan(*span) for span in session.pictures]
    return rows_of(StorePlace(store, key_file, encrypted), np.array(session.token_ids, np.int32), spans)


def _check_store(found: SessionFile, store: str) -> None:
    """Before anything is imported: whether rows may go there, and whether all have names as a store's files have."""
    from kvferry.store.carrying import check_adoptable, existing_folder
    from kvferry.store.place import StorePlace

    existing_folder(StorePlace(store))
    for row_file in found.rows:
        check_adoptable(row_file.folder, row_file.name)


def _take_in(found: SessionFile, store: str | None, fingerprints: set[str]) -> tuple[int, str]:
    """How many files of rows were taken in, and why others were not."""
    if not found.rows:
        return 0, ""
    if store is None:
        return 0, "no --store is given"
    from kvferry.store.carrying import adopt
    from kvferry.store.errors import StoreError
    from kvferry.store.place import StorePlace

    n_rows, foreign = 0, set()
    for row_file in found.rows:
        fingerprint = row_file.folder.partition("-")[0]  # what follows is the tenant's
        if fingerprint not in fingerprints:
            foreign.add(fingerprint)
            continue
        try:
            n_rows += adopt(
                StorePlace(store), row_file.folder, row_file.name, row_file.n_bytes, found.chunks(row_file)
            )  # fmt: skip
        except (StoreError, InvalidImport) as error:  # the session is there already, and needs no rows
            return n_rows, str(error).rstrip(".")
    if not foreign:
        return n_rows, ""
    return n_rows, f"no node here has the fingerprint {', '.join(sorted(foreign))[:200]}"
