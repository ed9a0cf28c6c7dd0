"""Qwen2 and Qwen2.5: the q, k and v projections have a bias."""

from typing import Final

from kvferry.engine.architectures.base import Architecture

QWEN2: Final = Architecture(name="qwen2", gguf_name="qwen2", qkv_bias=True)
