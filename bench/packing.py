"""How fast a model is packed: source bytes of weights per second, into memory and into a file, the disk's part apart.

`python -m kvferry.bench.packing [--model M] [--quant q8|q4] [--runs N]`
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.open_model import open_model
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.memory import huge_empty
from kvferry.engine.packed_file import PackSpec, write_pack
from kvferry.engine.packing import Quant, RegionSink, pack_pieces, plan_weights

_MB: Final = 1_000_000


@click.command()
@click.option("--model", default="smollm2-135m", help="A fetched name, a GGUF file or a model folder.")
@click.option("--quant", default="q8", type=click.Choice(["q8", "q4"]), help="What floats become.")
@click.option("--runs", default=5, type=click.IntRange(1), help="Of each kind; medians are printed.")
def main(model: str, quant: Quant, runs: int) -> None:
    """Print medians. The source's pages are read once before; the target's memory is fresh in each run."""
    path = resolve_model(model)
    file = open_model(path)
    into_memory(file, quant)
    table = Table("packed into", "s", "MB/s of source", "of packed")
    plan = plan_weights(file, quant)
    for name, pack in (("memory", into_memory), ("a file, durable", into_file)):
        seconds = statistics.median(pack(file, quant) for _ in range(runs))
        rates = (f"{n_bytes / seconds / _MB:.0f}" for n_bytes in (source_bytes(path), plan.n_bytes))
        table.add_row(name, f"{seconds:.3f}", *rates)
    Console(width=100).print(table)


def source_bytes(path: Path) -> int:
    """Of the files that hold weights."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def into_memory(file: ModelFile, quant: Quant) -> float:
    """Seconds."""
    plan = plan_weights(file, quant)
    region = huge_empty(plan.n_bytes)
    began_at = time.perf_counter()
    pack_pieces(file, plan, RegionSink(region))
    return time.perf_counter() - began_at


def into_file(file: ModelFile, quant: Quant) -> float:
    """Seconds, until it is on the disk."""
    spec = PackSpec(plan_weights(file, quant), "0" * 64)
    with tempfile.TemporaryDirectory() as folder:
        began_at = time.perf_counter()
        write_pack(Path(folder) / spec.file_name, file, spec)
        return time.perf_counter() - began_at


if __name__ == "__main__":
    main()
