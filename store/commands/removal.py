"""`kvferry kv rm`: a conversation's snapshots, at once and for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import click

from kvferry.store import names
from kvferry.store.commands.directories import read_tokens
from kvferry.store.commands.shared import OpenStore, operator_id, store_argument
from kvferry.store.directory import StoreDirectory
from kvferry.store.errors import StoreError, StoreMisuse
from kvferry.store.folder import Folder
from kvferry.store.geometry import TokenIds
from kvferry.store.reader import Identity
from kvferry.store.vlkv3 import ContentSpan
from kvferry.terminal.output import json_option, print_json
from kvferry.terminal.words import say

Choose = Callable[[Folder], Sequence[str]]


@click.command()
@store_argument
@click.option("--name", help="A file's name; with a segment go those before it that nothing else needs.")
@click.option("--tokens", help="A conversation's token ids, as for lcp: everything goes that only it uses.")
@json_option
def rm(store: OpenStore, name: str | None, tokens: str | None, as_json: bool) -> None:
    """Remove a conversation's snapshots, at once and for good. What others share stays."""
    if (name is None) == (tokens is None):
        raise click.UsageError("give --name or --tokens")
    if name is not None:
        names.check_snapshot(name)
        print_removed(store, remove(store, lambda folder: _up_to(folder, name), quiet=as_json), as_json=as_json)
    elif tokens is not None:
        print_removed(store, remove_conversation(store, read_tokens(tokens), quiet=as_json), as_json=as_json)


def remove_conversation(
    store: OpenStore, token_ids: TokenIds, spans: Sequence[ContentSpan] = (), n_shared: int = 0, *, quiet: bool
) -> list[Path]:
    """Deletes what ownership.only_of says, in every model's folder; returns it. Raises StoreUnavailable."""
    return remove(store, lambda folder: folder.only_of(token_ids, spans, n_shared), quiet=quiet)


def remove(store: OpenStore, choose: Choose, *, quiet: bool) -> list[Path]:
    """Deletes what ``choose`` names in each of the store's folders; returns it. What others continued meanwhile stays.

    Raises StoreUnavailable.
    """
    gone = []
    for folder in store.folders(quiet=quiet):
        path, going = folder.path, choose(folder)
        directory = StoreDirectory(store.fs, path.parent, path.name, operator_id(), lambda: uuid4().hex)
        try:
            for victim in going:  # what continues others comes first
                if not store.is_still_whole(folder):
                    break
                if folder.chains.children(victim):  # saved since, or still there
                    continue
                if directory.delete_unless(victim, partial(_is_continued, store, folder, victim)):
                    folder.forget(victim)
                    gone.append(path / victim)
        except StoreError as error:  # read-only, or another's: the other folders may not be
            store.troubles.append(str(error))
    return gone


def _is_continued(store: OpenStore, folder: Folder, taken: str, _now: Identity) -> bool:
    """Or may be, for all that can be read."""
    return not store.is_still_whole(folder, taken) or bool(folder.chains.children(taken))


def print_removed(store: OpenStore, gone: Sequence[Path], *, as_json: bool) -> NoReturn:
    """Ends the command with what went, for a person or a program."""
    if as_json:
        print_json({"removed": [str(path) for path in gone]})
    else:
        say("\n".join(f"removed {path}" for path in gone) or "nothing to remove")
    store.finish()


def _up_to(folder: Folder, name: str) -> Sequence[str]:
    if name not in folder.files:
        return ()
    if folder.chains.children(name):
        raise StoreMisuse(f"other segments continue {name}; remove those that end the chains", op="rm")
    return folder.up_to(name)
