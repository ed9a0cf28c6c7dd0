"""`make bench-resume`: the first token of a session's next turn on another node, restored or computed again.

Real nodes in processes of their own, spoken to over gRPC: one has a session of 2,048 tokens and saves it, another one,
just started, answers its next turn of 40 tokens: first from the store, then computing everything. Both have to give the
same token. The disk is the page cache (warm), the disk as it is (cold), and the disk held by the kernel to what gigabit
ethernet (110 MB/s) and eMMC (240 MB/s) give. Every kind of snapshot is one of a cache of that kind.

The prefill ratio compares what the nodes report (computing the whole prompt, to reading it and computing what is new),
the wall ratio what the caller waits for the first token.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from rich.console import Console
from rich.table import Table

from kvferry.bench.node_process import Answer, node_process
from kvferry.bench.throttle import Throttle, forget, throttle_of
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.text.model import TextModel

N_NEXT: Final = 40
NEVER_SAVES: Final = ("--publish-min-tokens", "1000000", "--publish-every-tokens", "1000000")
N_ANSWER: Final = 8  # of the session's last turn
STORES: Final = {
    "v1 f32": ("--store-version", "1"),
    "v3 f32": (),
    "v3 f16": ("--kv", "f16"),
    "v3 q8": ("--kv", "q8"),
}
DISKS: Final = {"warm": 0, "cold": 0, "110 MB/s": 110_000_000, "240 MB/s": 240_000_000}


@dataclass(slots=True)
class Line:
    """One kind of snapshot from one disk; an entry for each round."""

    n_bytes: int = 0
    resumed: list[Answer] = field(default_factory=list)
    computed: list[Answer] = field(default_factory=list)

    @property
    def prefill_ratio(self) -> float:
        """Of the seconds that the nodes tell."""
        ways = zip(self.computed, self.resumed, strict=True)
        return median(c.prefix.prefill_seconds / (r.prefix.restore_seconds + r.prefix.prefill_seconds) for c, r in ways)

    @property
    def wall_ratio(self) -> float:
        """Of the seconds until the caller had the first token."""
        return median(c.first_s / r.first_s for c, r in zip(self.computed, self.resumed, strict=True))


class Bench:
    """All kinds of snapshots of one session."""

    def __init__(
        self,
        folder: Path,
        model: str,
        n_tokens: int,
        n_threads: int,
        throttle: Throttle | None,
        disks: Sequence[str] = tuple(DISKS),
    ) -> None:
        self.folder = folder
        self.model = model
        self.n_tokens = n_tokens
        self.throttle = throttle
        self.disks = {disk: DISKS[disk] for disk in disks}
        self.flags = ("--threads", str(n_threads), "--kv-memory", f"{2 * (n_tokens + 1024) * 46_080}")
        self.tokens = some_tokens(model, n_tokens + N_NEXT)
        self.lines: dict[tuple[str, str], Line] = {}
        self.kernel_path = ""

    def measure(self, kind: str) -> None:
        """One round of one kind, from every disk."""
        store = self.folder / kind.replace(" ", "-")
        flags = (*self.flags, "--store", str(store), *STORES[kind])
        session = self._saved_session(flags)
        for disk, bytes_per_s in self.disks.items():
            if bytes_per_s and self.throttle is None:
                continue
            line = self.lines.setdefault((kind, disk), Line())
            with node_process(self.folder, self.model, *flags, *NEVER_SAVES) as node:
                if disk != "warm":
                    forget(store)
                if bytes_per_s and self.throttle is not None:
                    self.throttle.put(node.process.pid, bytes_per_s, max(store.rglob("*.kv"), key=_n_bytes))
                resumed = node.run_turn("resumed", session, 1)
                line.n_bytes = node.status().load.store.bytes_restored
                node.drop("resumed")
                computed = node.run_turn("computed", session, 1, recompute=True)
            if resumed.tokens != computed.tokens or resumed.prefix.n_restored != self.n_tokens - 1:
                raise RuntimeError(f"{kind}, {disk}: restored is not recomputed: {resumed} {computed}")
            line.resumed.append(resumed)
            line.computed.append(computed)

    def _saved_session(self, flags: Sequence[str]) -> list[int]:
        """Tokens of the next turn's prompt, of a session that lies in the store and in no node's memory."""
        n_prompt = self.n_tokens - N_ANSWER
        with node_process(self.folder, self.model, *flags) as node:
            answer = node.run_turn("first", self.tokens[:n_prompt], N_ANSWER)
            node.save("first")
            self.kernel_path = node.status().kernel_path
        return [*self.tokens[:n_prompt], *answer.tokens, *self.tokens[self.n_tokens :]]


def _n_bytes(path: Path) -> int:
    return path.stat().st_size


def some_tokens(model: str, n_tokens: int) -> list[int]:
    """A text of so many tokens, the same every time."""
    story = "The ferry left the harbour before the fog had lifted, and nobody on deck knew the way. "
    text = TextModel.load(resolve_model(model))
    return text.encode(" ".join(f"{number}. {story}" for number in range(n_tokens)))[:n_tokens]


def table_of(bench: Bench) -> Table:
    """One line for each kind and disk, medians of all rounds."""
    rounds = max(len(line.resumed) for line in bench.lines.values())
    table = Table(
        "store", "disk", "MB", "restore s", "first token s", "recompute s", "prefill ratio", "wall ratio",
        title=f"{bench.n_tokens} tokens and {N_NEXT} more, {bench.kernel_path}, {' '.join(bench.flags[:2])[2:]}, "
        f"medians of {rounds}",
    )  # fmt: skip
    for (kind, disk), line in bench.lines.items():
        table.add_row(
            kind,
            disk,
            f"{line.n_bytes / 1e6:.1f}",
            f"{median(a.prefix.restore_seconds for a in line.resumed):.3f}",
            f"{median(a.first_s for a in line.resumed):.3f}",
            f"{median(a.first_s for a in line.computed):.2f}",
            f"{line.prefill_ratio:.1f}",
            f"{line.wall_ratio:.1f}",
        )
    return table


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8000])
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--disks", nargs="+", choices=DISKS, default=list(DISKS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: the current one")
    arguments = parser.parse_args()
    console = Console(width=120)
    for n_tokens in arguments.tokens:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory or Path.cwd())))
            throttle = stack.enter_context(throttle_of(folder))
            bench = Bench(folder, arguments.model, n_tokens, arguments.threads, throttle, arguments.disks)
            for _ in range(arguments.rounds):
                for kind in arguments.stores:
                    bench.measure(kind)
            console.print(table_of(bench))
            if throttle is None:
                console.print("no slow disks: that takes root, and the blkio controller of cgroups")
    console.print("asked: 13.1 on the first token; llama.cpp's slot restore gives 12.5 in the same experiment")


if __name__ == "__main__":
    main()
