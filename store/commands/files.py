"""`kvferry kv inspect | verify | dump`: one file at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from kvferry.store import vlkv, vlkv3
from kvferry.store.commands.shared import (
    FILE,
    chosen_shape,
    finish,
    key_options,
    model_options,
    open_place,
    parts,
    progress,
    verdict,
)
from kvferry.store.errors import SnapshotRejected, StoreUnavailable
from kvferry.store.folder import look
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import Rows
from kvferry.store.inspection import (
    WHOLE_FILES,
    Inspection,
    Q8Snapshot,
    Snapshot,
    inspect_file,
    is_segment_file,
    load_any,
)
from kvferry.store.payload import Kind, MemoryPlanes
from kvferry.store.q8 import Scales, Values
from kvferry.store.reader import open_snapshot
from kvferry.store.segment_file import Terms, open_segment
from kvferry.terminal.output import console, json_option, print_json
from kvferry.terminal.output_file import PRIVATE_MODE, is_stdout, output_file, staged_path
from kvferry.terminal.words import say

_FILE = click.argument("file", type=FILE)


@click.command(epilog="Example: kvferry kv inspect kv_0123456789abcdef.kv")
@_FILE
@model_options
@key_options
@json_option
def inspect(file: Path, *, key_file: Path | None, encrypted: bool, as_json: bool, **model: Any) -> None:
    """Show a snapshot's 64 header bytes field by field, its hash and its size, as xxd and ls would."""
    store = open_place(str(file.parent), key_file, encrypted)
    found = inspect_file(store.fs, file, *parts(chosen_shape(**model)), store.terms().seal)
    if as_json:
        print_json(_as_facts(found))
    else:
        _print(found)
    finish(found.refusal)


def _as_facts(found: Inspection) -> dict[str, object]:
    header_hash = None if found.header is None else f"{found.header.token_hash:016x}"
    return {
        "file": str(found.path),
        "fields": [
            {"name": field.name, "offset": field.offset, "hex": field.raw.hex(), "value": field.value}
            for field in found.fields
        ],
        "token_hash": {
            "header": header_hash,
            "computed": None if found.computed_hash is None else f"{found.computed_hash:016x}",
        },
        "extension": dict(found.extension),
        "size": {"actual": found.actual_bytes, "expected": found.expected_bytes},
        **verdict(found.refusal),
    }


def _print(found: Inspection) -> None:
    out = console()
    if found.header is not None:
        table = Table("offset", "bytes", "field", "value", box=None, pad_edge=False)
        for field in found.fields:
            last = field.offset + len(field.raw) - 1
            table.add_row(f"{field.offset}-{last}", field.raw.hex(" "), field.name, field.value)
        out.print(table)
        computed = "cannot be computed" if found.computed_hash is None else f"{found.computed_hash:016x}"
        out.print(f"token hash  header {found.header.token_hash:016x}, of the ids {computed}", markup=False)
        if found.header.version == vlkv3.VERSION:
            for key, value in found.extension:
                out.print(f"{key:<11} {value}", markup=False)
        else:
            by_hash = vlkv.file_name(found.header.token_hash)
            out.print(f"file name   {found.path.name}, by the header {by_hash}", markup=False)
    expected = "not known" if found.expected_bytes is None else str(found.expected_bytes)
    out.print(f"size        actual {found.actual_bytes}, expected {expected}", markup=False)
    said = "ok" if found.refusal is None else f"refused ({found.refusal.reason}): {found.refusal.detail}"
    out.print(f"verdict     {said}", markup=False)


class _NonFiniteCounter:
    """A sink that counts values that are not finite; version 1 has no checksum, so this is all that can be noticed."""

    def __init__(self, on_read: Callable[[int], None]) -> None:
        self._on_read = on_read
        self.n_not_finite = 0

    def write_rows(self, layer: int, start: int, k: Rows, v: Rows) -> None:  # noqa: ARG002 -- a sink's signature
        self.n_not_finite += sum(int(np.count_nonzero(~np.isfinite(rows))) for rows in (k, v))
        self._on_read(k.nbytes + v.nbytes)

    def write_q8(self, layer: int, start: int, k: Values, v: Values, k_scale: Scales, v_scale: Scales) -> None:  # noqa: ARG002 -- a sink's signature
        """int8 values are always finite, and scales that are not have been refused."""
        self._on_read(sum(column.nbytes for column in (k, v, k_scale, v_scale)))


@click.command(epilog="Example: kvferry kv verify kv_0123456789abcdef.kv")
@_FILE
@model_options
@key_options
@json_option
def verify(file: Path, *, key_file: Path | None, encrypted: bool, as_json: bool, **model: Any) -> None:
    """Judge a snapshot as a node would, and read it to the end.

    Versions 1 and 2 have no checksum over their rows: a flipped bit in them cannot be noticed. Values that are not
    finite are counted; scales of version 2 that are not finite are refused.
    """
    refusal, n_tokens, not_finite, n_missing = None, None, None, 0
    store = open_place(str(file.parent), key_file, encrypted)
    try:
        n_tokens, not_finite, n_missing = _read_through(file, store.terms(chosen_shape(**model)), quiet=as_json)
    except SnapshotRejected as error:
        refusal = error
    if as_json:
        print_json({
            "file": str(file), "n_tokens": n_tokens, "n_not_finite": not_finite, "n_tokens_missing_before": n_missing,
            **verdict(refusal),
        })  # fmt: skip
    elif refusal is None:
        note = f"; {not_finite} values are not finite" if not_finite else ""
        if n_missing:
            note += f"; it goes on from token {n_missing}, and what comes before is not there: nobody can use it so far"
        say(f"ok: {file}, {n_tokens} tokens{note}")
    else:
        say(f"refused: {refusal}")
    finish(refusal)


def _read_through(file: Path, terms: Terms, *, quiet: bool) -> tuple[int, int, int]:
    """Tokens, values that are not finite, and tokens before it that no file holds. Raises as a node refuses."""
    if is_segment_file(PosixFileSystem(), file):
        with open_segment(PosixFileSystem(), file, terms) as segment:
            with progress("verify", segment.extent.logits_offset - segment.extent.head_bytes, quiet=quiet) as advance:
                for damage in segment.damaged_blocks(advance):
                    raise damage.rejection(file)
            return segment.extent.n_tokens, 0, _n_missing_before(file, segment.extent.start, terms)
    with open_snapshot(PosixFileSystem(), file, terms.geometry, versions=WHOLE_FILES) as snapshot:
        snapshot.check(terms.vocab_size, file.name)
        n_bytes = vlkv.file_bytes(snapshot.geometry, snapshot.n_tokens, snapshot.header.version)
        with progress("verify", n_bytes, quiet=quiet) as advance:
            counter = _NonFiniteCounter(advance)
            snapshot.restore(snapshot.n_tokens, counter)
        return snapshot.n_tokens, counter.n_not_finite, 0


def _n_missing_before(file: Path, start: int, terms: Terms) -> int:
    """Where a good segment begins, if its folder has nothing that ends there.

    Raises SnapshotRejected(prefix_digest_mismatch) for a segment that says it continues what it does not.
    """
    if start == 0:
        return 0
    folder = look(PosixFileSystem(), file.parent, terms)
    refusal = folder.refusals.get(file.name)
    if refusal is not None and refusal.reason == "prefix_digest_mismatch":
        raise refusal
    return 0 if folder.chains.is_linked(file.name) else start


@click.command(epilog="Example: kvferry kv dump kv_0123456789abcdef.kv --output rows.safetensors")
@_FILE
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), metavar="ROWS.safetensors", help="File to write."
)
@model_options
@key_options
@json_option
def dump(file: Path, *, output: Path, key_file: Path | None, encrypted: bool, as_json: bool, **model: Any) -> None:
    """Write a snapshot's rows as arrays. Takes its size in memory, twice that for a pipe.

    Version 1: token_ids int32 [n], k and v float32 [layers, n, kv_dim]. Version 2: token_ids, k_q8 and v_q8 int8
    [layers, n, kv_dim], k_scale and v_scale float32 [layers, n, kv_heads]. Version 3: the whole chain that ends
    with this segment, under the keys of its kind of rows.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save, save_file

    held_against = chosen_shape(**model)
    if is_segment_file(PosixFileSystem(), file):
        arrays = _chain_arrays(file, open_place(str(file.parent), key_file, encrypted).terms(held_against), as_json)
    else:
        arrays = dumped_arrays(load_any(PosixFileSystem(), file, *parts(held_against)))
    try:
        with output_file(output, PRIVATE_MODE) as out:
            if (staged := staged_path(out)) is not None:
                save_file(arrays, staged)
            else:
                out.write(save(arrays))
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error  # its own words name the file in the making
        raise StoreUnavailable(f"cannot write {output}: {why}", op="write", path=output) from error
    keys = sorted(arrays.keys() - {"token_ids"})
    shape = list(arrays[keys[0]].shape)
    facts = {"file": str(file), "output": str(output), "n_tokens": len(arrays["token_ids"]), "shape": shape}
    to_stderr = is_stdout(output)
    if as_json:
        print_json(facts, err=to_stderr)
    else:
        rows = " and ".join(key for key in keys if "scale" not in key)
        say(f"{output}: token_ids [{len(arrays['token_ids'])}], {rows} {shape}", err=to_stderr)


def dumped_arrays(snapshot: Snapshot | Q8Snapshot) -> dict[str, NDArray[Any]]:
    """The arrays of a dump, by key."""
    if isinstance(snapshot, Snapshot):
        return {"token_ids": snapshot.token_ids, "k": snapshot.k, "v": snapshot.v}
    rows = snapshot.rows
    return {
        "token_ids": snapshot.token_ids,
        "k_q8": rows.k,
        "v_q8": rows.v,
        "k_scale": rows.k_scale,
        "v_scale": rows.v_scale,
    }


def _chain_arrays(file: Path, terms: Terms, quiet: bool) -> dict[str, NDArray[Any]]:
    from kvferry.store.conversion import open_sequence

    with open_sequence(PosixFileSystem(), file, terms) as sequence:
        n = len(sequence.token_ids)
        planes = MemoryPlanes.empty(sequence.kind, sequence.geometry, n)
        with progress("dump", sum(array.nbytes for array in planes.arrays), quiet=quiet) as advance:
            for layer in range(sequence.geometry.n_layers):
                columns = tuple(array[layer] for array in planes.arrays)
                sequence.rows.read_planes(layer, 0, n, columns)
                advance(sum(column.nbytes for column in columns))
    keys: tuple[str, ...] = ("k", "v")
    if sequence.kind in {Kind.Q8, Kind.Q4}:
        name = sequence.kind.name.lower()
        keys = (f"k_{name}", f"v_{name}", "k_scale", "v_scale")
    return {"token_ids": sequence.token_ids, **dict(zip(keys, planes.arrays, strict=True))}
