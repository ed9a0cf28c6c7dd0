"""How weights, quantised activations and KV tiles lie in memory. Sizes are in bytes unless a name says otherwise.

Packed weights: the rows (output features) of a tensor are cut into groups of ``group_rows`` (8 or 16, one row per SIMD
lane), each group into blocks of 32 k. The blocks of a group follow each other; groups follow groups. In a block, a
*vector* holds 4 consecutive k of every row: byte ``4 * row + c`` is element k = 4 * g + c of that row.

- Nibbles take 4 vectors (vector j: low nibble = k-group j, high nibble = k-group j + 4), bytes 8 (vector g = k-group
  g).
- Behind them lie ``group_rows`` scales d, then as many again where the second half of a block has its own, then
  ``group_rows`` minima m where there are any. element = d * integer, + m.
- q4: nibbles, d and m as float16. q8: int8, d as float16. q4_wide: nibbles, q5: bytes 0..31, both with d and m as
  float32. q6: int8 in -32..31, a float32 d for each 16 elements. The last three hold without a loss what GGUF calls
  q4_K, q5_1 and q5_K, q6_K.

Quantised activation row of K elements (n_blocks = K / 32): K int8 values; then per block two float32, the scale s and
s * sum of the block's integers; then per block one int32, -128 * sum, which is what an unsigned-by-signed dot
instruction needs as its start when signed weights are fed to it with 128 added.

KV tile of one (block, layer, KV head): K is [head_dim, 32] (a position is a column), V [32, head_dim], of float32,
float16 or int8; a q8 tile ends with 32 float32, the scale of each position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

QUANT_BLOCK: Final = 32  # elements that share a scale, in weights and in activations
ACTIVATION_MAX: Final = 127  # of a quantised activation, either sign
KV_BLOCK: Final = 32  # positions in a KV block; also the step of the online softmax

WEIGHTS_Q4: Final = 0  # kinds of packed weights
WEIGHTS_Q8: Final = 1
WEIGHTS_Q4_WIDE: Final = 2
WEIGHTS_Q5: Final = 3
WEIGHTS_Q6: Final = 4

KV_F32: Final = 0  # kinds of KV tiles, as the jitted code knows them
KV_F16: Final = 1
KV_Q8: Final = 2

CACHE_LINE: Final = 64
FLOAT_BYTES: Final = 4
HALF_BYTES: Final = 2


@dataclass(frozen=True)
class WeightFormat:
    """What tells a kind of packed weights from the others.

    ``magnitude``: the largest of its integers, signed or not. ``nibbles``: two of them lie in a byte. ``scale_bytes``
    of a d or m: 2 (float16) or 4 (float32). ``n_scales``: how many d a block has. ``has_minimum``: whether it has an m.
    """

    magnitude: int
    is_signed: bool
    nibbles: bool
    scale_bytes: int
    n_scales: int
    has_minimum: bool

    @property
    def integer_bytes(self) -> int:
        """Bytes of the integers of one row's block; its scales lie behind those of all rows."""
        return QUANT_BLOCK // 2 if self.nibbles else QUANT_BLOCK

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's share of a block."""
        return self.integer_bytes + self.scale_bytes * (self.n_scales + int(self.has_minimum))


WEIGHT_FORMATS: Final = {
    WEIGHTS_Q4: WeightFormat(15, is_signed=False, nibbles=True, scale_bytes=2, n_scales=1, has_minimum=True),
    WEIGHTS_Q8: WeightFormat(128, is_signed=True, nibbles=False, scale_bytes=2, n_scales=1, has_minimum=False),
    WEIGHTS_Q4_WIDE: WeightFormat(15, is_signed=False, nibbles=True, scale_bytes=4, n_scales=1, has_minimum=True),
    WEIGHTS_Q5: WeightFormat(31, is_signed=False, nibbles=False, scale_bytes=4, n_scales=1, has_minimum=True),
    WEIGHTS_Q6: WeightFormat(32, is_signed=True, nibbles=False, scale_bytes=4, n_scales=2, has_minimum=False),
}


def weight_block_bytes(kind: int, group_rows: int) -> int:
    """Bytes of one packed block: 32 k of ``group_rows`` rows."""
    return group_rows * WEIGHT_FORMATS[kind].row_bytes


def activation_row_bytes(n_elements: int) -> int:
    """Bytes of one quantised activation row, rounded up to whole cache lines."""
    n_blocks = n_elements // QUANT_BLOCK
    return -(-n_blocks * (QUANT_BLOCK + 8 + 4) // CACHE_LINE) * CACHE_LINE


def kv_tile_bytes(kind: int, head_dim: int) -> int:
    """Bytes of the K (or V) tile of one block, layer and KV head."""
    row_bytes = {KV_F32: head_dim * FLOAT_BYTES, KV_F16: head_dim * HALF_BYTES, KV_Q8: head_dim + FLOAT_BYTES}
    return KV_BLOCK * row_bytes[kind]
