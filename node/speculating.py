"""From settings to what proposes tokens to the turns of a node."""

from __future__ import annotations

from typing import Final

from kvferry.engine.draft import DraftModel
from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.kv_cache import KvKind
from kvferry.engine.speculation import PromptLookup, Speculator
from kvferry.node.config import NodeConfig

DRAFT_KV_SHARE: Final = 4
"""The draft model's rows get this part of the memory that the model's have, on top of it."""


def make_speculator(config: NodeConfig, engine: Engine) -> tuple[Speculator | None, Engine | None]:
    """What proposes tokens, and the draft model's engine, to be closed in the end.

    Raises EngineError: ModelNotFound and the like for the draft model, DraftMismatch.
    """
    if config.speculate == "off":
        return None, None
    if config.speculate == "ngram":
        return Speculator(PromptLookup()), None
    options = EngineOptions(
        n_threads=config.n_threads,
        kv_bytes=int(config.kv_memory) // DRAFT_KV_SHARE,
        context_length=config.context,
        quant=config.quant,
        kv=KvKind(config.kv),
    )
    draft = Engine.load(resolve_model(config.draft_model or ""), options)
    return Speculator(DraftModel(draft, engine.config.vocab_size)), draft
