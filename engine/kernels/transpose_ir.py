"""A square of 32-bit elements, turned: rows of K, a position after the other, into a tile that has a dimension after
the other."""

from __future__ import annotations

from typing import Final

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.ir_tools import I32, Builder, Value

SQUARE: Final = 8
_ROW: Final = t.vector(I32, SQUARE)


def build_transpose(builder: Builder, source: Value, source_stride: Value, target: Value, target_stride: Value) -> None:
    """Row i of the target is column i of the source; strides in bytes, addresses aligned to an element.

    The two halves of a square off its diagonal change places, then those of its quarters, and so on.
    """
    rows = [t.load(builder, _ROW, t.at(builder, source, t.scaled(builder, source_stride, i))) for i in range(SQUARE)]
    half = SQUARE // 2
    while half:
        for i in range(SQUARE):
            if not i & half:
                rows[i], rows[i + half] = _swap(builder, rows[i], rows[i + half], half)
        half //= 2
    for i, row in enumerate(rows):
        t.store(builder, row, t.at(builder, target, t.scaled(builder, target_stride, i)))


def _swap(builder: Builder, upper: Value, lower: Value, half: int) -> tuple[Value, Value]:
    """The upper row's right parts change places with the lower row's left ones, ``half`` lanes each."""
    kept = [lane if not lane & half else SQUARE + lane - half for lane in range(SQUARE)]
    given = [lane + half if not lane & half else SQUARE + lane for lane in range(SQUARE)]
    first, second = (builder.shuffle_vector(upper, lower, t.index_vector(lanes)) for lanes in (kept, given))
    return first, second
