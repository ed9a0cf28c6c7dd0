"""Llama, and what is built like it (SmolLM2, TinyLlama): the plain decoder."""

from typing import Final

from kvferry.engine.architectures.base import Architecture

LLAMA: Final = Architecture(name="llama", gguf_name="llama", gguf_adjacent_pairs=True)
