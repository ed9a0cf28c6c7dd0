"""How weights, quantised activations and KV tiles lie in memory. Sizes are in bytes unless a name says otherwise.

Packed weights: the rows (output features) of a tensor are cut into groups of ``group_rows`` (8 or 16, one row per SIMD
lane), each group into blocks of 32 k. The blocks of a group follow each other; groups follow groups. In a block, a
*vector* holds 4 consecutive k of every row: byte ``4 * row + c`` is element k = 4 * g + c of that row.

- q4 block: 4 vectors of nibbles (vector j: low nibble = k-group j, high nibble = k-group j + 4), ``group_rows`` float16
  scales d, ``group_rows`` float16 minima m; element = d * nibble + m.
- q8 block: 8 vectors of int8 (vector g = k-group g), ``group_rows`` float16 scales d; element = d * byte.

Quantised activation row of K elements (n_blocks = K / 32): K int8 values; then per block two float32, the scale s and
s * sum of the block's integers; then per block one int32, -128 * sum, which is what an unsigned-by-signed dot
instruction needs as its start when signed weights are fed to it with 128 added.

KV tile of one (block, layer, KV head): K is [head_dim, 32] (a position is a column), V [32, head_dim], of float32,
float16 or int8; a q8 tile ends with 32 float32, the scale of each position.
"""

from __future__ import annotations

from typing import Final

QUANT_BLOCK: Final = 32  # elements that share a scale, in weights and in activations
KV_BLOCK: Final = 32  # positions in a KV block; also the step of the online softmax

WEIGHTS_Q4: Final = 0  # kinds of packed weights
WEIGHTS_Q8: Final = 1
WEIGHT_KINDS: Final = (WEIGHTS_Q4, WEIGHTS_Q8)

KV_F32: Final = 0  # kinds of KV tiles, as the jitted code knows them
KV_F16: Final = 1
KV_Q8: Final = 2

CACHE_LINE: Final = 64
FLOAT_BYTES: Final = 4
HALF_BYTES: Final = 2


def weight_block_bytes(kind: int, group_rows: int) -> int:
    """Bytes of one packed block: 32 k of ``group_rows`` rows."""
    if kind == WEIGHTS_Q4:
        return group_rows * (QUANT_BLOCK // 2 + 2 + 2)
    return group_rows * (QUANT_BLOCK + 2)


def activation_row_bytes(n_elements: int) -> int:
    """Bytes of one quantised activation row, rounded up to whole cache lines."""
    n_blocks = n_elements // QUANT_BLOCK
    return -(-n_blocks * (QUANT_BLOCK + 8 + 4) // CACHE_LINE) * CACHE_LINE


def kv_tile_bytes(kind: int, head_dim: int) -> int:
    """Bytes of the K (or V) tile of one block, layer and KV head."""
    row_bytes = {KV_F32: head_dim * FLOAT_BYTES, KV_F16: head_dim * HALF_BYTES, KV_Q8: head_dim + FLOAT_BYTES}
    return KV_BLOCK * row_bytes[kind]
