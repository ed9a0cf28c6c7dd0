"""From tensors to packed weights: quantised by definition, refused where no block can hold them, and read once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvferry.engine.errors import ModelInvalid
from kvferry.engine.files.model_file import map_file
from kvferry.engine.files.pages import drop_pages
from kvferry.engine.files.tensors import StoredRows
from kvferry.engine.kernels.layout import WEIGHTS_Q4, WEIGHTS_Q8, weight_block_bytes
from kvferry.engine.kernels.linear import GROUP_ROWS, kernels_of, unpack_row
from kvferry.engine.memory import aligned_empty
from kvferry.engine.packing import pack_rows

N_ROWS, N_COLS = 70, 80  # neither whole units nor whole blocks
KINDS = [WEIGHTS_Q8, WEIGHTS_Q4]


def stored(x: np.ndarray) -> StoredRows:
    x = np.ascontiguousarray(x, np.float32)
    return StoredRows(x.shape, "f32", x.view(np.uint8).reshape(len(x), -1))


def packed(tensor: StoredRows, kind: int) -> np.ndarray:
    """Unpacked again: float32 [rows as whole units, cols as whole blocks]."""
    shape = (96 // GROUP_ROWS, 3, weight_block_bytes(kind, GROUP_ROWS))
    out = aligned_empty(int(np.prod(shape))).reshape(shape)
    out[:] = 0
    pack_rows(tensor, 0, N_ROWS, out, kind, as_stored=False)
    rows = np.empty((96, 96), np.float32)
    for i, row in enumerate(rows):
        unpack_row(kernels_of(kind), out.ctypes.data, 3, i, row.ctypes.data)
    return rows


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)[..., None]


@pytest.mark.parametrize("kind", KINDS)
def test_floats_become_blocks_by_definition(kind: int) -> None:
    x = np.random.default_rng(2).standard_normal((N_ROWS, N_COLS)).astype(np.float32)
    x[3, :32], x[4, :32] = 0, 1e-9  # blocks whose scale is 0, or too small for a float16
    blocks = np.pad(x, ((0, 26), (0, 16))).reshape(96, 3, 32)
    low, high = blocks.min(axis=-1), blocks.max(axis=-1)
    m = half(low) if kind == WEIGHTS_Q4 else np.zeros((96, 3, 1), np.float32)
    d = half((high - low) / np.float32(15)) if kind == WEIGHTS_Q4 else half(np.maximum(high, -low) / np.float32(127))
    limits = (0, 15) if kind == WEIGHTS_Q4 else (-127, 127)
    q = np.clip(np.rint(np.divide(blocks - m, d, out=np.zeros_like(blocks), where=d != 0)), *limits)
    expected = q * d + m
    assert np.array_equal(packed(stored(x), kind), expected.reshape(96, 96))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_weights_that_no_block_holds_are_refused(kind: int, value: float) -> None:
    x = np.zeros((N_ROWS, N_COLS), np.float32)
    x[69, 70] = value
    with pytest.raises(ModelInvalid, match="float16 scale"):
        packed(stored(x), kind)


def test_dropped_pages_are_read_again(tmp_path: Path) -> None:
    data = np.random.default_rng(3).integers(0, 256, 1 << 20).astype(np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    mapped = map_file(tmp_path / "file")
    part = mapped[5000:900_000].reshape(-1, 4)
    drop_pages(StoredRows((len(part), 1), "f32", part))
    assert np.array_equal(mapped, data)
    in_memory = data.copy()
    drop_pages(StoredRows((1, 1 << 18), "f32", in_memory.reshape(1, -1)))
    assert np.array_equal(in_memory, data)
