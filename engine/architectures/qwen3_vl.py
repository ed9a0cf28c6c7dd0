"""Qwen3-VL: Qwen3 with a vision tower.

Positions are (time, row, column), interleaved over the rope frequencies; features of several tower layers are added to
the image's rows after the first text layers (deepstack).
"""

from typing import Final

from kvferry.engine.architectures.base import Architecture

QWEN3_VL: Final = Architecture(name="qwen3_vl", gguf_name="qwen3vl", qk_norm=True, explicit_head_dim=True, vision=True)
