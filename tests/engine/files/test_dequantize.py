"""Every block format is read as the format's own library reads it, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from kvferry.engine.files.dequantize import KINDS, dequantize


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_give_the_library_s_numbers(kind: str) -> None:
    """Random bytes: every quant, every scale, infinities and numbers that are none among them."""
    library_kind = gguf.GGMLQuantizationType[kind.upper()]
    block_items, block_bytes = gguf.GGML_QUANT_SIZES[library_kind]
    assert KINDS[kind][0] == block_bytes
    data = np.random.default_rng(1).integers(0, 256, (5, 24 * block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        ours = dequantize(kind, data)
        if kind in {"f32", "f16"}:
            theirs = data.view(np.dtype(f"float{kind[1:]}")).astype(np.float32)
        else:
            theirs = gguf.quants.dequantize(data, library_kind)
    assert ours.shape == (5, 24 * block_items)
    assert np.array_equal(ours.view(np.uint32), theirs.reshape(ours.shape).view(np.uint32))
