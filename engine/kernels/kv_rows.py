"""The KV tiles as the forward pass writes them and attention reads them, for every kind (layout.py)."""

from __future__ import annotations

from kvferry.engine.kernels.intrinsics import (
    head_to_half,
    head_to_q8,
    load_byte,
    load_float,
    load_int16,
    store_byte,
    store_float,
    store_int16,
    widen_half,
    widen_q8_keys,
    widen_q8_values,
)
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.layout import (
    FLOAT_BYTES,
    HALF_BYTES,
    KV_BLOCK,
    KV_F16,
    KV_F32,
    KV_Q8,
    QUANT_BLOCK,
)


@kernel
def tile_bytes(kind: int, head_dim: int) -> int:
    """Bytes of one tile: layout.kv_tile_bytes for jitted code."""
    if kind == KV_F32:
        return KV_BLOCK * head_dim * FLOAT_BYTES
    if kind == KV_F16:
        return KV_BLOCK * head_dim * HALF_BYTES
    return KV_BLOCK * (head_dim + FLOAT_BYTES)


@kernel
def value_bytes(kind: int) -> int:
    """Bytes of one stored element."""
    if kind == KV_F32:
        return FLOAT_BYTES
    return HALF_BYTES if kind == KV_F16 else 1


@kernel
def store_key(kind: int, key: int, head_dim: int, tile: int, slot: int, narrow: int) -> None:
    """Put one head of a K row (float32) into column ``slot`` of its tile. ``narrow`` is scratch for a narrow head."""
    if kind == KV_F32:
        for d in range(head_dim):
            store_float(tile + (d * KV_BLOCK + slot) * FLOAT_BYTES, load_float(key + d * FLOAT_BYTES))
    elif kind == KV_F16:
        head_to_half(key, head_dim // QUANT_BLOCK, narrow)
        for d in range(head_dim):
            store_int16(tile + (d * KV_BLOCK + slot) * HALF_BYTES, load_int16(narrow + d * HALF_BYTES))
    elif kind == KV_Q8:
        scales = tile + head_dim * KV_BLOCK
        head_to_q8(key, head_dim // QUANT_BLOCK, narrow, scales + slot * FLOAT_BYTES)
        for d in range(head_dim):
            store_byte(tile + d * KV_BLOCK + slot, load_byte(narrow + d))


@kernel
def store_value(kind: int, value: int, head_dim: int, tile: int, slot: int) -> None:
    """Put one head of a V row (float32) into row ``slot`` of its tile."""
    if kind == KV_F32:
        target = tile + slot * head_dim * FLOAT_BYTES
        for d in range(head_dim):
            store_float(target + d * FLOAT_BYTES, load_float(value + d * FLOAT_BYTES))
    elif kind == KV_F16:
        head_to_half(value, head_dim // QUANT_BLOCK, tile + slot * head_dim * HALF_BYTES)
    elif kind == KV_Q8:
        scales = tile + head_dim * KV_BLOCK
        head_to_q8(value, head_dim // QUANT_BLOCK, tile + slot * head_dim, scales + slot * FLOAT_BYTES)


@kernel
def widened_keys(kind: int, tile: int, head_dim: int, wide: int) -> int:
    """Where the tile's K are as float32 [head_dim, 32]: in the tile itself, or in ``wide``, which they are put into."""
    if kind == KV_F16:
        widen_half(tile, head_dim, wide)
        return wide
    if kind == KV_Q8:
        widen_q8_keys(tile, head_dim, wide)
        return wide
    return tile


@kernel
def widened_values(kind: int, tile: int, head_dim: int, wide: int) -> int:
    """Where the tile's V are as float32 [32, head_dim]: as widened_keys."""
    if kind == KV_F16:
        widen_half(tile, head_dim, wide)
        return wide
    if kind == KV_Q8:
        widen_q8_values(tile, head_dim, wide)
        return wide
    return tile
