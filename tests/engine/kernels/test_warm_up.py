"""How far the compiling of kernels is, is told while it lasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvferry.engine.kernels import compile_cache

TOLD_OF_ALL = """
import json
from contextlib import contextmanager
from kvferry.engine.kernels import warm_up

told = []

class Recorder:
    def advance(self, n):
        told.append(n)

@contextmanager
def gauge(what, total, *, in_bytes):
    yield Recorder()
    print(json.dumps({"total": total, "told": told}))

warm_up.gauge = gauge
with warm_up.told_progress():
    warm_up.compile_all()
"""


@pytest.mark.slow  # a compiler at work: half a minute
def test_every_kernel_counts_once_and_in_the_end_all_are_told(tmp_path):
    environment = os.environ | {"KVFERRY_CACHE": str(tmp_path), compile_cache._COMPILING_CHILD: "1"}
    done = subprocess.run(
        [sys.executable, "-c", TOLD_OF_ALL], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["total"] > 50
    assert found["told"] == [1] * found["total"]
