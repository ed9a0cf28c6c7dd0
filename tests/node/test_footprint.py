"""What a node holds: its weights once, K/V memory as accounted, and no more after many sessions than after a few."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running_node import RunningNode, running_node

MIB = 1 << 20
KV_BYTES = 48 * MIB
# The interpreter's objects, compiled kernels and buffers; libraries are files, of which the system keeps in memory what
# it likes.
PROCESS_BYTES = 150 * MIB
# Of the model's own file: its head and vocabulary, not its weights.
SOURCE_BYTES = 16 * MIB
# What allocators and caches still take when a node has warmed up; a leak of one short session's rows is 1.4 MB.
GROWTH_BYTES = 12 * MIB


def memory_of(node: RunningNode) -> dict[str, int]:
    lines = Path(f"/proc/{node.process.pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}


def mapped_bytes(node: RunningNode, ending: str) -> int:
    """Resident bytes of the files with this ending that the process has mapped."""
    total, is_wanted = 0, False
    for line in Path(f"/proc/{node.process.pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_wanted = words[-1].endswith(ending)
        elif words[0] == "Rss:" and is_wanted:
            total += int(words[1]) * 1024
    return total


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
def test_a_ready_node_holds_its_weights_once(tmp_path: Path, smollm2_path: Path, weights: str) -> None:
    """In memory of its own, or in pages of the packed file, which all processes share and the system may take back."""
    flags = ("--context", "512", "--kv-memory", str(KV_BYTES), "--weights", weights)
    with running_node(tmp_path / "node", smollm2_path, *flags) as node:
        packed_bytes = smollm2_path.stat().st_size  # q4_1 and q8_0 are packed as they are: within 2 %
        own, packed = memory_of(node)["Anonymous"], mapped_bytes(node, ".kvfpack")
        assert mapped_bytes(node, smollm2_path.name) < SOURCE_BYTES
        if weights == "memory":
            assert 0.95 * packed_bytes < own < 1.05 * packed_bytes + PROCESS_BYTES
            assert packed < SOURCE_BYTES
        else:
            assert own < PROCESS_BYTES
            assert 0 < packed < 1.05 * packed_bytes
