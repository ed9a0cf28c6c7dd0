"""The Python SDK (sync and asyncio) and the command line.

`from kvferry.client import Client, Token` and all other names of `kvferry.client.sdk` work; they are imported when they
are asked for, so that `kvferry --help` does not wait for gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.client.sdk import *  # noqa: F403 - all of them, by their own list


def __getattr__(name: str) -> object:
    sdk = import_module("kvferry.client.sdk")
    if name not in sdk.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(sdk, name)
    return found
