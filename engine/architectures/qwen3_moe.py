"""Qwen3-MoE (Qwen3-30B-A3B): Qwen3 with a choice of experts in place of the feed-forward part, in all layers or some.

The router takes a softmax over all experts in float32, then the best, then (if ``norm_topk_prob``) divides
by their sum.
"""

from typing import Final

from kvferry.engine.architectures.base import Architecture

QWEN3_MOE: Final = Architecture(
    name="qwen3_moe", gguf_name="qwen3moe", qk_norm=True, explicit_head_dim=True, sparse=True
)
