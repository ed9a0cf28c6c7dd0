"""Rows of weights in GGUF's block formats: made at random, and taken apart into integers, scales and minima.

The parts are taken from what the format's own library reads, so they owe nothing to the code under test.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

_K_FORMATS = {
    "q4_k": (0, 2, 15),  # where d lies, where dmin, the largest integer
    "q5_k": (0, 2, 31),
    "q6_k": (208, None, 31),
}


_INTEGERS = {
    "q4_0": slice(2, None),
    "q4_1": slice(4, None),
    "q5_0": slice(2, None),
    "q5_1": slice(4, None),
    "q8_0": slice(2, None),
    "q4_k": slice(16, None),
    "q5_k": slice(16, None),
    "q6_k": slice(0, 192),
}


def library_kind(kind: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind.upper()]


def random_rows(kind: str, n_rows: int, n_cols: int, seed: int = 1, deviation: float = 1.0) -> NDArray[np.uint8]:
    """Rows as stored, uint8 [n_rows, bytes of a row]; elements lie around zero."""
    random = np.random.default_rng(seed)
    if kind not in _K_FORMATS:
        x = (random.standard_normal((n_rows, n_cols)) * deviation).astype(np.float32)
        return quants.quantize(x, library_kind(kind)).view(np.uint8).reshape(n_rows, -1)
    d_at, minimum_at, largest = _K_FORMATS[kind]
    n_items, n_bytes = gguf.GGML_QUANT_SIZES[library_kind(kind)]
    blocks = random.integers(0, 256, (n_rows * n_cols // n_items, n_bytes)).astype(np.uint8)
    of_one = 1400 if minimum_at is None else 13 * largest  # about the deviation of scale * integer
    d = deviation / of_one * (1 + random.random((len(blocks), 1)))
    blocks[:, d_at : d_at + 2] = d.astype(np.float16).view(np.uint8)
    if minimum_at is not None:
        blocks[:, minimum_at : minimum_at + 2] = (d * largest / 2).astype(np.float16).view(np.uint8)
    return blocks.reshape(n_rows, -1)


def filled_rows(kind: str, n_rows: int, n_cols: int, fill: int) -> NDArray[np.uint8]:
    """Random scales, and one byte in place of all that holds integers."""
    rows = random_rows(kind, n_rows, n_cols)
    blocks = rows.reshape(-1, gguf.GGML_QUANT_SIZES[library_kind(kind)][1])
    blocks[:, _INTEGERS[kind]] = fill
    return rows


def elements(kind: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    return quants.dequantize(np.ascontiguousarray(rows), library_kind(kind)).reshape(len(rows), -1)


def parts(
    kind: str, rows: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32] | None]:
    """Integers [rows, cols], scales [rows, cols / 32] (q6_k: / 16) and minima [rows, cols / 32]: integer * d + m."""
    n_bytes = gguf.GGML_QUANT_SIZES[library_kind(kind)][1]
    blocks = np.ascontiguousarray(rows).reshape(-1, n_bytes)
    x = elements(kind, rows)
    m = None
    if kind in {"q4_k", "q5_k"}:
        scales, minima = quants.Q4_K.get_scale_min(blocks[:, 4:16])
        d, m = _half(blocks, 0) * scales.astype(np.float32), -(_half(blocks, 2) * minima.astype(np.float32))
    elif kind == "q6_k":
        d = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    else:
        d = _half(blocks, 0)
        if kind in {"q4_1", "q5_1"}:
            m = _half(blocks, 2)
        elif kind == "q4_0":
            m = d * np.float32(-8)
    d = d.reshape(len(rows), -1)
    m = None if m is None else m.reshape(len(rows), -1)
    wide = np.repeat(d, x.shape[1] // d.shape[1], axis=1).astype(np.float64)
    above = x.astype(np.float64) - (0 if m is None else np.repeat(m, 32, axis=1))
    q = np.rint(np.divide(above, wide, out=np.zeros_like(wide), where=wide != 0)).astype(np.int64)
    return q, d, m


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)
