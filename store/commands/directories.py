"""`kvferry kv ls | lcp`: a store, or one model's directory in it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
import numpy as np
from rich.filesize import decimal
from rich.table import Column, Table

from kvferry.store.commands.shared import OpenStore, chosen_shape, model_options, store_argument
from kvferry.store.errors import StoreMisuse
from kvferry.store.folder import UNREADABLE, FileView
from kvferry.store.geometry import TokenIds
from kvferry.store.lcp_index import LcpIndex, common_prefix
from kvferry.store.model_shape import ModelShape
from kvferry.terminal.output import console, json_option, print_json

_BETWEEN_IDS: Final = re.compile(r"\s*,\s*|\s+")


@dataclass(frozen=True, slots=True)
class _Line:
    """One file of a listing; token_ids None when it is refused or unreadable."""

    path: Path
    n_bytes: int
    mtime_s: float
    token_ids: TokenIds | None
    status: str


@click.command(epilog="Example: kvferry kv ls /mnt/kvferry --json")
@store_argument
@model_options
@json_option
def ls(store: OpenStore, model: str | None, geometry: str | None, vocab_size: int | None, as_json: bool) -> None:
    """List the snapshots of a store or of one model's directory, most recently used first."""
    lines = _list(store, chosen_shape(model, geometry, vocab_size), quiet=as_json)
    lines.sort(key=lambda line: (-line.mtime_s, line.path))
    n_bytes = sum(line.n_bytes for line in lines)
    if as_json:
        print_json({"directory": store.said, "n_bytes": n_bytes, "snapshots": [_line_facts(line) for line in lines]})
        store.finish()
    table = Table(
        Column("snapshot", overflow="fold"), "tokens", "size", "last used (UTC)", "status", box=None, pad_edge=False
    )
    for line in lines:
        tokens = "-" if line.token_ids is None else str(len(line.token_ids))
        name = str(line.path.relative_to(store.root))
        table.add_row(name, tokens, decimal(line.n_bytes), _when(line.mtime_s), line.status)
    out = console()
    if lines:
        out.print(table)
    out.print(f"{len(lines)} snapshots, {decimal(n_bytes)}", markup=False)
    store.finish()


def _line_facts(line: _Line) -> dict[str, object]:
    return {
        "file": str(line.path),
        "n_tokens": None if line.token_ids is None else len(line.token_ids),
        "n_bytes": line.n_bytes,
        "last_used": _when(line.mtime_s),
        "status": line.status,
    }


def _when(mtime_s: float) -> str:
    return datetime.fromtimestamp(mtime_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _list(store: OpenStore, shape: ModelShape | None, *, quiet: bool) -> list[_Line]:
    """Every snapshot in the directory, and in its folders that could be named after a fingerprint."""
    lines: list[_Line] = []
    for found in store.folders(shape, quiet=quiet):
        lines += [_line(view, found.tokens(name)) for name, view in found.files.items()]
    return lines


def _line(view: FileView, token_ids: TokenIds | None) -> _Line:
    said = "ok" if not view.start else f"ok, from {view.start}"
    if view.problem == "orphan_segment":
        said = f"waits for what comes before {view.start}"
    elif view.problem:
        said = view.problem if view.problem.startswith(UNREADABLE) else f"refused: {view.problem}"
    return _Line(view.path, view.n_bytes, view.mtime_s, token_ids, said)


@click.command(epilog="Example: kvferry kv lcp /mnt/kvferry --tokens 1,2,3")
@store_argument
@click.option(
    "--tokens",
    required=True,
    help="Token ids: '1,2,3', or @FILE with such a list or a JSON one, or - for standard input.",
)
@click.option(
    "--min-tokens", default=16, show_default=True, type=click.IntRange(min=1), help="Shortest prefix worth a restore."
)
@model_options
@json_option
def lcp(
    store: OpenStore,
    tokens: str,
    min_tokens: int,
    model: str | None,
    geometry: str | None,
    vocab_size: int | None,
    as_json: bool,
) -> None:
    """Find the snapshot that shares the longest prefix with these token ids, compared token by token."""
    wanted = read_tokens(tokens)
    lines = _list(store, chosen_shape(model, geometry, vocab_size), quiet=as_json)
    index = LcpIndex()
    shared: dict[str, int] = {}
    for line in lines:
        if line.token_ids is not None:
            key = str(line.path.relative_to(store.root))
            index.add(key, line.token_ids)
            shared[key] = common_prefix(line.token_ids, wanted)
    found = index.find(wanted)
    best = found if found is not None and found.n_common >= min_tokens else None
    n_usable = 0 if best is None else min(best.n_common, len(wanted) - 1)
    if as_json:
        best_facts = None if best is None else {"file": best.key, "n_common": best.n_common, "n_tokens": best.n_tokens}
        print_json({"n_request_tokens": len(wanted), "best": best_facts, "n_usable_rows": n_usable, "n_common": shared})
        store.finish()
    table = Table(Column("snapshot", overflow="fold"), "common", "tokens", box=None, pad_edge=False)
    for key, n_common in sorted(shared.items(), key=lambda item: (-item[1], index.n_tokens(item[0]), item[0])):
        table.add_row(key, str(n_common), str(index.n_tokens(key)))
    out = console()
    if shared:
        out.print(table)
    if best is None:
        out.print(f"best  none shares {min_tokens} tokens or more", markup=False)
    else:
        out.print(f"best  {best.key}: {best.n_common} of {len(wanted)} tokens, {n_usable} rows usable", markup=False)
    store.finish()


def read_tokens(text: str) -> TokenIds:
    """Ids from '1,2 3', '[1, 2]', '@FILE' or '-'. Raises StoreMisuse."""
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise StoreMisuse(f"the token ids in {path} cannot be read: {error}", op="read tokens", path=path) from None
    elif text == "-":
        text = sys.stdin.read()
    text = text.strip()
    try:
        ids = json.loads(text) if text.startswith("[") else [int(word) for word in _BETWEEN_IDS.split(text)]
        array = np.asarray(ids, np.int32)
    except (ValueError, TypeError, OverflowError) as error:
        raise StoreMisuse(f"these are no token ids: {text[:60]!r} ({error})", op="read tokens") from None
    if array.ndim != 1 or not array.size:
        raise StoreMisuse(f"one or more token ids are needed in a row, not {text[:60]!r}", op="read tokens")
    if any(type(number) is not int or number < 0 for number in ids):  # numpy takes 1.5 and True for 1
        raise StoreMisuse(f"token ids are whole numbers from 0 on, not {text[:60]!r}", op="read tokens")
    return array
