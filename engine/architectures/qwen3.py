"""Qwen3: no bias; each head of q and k goes through an RMSNorm before rope, with one weight vector for all heads."""

from typing import Final

from kvferry.engine.architectures.base import Architecture

QWEN3: Final = Architecture(name="qwen3", gguf_name="qwen3", qk_norm=True, explicit_head_dim=True)
