"""What a node holds: its weights once, K/V memory as accounted, and no more after many sessions than after a few."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running_node import RunningNode, running_node

MIB = 1 << 20
KV_BYTES = 48 * MIB
# The interpreter, libraries and compiled kernels; what a node without a model and K/V memory would take.
PROCESS_BYTES = 260 * MIB
# What allocators and caches still take when a node has warmed up; a leak of one short session's rows is 1.4 MB.
GROWTH_BYTES = 12 * MIB


def memory_of(node: RunningNode) -> dict[str, int]:
    lines = Path(f"/proc/{node.process.pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}


def run_sessions(node: RunningNode, first: int, n: int) -> None:
    for i in range(first, first + n):
        tokens = [i % 40_000 + 100, *range(200, 220)]
        answer = node.run_turn(tokens, session=f"session-{i}", max_tokens=2, end_token_ids=[])
        assert len(answer.tokens) == 2


@pytest.mark.parametrize(
    "n_sessions", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["100", "1000"]
)
def test_a_node_does_not_grow_with_sessions(tmp_path: Path, smollm2_path: Path, n_sessions: int) -> None:
    flags = ("--context", "512", "--kv-memory", str(KV_BYTES), "--max-sessions", "8")
    with running_node(tmp_path / "node", smollm2_path, *flags) as node:
        run_sessions(node, 0, 50)
        warm = memory_of(node)
        run_sessions(node, 50, n_sessions)
        after = memory_of(node)
        assert after["Rss"] - warm["Rss"] < GROWTH_BYTES
        load = node.status().load
        assert load.kv_bytes_used <= load.kv_bytes_budget <= KV_BYTES


@pytest.mark.parametrize("weights", ["memory", "stream"])
def test_a_ready_node_holds_its_weights_once_or_hardly_at_all(tmp_path: Path, smollm2_path: Path, weights: str) -> None:
    flags = ("--context", "512", "--kv-memory", str(KV_BYTES), "--weights", weights)
    with running_node(tmp_path / "node", smollm2_path, *flags) as node:
        packed_bytes = smollm2_path.stat().st_size  # q4_1 and q8_0 are packed as they are: within 2 %
        held = memory_of(node)
        budget = PROCESS_BYTES + (1.05 * packed_bytes if weights == "memory" else 0.4 * packed_bytes)
        assert held["Rss"] < budget
        if weights == "memory":
            assert held["Anonymous"] > 0.95 * packed_bytes
