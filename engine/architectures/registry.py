"""Which architectures there are, and the refusal of all others by name."""

from __future__ import annotations

from typing import Final

from kvferry.engine.architectures.base import Architecture
from kvferry.engine.architectures.llama import LLAMA
from kvferry.engine.architectures.qwen2 import QWEN2
from kvferry.engine.architectures.qwen3 import QWEN3
from kvferry.engine.architectures.qwen3_moe import QWEN3_MOE
from kvferry.engine.architectures.qwen3_vl import QWEN3_VL
from kvferry.engine.architectures.qwen3_vl_moe import QWEN3_VL_MOE
from kvferry.engine.errors import UnsupportedArchitecture

ARCHITECTURES: Final = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE)


def by_model_type(where: object, model_type: str) -> Architecture:
    """The architecture a checkpoint's config.json names. ``where`` begins the sentence. UnsupportedArchitecture."""
    for architecture in ARCHITECTURES:
        if architecture.name == model_type:
            return architecture
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise UnsupportedArchitecture(f"{where}: architecture {model_type!r} is not supported; supported are {known}")


def by_gguf_name(where: object, name: str) -> Architecture:
    """The architecture a GGUF file names. ``where`` begins the sentence. Raises UnsupportedArchitecture."""
    for architecture in ARCHITECTURES:
        if architecture.gguf_name == name:
            return architecture
    known = ", ".join(architecture.gguf_name for architecture in ARCHITECTURES)
    raise UnsupportedArchitecture(
        f"{where}: architecture {name!r} is not supported; supported in GGUF files are {known}"
    )
