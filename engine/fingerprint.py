"""The model fingerprint: what two nodes must share before they may share KV rows."""

from __future__ import annotations

import hashlib
import json
from typing import Final

from kvferry.engine.config import ModelConfig

FINGERPRINT_CHARS: Final = 32  # 128 bits: no two models meet by accident, and it still fits a file name and a table
_DOMAIN: Final = b"kvferry model 01"  # exactly the 16 bytes that blake2b takes


def fingerprint(
    *,
    weights_sha256: str,
    config: ModelConfig,
    quant_recipe: str,
    tokenizer_digest: str,
    kv_kind: str,
    numerics_version: int,
) -> str:
    """32 hex characters; the same on every machine, and different when any ingredient differs.

    ``weights_sha256``: of the weight files' bytes. ``config``: with its rope settings. ``quant_recipe``: how the engine
    holds weights and activations, in words of its own. ``tokenizer_digest``: ``TextModel.digest``. ``kv_kind``: what
    the cache stores, "f32". ``numerics_version``: of the kernels' arithmetic; raised whenever a bit of any row may
    change.
    """
    ingredients = {
        "weights": weights_sha256,
        "config": config.as_dict(),
        "quant": quant_recipe,
        "tokenizer": tokenizer_digest,
        "kv": kv_kind,
        "numerics": numerics_version,
    }
    # JSON writes a float as the shortest decimal that reads back to it, so equal configs give equal bytes everywhere.
    body = json.dumps(ingredients, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(body.encode(), digest_size=FINGERPRINT_CHARS // 2, person=_DOMAIN).hexdigest()
