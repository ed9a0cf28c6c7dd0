"""Qwen3-VL-MoE: Qwen3-VL with Qwen3-MoE's layers; the chosen experts' weights are always normalised.

Released checkpoints hold a layer's experts fused and transposed: gate_up_proj [experts, hidden, 2 x ffn], gate first.
"""

from typing import Final

from kvferry.engine.architectures.base import Architecture

QWEN3_VL_MOE: Final = Architecture(
    name="qwen3_vl_moe",
    gguf_name="qwen3vlmoe",
    qk_norm=True,
    explicit_head_dim=True,
    sparse=True,
    normalises_top_k=True,
    vision=True,
)
