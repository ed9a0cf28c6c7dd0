"""A machine in other hands: every process freezes now and then, gRPC answers come late, the disk takes its time.

`make test-disturbed` runs the tests like that. One that fails there and not otherwise waits for a time instead of an
event, takes what was asked for what was answered, or strikes at an answer that may have ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib.abc
import importlib.machinery
import inspect
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

BETWEEN_FREEZES_S = 1.5
SHORTEST_FREEZE_S, LONGEST_FREEZE_S = 0.05, 0.7
ANSWER_S = 0.05
SYNC_S = 0.05


def freeze_now_and_then() -> None:
    """Other times in each process and each run; a call that holds the interpreter's lock stops all of its threads."""
    usleep = ctypes.PyDLL(None).usleep
    rng = random.Random()
    while True:
        time.sleep(rng.expovariate(1 / BETWEEN_FREEZES_S))
        seconds = math.exp(rng.uniform(math.log(SHORTEST_FREEZE_S), math.log(LONGEST_FREEZE_S)))
        usleep(int(seconds * 1e6))


def answering_late(make_handler: Callable[..., Any]) -> Callable[..., Any]:
    """What was done is told a while after it was done."""

    @functools.wraps(make_handler)
    def made(behavior: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def late(request: Any, context: Any) -> Any:
            answer = await behavior(request, context)
            await asyncio.sleep(ANSWER_S)
            return answer

        def late_in_its_thread(request: Any, context: Any) -> Any:
            answer = behavior(request, context)
            time.sleep(ANSWER_S)
            return answer

        return make_handler(late if inspect.iscoroutinefunction(behavior) else late_in_its_thread, *args, **kwargs)

    return made


class LateGrpc(importlib.abc.MetaPathFinder):
    """Changes grpc when it is first imported; most processes never do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "grpc":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            vars(module)["unary_unary_rpc_method_handler"] = answering_late(module.unary_unary_rpc_method_handler)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def slow(sync: Callable[[int], None]) -> Callable[[int], None]:
    def slowly(fd: int) -> None:
        time.sleep(SYNC_S)
        sync(fd)

    return slowly


threading.Thread(target=freeze_now_and_then, daemon=True, name="freezes").start()
sys.meta_path.insert(0, LateGrpc())
os.fsync, os.fdatasync = slow(os.fsync), slow(os.fdatasync)
