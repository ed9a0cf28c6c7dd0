"""The commands the engine brings to the command line: `models` and `score`.

Each is imported when it is asked for: `kvferry models` must not pay for the kernels.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_MODULE_OF: Final = {
    "models": "kvferry.engine.commands.models",
    "score": "kvferry.engine.commands.score",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
