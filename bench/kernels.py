"""The linear layer by itself, one thread: how a step's time grows with its rows, and the share of the integer peak.

The first table is what batches and the time between tokens beside a prefill rest on: all linear layers of a small
model, their weights read from memory anew in every step, for each number of rows. It must be smooth: a row more should
never cost much more than a row. The second is what prefill rests on. Run it on a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
import numba
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from kvferry.bench.limits import ReadProbe, measure_limits
from kvferry.engine.kernels.intrinsics import ISA
from kvferry.engine.kernels.layout import (
    FLOAT_BYTES,
    QUANT_BLOCK,
    WEIGHTS_Q4,
    WEIGHTS_Q4_WIDE,
    WEIGHTS_Q5,
    WEIGHTS_Q6,
    WEIGHTS_Q8,
    activation_row_bytes,
    weight_block_bytes,
)
from kvferry.engine.kernels.linear import UNIT_ROWS, kernels_of, linear
from kvferry.engine.memory import aligned_empty, huge_empty

KINDS: Final = {
    "q4": WEIGHTS_Q4,
    "q4_wide": WEIGHTS_Q4_WIDE,
    "q5": WEIGHTS_Q5,
    "q6": WEIGHTS_Q6,
    "q8": WEIGHTS_Q8,
}
ROWS: Final = (*range(1, 25), 32, 48, 64)
SHAPES: Final = ((576, 1536), (1536, 576), (2048, 2048), (6144, 2048), (2048, 6144))  # inputs, outputs
_GEMM_ROWS: Final = 512
_MODEL: Final = (*((576, n) for n in (960, 576, 3072)), (1536, 576))  # the layers of SmolLM2-135M
_N_LAYERS: Final = 30
_HEAD: Final = (576, 49_152)  # q8
_REPEATS: Final = 5


def _run(
    kernels: Any, weights: Any, n_blocks: Any, n_units: Any, rows: Any, stride: Any, n_rows: Any, out: Any, width: Any
) -> None:
    linear(kernels, weights, n_blocks, 0, n_units, rows, stride, n_rows, out, width, 0)


_compiled_run: Final[Any] = numba.njit(nogil=True)(_run)


@dataclass(frozen=True)
class Layer:
    """A linear layer with weights of its own; what the numbers are makes no difference to the time."""

    kind: int
    n_inputs: int
    n_outputs: int
    weights: NDArray[np.uint8]

    def run(self, rows: NDArray[np.uint8], n_rows: int, out: NDArray[np.float32]) -> None:
        _compiled_run(
            kernels_of(self.kind), self.weights.ctypes.data, self.n_inputs // QUANT_BLOCK,
            self.n_outputs // UNIT_ROWS, rows.ctypes.data, activation_row_bytes(self.n_inputs), n_rows,
            out.ctypes.data, self.n_outputs * FLOAT_BYTES,
        )  # fmt: skip


def make_layers(kinds_and_shapes: Sequence[tuple[int, tuple[int, int]]]) -> list[Layer]:
    """Layers whose weights lie one behind the other, as an engine's do."""
    sizes = [
        n_outputs // ISA.group_rows * (n_inputs // QUANT_BLOCK) * weight_block_bytes(kind, ISA.group_rows)
        for kind, (n_inputs, n_outputs) in kinds_and_shapes
    ]
    region = huge_empty(sum(sizes))
    region[:] = 0x2C  # as float16 0.065, as float32 2e-12: neither is so small that a processor stumbles
    ends = np.cumsum(sizes)
    return [
        Layer(kind, *shape, region[end - size : end])
        for (kind, shape), size, end in zip(kinds_and_shapes, sizes, ends, strict=True)
    ]


def make_rows(n_rows: int, n_inputs: int) -> NDArray[np.uint8]:
    """Quantised activations, all zero."""
    rows: NDArray[np.uint8] = aligned_empty(n_rows * activation_row_bytes(n_inputs))
    rows[:] = 0
    return rows


def least_seconds(run: Callable[[], object]) -> float:
    """Processor seconds of the quickest of some runs."""
    run()
    found = []
    for _ in range(_REPEATS):
        began_at = time.thread_time()
        run()
        found.append(time.thread_time() - began_at)
    return min(found)


def step_seconds(kind: int, counts: Sequence[int]) -> list[float]:
    """Seconds of all linear layers of a step, for each count of rows."""
    layers = make_layers([*((kind, shape) for shape in _MODEL * _N_LAYERS), (WEIGHTS_Q8, _HEAD)])
    rows, out = make_rows(max(counts), max(layer.n_inputs for layer in layers)), _outputs(max(counts), _HEAD[1])

    def step(n_rows: int) -> None:
        for layer in layers:
            layer.run(rows, n_rows, out)

    return [least_seconds(lambda n=n: step(n)) for n in counts]  # type: ignore[misc]


def gemm_speed(kind: int, n_inputs: int, n_outputs: int) -> float:
    """Integer operations per second of a layer of many rows."""
    (layer,), rows = make_layers([(kind, (n_inputs, n_outputs))]), make_rows(_GEMM_ROWS, n_inputs)
    out = _outputs(_GEMM_ROWS, n_outputs)
    return 2 * _GEMM_ROWS * n_inputs * n_outputs / least_seconds(lambda: layer.run(rows, _GEMM_ROWS, out))


def _outputs(n_rows: int, n_outputs: int) -> NDArray[np.float32]:
    out: Any = aligned_empty(n_rows * n_outputs * FLOAT_BYTES)
    return out.view(np.float32).reshape(n_rows, n_outputs)  # type: ignore[no-any-return]


@click.command()
@click.option("--kind", "names", multiple=True, type=click.Choice(list(KINDS)), help="Default: q4.")
@click.option("--rows", "counts", multiple=True, type=click.IntRange(1), help="Default: 1 to 24, 32, 48, 64.")
def main(*, names: Sequence[str], counts: Sequence[int]) -> None:
    """The linear layer by itself: time by rows, and share of the integer peak."""
    console = Console(soft_wrap=True)
    limits = measure_limits(ReadProbe())
    console.print(
        f"{ISA.name}, one thread: reads {limits.read_bytes / 1e9:.1f} GB/s, {limits.integer_ops / 1e9:.0f} G integer "
        "operations per second at most."
    )
    for name in names or ("q4",):
        console.print(
            f"\n{name}: all linear layers of a step of SmolLM2-135M's shape\n\n| rows | ms | rows/s |\n| - | - | - |"
        )
        for n, seconds in zip(counts or ROWS, step_seconds(KINDS[name], counts or ROWS), strict=True):
            console.print(f"| {n} | {seconds * 1e3:.2f} | {n / seconds:.0f} |")
        console.print(f"\n{name}: {_GEMM_ROWS} rows\n\n| inputs x outputs | G operations/s | share |\n| - | - | - |")
        for shape in SHAPES:
            speed = gemm_speed(KINDS[name], *shape)
            console.print(f"| {shape[0]} x {shape[1]} | {speed / 1e9:.0f} | {speed / limits.integer_ops:.0%} |")


if __name__ == "__main__":
    main()
