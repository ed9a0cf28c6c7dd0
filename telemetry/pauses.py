"""Pauses that are nobody's work: Python's collector holds all streams up while it looks through what will stay."""

from __future__ import annotations

import gc


def keep_loaded() -> None:
    """What is loaded stays, and is never looked through again; call it once, when a server is about to serve.

    Modules and tokenizers are hundreds of thousands of objects: each full collection took 0.1 s of every stream.
    """
    gc.collect()
    gc.freeze()
