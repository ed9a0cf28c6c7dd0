"""A model whose packed weights are larger than the memory it may take loads, packs and computes the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engine.cgroup import memory_group
from tests.engine.engine.moe_checkpoint import write_checkpoint

GENERATE = Path(__file__).with_name("generate.py")
MIB = 1 << 20
LIMIT = 640 * MIB
# However many layers there are: a process, what streaming keeps, and one layer with nearly all of its experts.
STREAMED_PEAK = 1_110_000_000


def generate(folder: Path, weights: str, cache: Path, enter: list[str]) -> dict[str, Any]:
    environment = os.environ | {"KVFERRY_CACHE": str(cache)}
    command = [*enter, sys.executable, str(GENERATE), str(folder), weights]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_larger_than_its_memory_is_packed_and_streamed_to_the_same_bits(
    tmp_path: Path, record_property
) -> None:
    write_checkpoint(tmp_path / "model", n_layers=2)
    for kernels in ("free", "bounded"):  # compiled once: compiling takes memory of its own
        (tmp_path / kernels).mkdir()
        (tmp_path / kernels / "kernels").symlink_to(_kernels())
    with memory_group(LIMIT) as group:
        bounded = generate(tmp_path / "model", "auto", tmp_path / "bounded", group.enter_command())
        n_peak = group.peak_bytes()
    (pack,) = (tmp_path / "bounded/packed").glob("*.kvfpack")
    assert pack.stat().st_size > LIMIT
    assert bounded["weights"].startswith("stream")
    assert n_peak <= LIMIT
    free = generate(tmp_path / "model", "memory", tmp_path / "free", [])
    warm = generate(tmp_path / "model", "stream", tmp_path / "free", [])
    (made_freely,) = (tmp_path / "free/packed").glob("*.kvfpack")
    assert made_freely.read_bytes() == pack.read_bytes()
    for other in (free, warm):
        assert (bounded["digest"], bounded["fingerprint"]) == (other["digest"], other["fingerprint"])
    assert warm["peak_rss"] < STREAMED_PEAK < free["peak_rss"]
    print(json.dumps({"limit": LIMIT, "packed": pack.stat().st_size, "bounded": bounded, "free": free, "warm": warm}))


def _kernels() -> Path:
    from kvferry.engine.kernels.compile_cache import compile_cache

    return compile_cache().folder.parent
