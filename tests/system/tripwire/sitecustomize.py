"""Python runs this first wherever its folder is on the PYTHONPATH: a node's engine then obeys a file of orders.

The file that KVFERRY_TEST_TRIPWIRE names is JSON: ``gather`` (no step before so many turns are there), ``pace``
(seconds that every step takes longer), ``stop_at`` (this index of an answer is not computed), and what happens there,
``then``: "wait" until the orders change, or "die" by SIGKILL. All of it begins anew with each ``round``.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry.engine.scheduler import Scheduler, StepOutput

with suppress(ImportError):
    import disturbances  # noqa: F401 - in a disturbed run, whose own sitecustomize this one stands before

ORDERS = Path(os.environ["KVFERRY_TEST_TRIPWIRE"])
BYTES_LEAVE_S = 0.05

real_step = Scheduler.step


def orders() -> dict[str, Any]:
    try:
        return json.loads(ORDERS.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # not there, or being written
        return {}


class Watch:
    """What the engine has done under the latest orders."""

    order: dict[str, Any] = {}  # noqa: RUF012 - one engine, one watch
    # Tokens of each answer, as all of them began together.
    n_told = 0
    is_gathered = False


def step(self: Scheduler) -> list[StepOutput]:
    """One step, as ordered."""
    order = orders()
    if order.get("round") != Watch.order.get("round"):
        Watch.n_told, Watch.is_gathered = 0, False
    Watch.order = order
    if not Watch.is_gathered and self.n_running + self.n_queued < order.get("gather", 0):
        time.sleep(0.002)
        return []
    Watch.is_gathered = True
    if Watch.n_told >= order.get("stop_at", 1 << 30):
        time.sleep(BYTES_LEAVE_S)
        if order.get("then") == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return []
    time.sleep(order.get("pace", 0.0))
    outputs = real_step(self)
    Watch.n_told = max([Watch.n_told, *(output.token_index + 1 for output in outputs if output.token is not None)])
    return outputs


Scheduler.step = step  # type: ignore[method-assign]
