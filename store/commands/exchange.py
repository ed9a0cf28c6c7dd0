"""`kvferry kv convert | diff`: one sequence in another version, and two sequences side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import click
import numpy as np

from kvferry.store.commands.shared import FILE, chosen_shape, key_options, model_options, open_place, progress
from kvferry.store.conversion import convert as convert_sequence
from kvferry.store.conversion import open_sequence
from kvferry.store.errors import StoreMisuse
from kvferry.store.lcp_index import common_prefix
from kvferry.store.payload import Kind, Planes, PlaneSource, empty_planes, row_bytes
from kvferry.terminal.output import json_option, print_json
from kvferry.terminal.words import say

EXIT_DIFFERENT = 3


@click.command(
    epilog="Example: kvferry kv convert kv_0123456789abcdef.kv --to 3 --output converted --fingerprint FINGERPRINT"
)
@click.argument("file", type=FILE)
@click.option("--to", "version", required=True, type=click.IntRange(1, 3), help="1: float32; 2: q8; 3: segments.")
@click.option("--output", required=True, type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder.")
@click.option("--fingerprint", default="", help="The model's, when a version 1 or 2 file becomes version 3.")
@click.option("--lossy-q4", "lossy", is_flag=True, help="Make float32 rows q4: fewer bytes, NOT exact any more.")
@model_options
@key_options
@json_option
def convert(
    file: Path,
    version: int,
    output: Path,
    fingerprint: str,
    lossy: bool,
    model: str | None,
    geometry: str | None,
    vocab_size: int | None,
    key_file: Path | None,
    encrypted: bool,
    as_json: bool,
) -> None:
    """Write a snapshot in another version: exact rows keep every bit. Of a segment, its whole chain is converted.

    Takes the size of a version 1 or 2 file in memory.
    """
    if lossy and version != 3:
        raise click.UsageError("--lossy-q4 goes with --to 3")
    store = open_place(str(file.parent), key_file, encrypted)
    fs, terms = store.fs, store.terms(chosen_shape(model, geometry, vocab_size))
    with open_sequence(fs, file, terms) as source:
        n_bytes = source.geometry.n_layers * len(source.token_ids) * row_bytes(source.kind, source.geometry)
        with progress("convert", n_bytes, quiet=as_json) as advance:
            path = convert_sequence(
                fs,
                replace(source, rows=_Told(source.rows, advance)),
                output,
                uuid4().hex,
                version=version,
                terms=terms,
                fingerprint=fingerprint,
                lossy=lossy,
            )
    if as_json:
        print_json({"file": str(file), "output": str(path), "version": version, "n_bytes": path.stat().st_size})
    else:
        say(str(path))


class _Told:
    """Rows that tell how many bytes of them were asked for."""

    def __init__(self, rows: PlaneSource, told: Callable[[int], None]) -> None:
        self._rows = rows
        self._told = told

    def read_planes(self, layer: int, start: int, stop: int, planes: Planes) -> None:
        """As the rows' own."""
        self._rows.read_planes(layer, start, stop, planes)
        self._told(sum(plane.nbytes for plane in planes))


@click.command(epilog="Example: kvferry kv diff left.kv right.kv")
@click.argument("left", type=FILE)
@click.argument("right", type=FILE)
@key_options
@json_option
def diff(left: Path, right: Path, key_file: Path | None, encrypted: bool, as_json: bool) -> None:
    """Compare two snapshots, of any version, over the tokens that they share: which rows differ, in bits.

    Exit code 0: tokens and rows are the same; 3: they are not.
    """
    store = open_place(str(left.parent), key_file, encrypted)
    fs = store.fs
    with (
        open_sequence(fs, left, store.terms(folder=left.parent)) as a,
        open_sequence(fs, right, store.terms(folder=right.parent)) as b,
    ):
        if a.geometry != b.geometry or a.kind is not b.kind:
            raise StoreMisuse(
                f"{a.kind.name} rows of {a.geometry} cannot be compared with {b.kind.name} rows of {b.geometry}",
                op="diff",
            )
        n = common_prefix(a.token_ids, b.token_ids)
        layers = []
        layer_bytes = 2 * n * row_bytes(a.kind, a.geometry)
        with progress("diff", layer_bytes * a.geometry.n_layers, quiet=as_json) as advance:
            for layer in range(a.geometry.n_layers if n else 0):
                planes = [empty_planes(a.kind, a.geometry, n) for _ in range(2)]
                a.rows.read_planes(layer, 0, n, planes[0])
                b.rows.read_planes(layer, 0, n, planes[1])
                advance(layer_bytes)
                layers.append(_compare(layer, planes[0], planes[1], exact_type=a.kind in {Kind.F32, Kind.F16}))
    n_different = sum(int(str(layer["n_rows_different"])) for layer in layers)
    same = n_different == 0 and n == len(a.token_ids) == len(b.token_ids)
    if as_json:
        print_json({"n_tokens": [len(a.token_ids), len(b.token_ids)], "n_common": n, "layers": layers, "same": same})
    else:
        say(f"tokens  {len(a.token_ids)} and {len(b.token_ids)}, the first {n} are the same")
        for facts in layers:
            if facts["n_rows_different"]:
                say(
                    f"layer {facts['layer']}  {facts['n_rows_different']} of {n} rows differ, first at"
                    f" {facts['first_position']}, by at most {facts['largest_difference']}"
                )
        say("the same, bit for bit" if same else f"{n_different} rows differ")
    click.get_current_context().exit(0 if same else EXIT_DIFFERENT)


def _compare(
    layer: int,
    left: tuple[np.ndarray, ...],
    right: tuple[np.ndarray, ...],
    *,
    exact_type: bool,
) -> dict[str, object]:
    different = np.zeros(len(left[0]), bool)
    largest = 0.0
    for a, b in zip(left, right, strict=True):
        rows = (a.view(np.uint8) != b.view(np.uint8)).reshape(len(a), -1).any(axis=1)
        different |= rows
        if exact_type and rows.any():
            largest = max(largest, float(np.abs(a[rows].astype(np.float64) - b[rows].astype(np.float64)).max()))
    return {
        "layer": layer,
        "n_rows_different": int(different.sum()),
        "first_position": int(different.argmax()) if different.any() else None,
        "largest_difference": largest,
    }
