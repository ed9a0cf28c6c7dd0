"""The LCP index with very many snapshots: memory, and how long an insert, a look-up and a removal take.

Snapshots share as a fleet's do: a few system prompts, sessions whose every turn saves what the turn before saved and
some more, forks of sessions. Every answer on a sample is compared with a brute-force scan that knows no tree.

    python -m kvferry.bench.lcp_index [--snapshots 1000000]
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import click
import numpy as np
import psutil

from kvferry.store.geometry import TokenIds
from kvferry.store.lcp_index import LcpIndex, common_prefix

BLOCK = 32
N_SYSTEMS = 50
MAX_TOKENS = 8_000
N_LOOKUPS = 20_000
N_BRUTE = 2_000


def snapshots(n: int, rng: np.random.Generator) -> Iterator[tuple[TokenIds, int]]:
    """Sequences of up to 8,000 tokens, each with the number of its tokens that no earlier one begins with."""
    systems = [rng.integers(0, 49_152, int(size), dtype=np.int32) for size in rng.integers(300, 1_500, N_SYSTEMS)]
    seen_systems: set[int] = set()
    recent: list[TokenIds] = []
    made = 0
    while made < n:
        if recent and rng.random() < 0.1:  # a fork of a session, at some token
            parent = recent[int(rng.integers(len(recent)))]
            session = parent[: int(rng.integers(len(parent) // 2, len(parent)))]
            n_new = 0
        else:
            number = int(rng.integers(N_SYSTEMS))
            session = systems[number]
            n_new = 0 if number in seen_systems else len(session)
            seen_systems.add(number)
        target = int(rng.integers(2_000, MAX_TOKENS))
        while made < n and len(session) < target:
            turn = rng.integers(0, 49_152, int(rng.integers(80, 700)), dtype=np.int32)
            session = np.concatenate((session, turn))[:MAX_TOKENS]
            yield session, n_new + len(turn)
            n_new = 0
            made += 1
        recent.append(session)
        if len(recent) > 200:  # its arrays are counted as memory of the index's
            recent.pop(int(rng.integers(len(recent))))


def timed(call: Callable[[], object], spans: list[float]) -> object:
    began = time.perf_counter()
    result = call()
    spans.append(time.perf_counter() - began)
    return result


def percentiles(spans: list[float]) -> str:
    p50, p99 = np.percentile(spans, [50, 99]) * 1e6
    return f"p50 {p50:7.1f} us, p99 {p99:7.1f} us, max {max(spans) * 1e3:6.2f} ms"


def brute_force(known: dict[str, TokenIds], query: TokenIds) -> tuple[int, int, str] | None:
    """(common tokens, length, key) by looking at every sequence."""
    found = [(common_prefix(ids, query), len(ids), key) for key, ids in known.items()]
    best = min(((-n, length, key) for n, length, key in found if n), default=None)
    return None if best is None else (-best[0], best[1], best[2])


@click.command()
@click.option("--snapshots", "n", default=1_000_000, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(n: int, seed: int) -> None:
    """Print one line per figure."""
    rng = np.random.default_rng(seed)
    index, process = LcpIndex(), psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    inserts: list[float] = []
    queries: list[TokenIds] = []
    n_tokens_unique = n_tokens = 0
    gc.disable()
    for number, (token_ids, n_new) in enumerate(snapshots(n, rng)):
        timed(lambda number=number, ids=token_ids: index.add(f"kv_{number:016x}", ids), inserts)  # type: ignore[misc]
        n_tokens_unique += n_new
        n_tokens += len(token_ids)
        if len(queries) < N_LOOKUPS and rng.random() < N_LOOKUPS / n * 1.1:
            cut = int(rng.integers(len(token_ids) // 2, len(token_ids) + 1))
            queries.append(np.concatenate((token_ids[:cut], rng.integers(0, 49_152, 100, dtype=np.int32))))
    gc.enable()
    grown = process.memory_info().rss - before - sum(q.nbytes for q in queries)
    lookups: list[float] = []
    for query in queries:
        timed(lambda query=query: index.find(query), lookups)  # type: ignore[misc]
    n_blocks = n_tokens_unique / BLOCK
    click.echo(
        f"{len(index)} snapshots, {n_tokens / 1e6:.0f} million tokens, {n_tokens_unique / 1e6:.0f} million unique"
    )
    click.echo(f"memory {grown / 1e6:.0f} MB: {grown / n_blocks:.0f} B per stored block of {BLOCK} tokens")
    click.echo(f"insert {percentiles(inserts)}")
    click.echo(f"lookup {percentiles(lookups)} ({len(lookups)} of them)")
    compare_with_brute_force(seed)


def compare_with_brute_force(seed: int) -> None:
    """The same answers, and the time that a scan takes."""
    rng = np.random.default_rng(seed + 1)
    known = {f"kv_{number:016x}": ids for number, (ids, _) in enumerate(snapshots(N_BRUTE, rng))}
    index = LcpIndex()
    for key, ids in known.items():
        index.add(key, ids)
    scans: list[float] = []
    lookups: list[float] = []
    n_different = 0
    for _ in range(300):
        ids = known[f"kv_{int(rng.integers(N_BRUTE)):016x}"]
        query = np.concatenate((ids[: int(rng.integers(len(ids)))], rng.integers(0, 49_152, 50, dtype=np.int32)))
        expected = timed(lambda query=query: brute_force(known, query), scans)  # type: ignore[misc]
        found = index.find(query)
        timed(lambda query=query: index.find(query), lookups)  # type: ignore[misc]
        n_different += (None if found is None else (found.n_common, found.n_tokens, found.key)) != expected
    click.echo(f"brute force over {N_BRUTE}: {percentiles(scans)}")
    click.echo(f"index over {N_BRUTE}:       {percentiles(lookups)}, {np.mean(scans) / np.mean(lookups):.0f} x as fast")
    click.echo(f"{n_different} different answers in 300")


if __name__ == "__main__":
    main()
