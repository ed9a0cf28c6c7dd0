"""`kvferry bench resume`: the experiment behind the "13.1 x" of other runtimes, step by step, with its log.

A process that was just started computes a long prompt, answers and saves; it is killed; another process takes the
session's next turn, once from the snapshot and once computing everything. Both have to give the same tokens. Two ratios
come out, and they are not the same: of what a node spends on the prompt (computing, to reading and computing what is
new), and of what the caller waits for the first token. A third one counts the start of the process as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from kvferry.bench.node_process import Answer, NodeProcess, node_process
from kvferry.bench.resume import NEVER_SAVES, some_tokens
from kvferry.bench.throttle import forget

N_NEXT: Final = 40  # tokens of the next turn's prompt
N_ANSWER: Final = 8
N_AFTER: Final = 16  # tokens of the answer that is compared


@dataclass(slots=True)
class Round:
    """One run of the experiment; seconds."""

    first_start_s: float
    second_start_s: float
    save_s: float
    n_bytes: int
    first: Answer
    resumed: Answer
    computed: Answer

    @property
    def prefill_ratio(self) -> float:
        """Of what the nodes report: computing the prompt, to reading it and computing what is new."""
        resumed = self.resumed.prefix
        return self.computed.prefix.prefill_seconds / (resumed.restore_seconds + resumed.prefill_seconds)

    @property
    def wall_ratio(self) -> float:
        """Of what the caller waits for the first token."""
        return self.computed.first_s / self.resumed.first_s

    @property
    def wall_ratio_with_start(self) -> float:
        """The same, from the start of the process on: what a restart costs the one who waits for it."""
        return (self.second_start_s + self.computed.first_s) / (self.second_start_s + self.resumed.first_s)


@dataclass(slots=True)
class Experiment:
    """``say`` is told every step: its heading, and the lines below it."""

    folder: Path
    model: str
    n_tokens: int
    flags: tuple[str, ...]
    from_cold_disk: bool
    say: Callable[[str, str], None]
    rounds: list[Round] = field(default_factory=list)

    def run(self) -> Round:
        """One more round.

        Raises:
            RuntimeError: the restored turn differs from the computed one, or was not restored.
        """
        store = self.folder / f"store-{len(self.rounds)}"
        prompt = some_tokens(self.model, self.n_tokens + N_NEXT)
        flags = ("--store", str(store), *self.flags)
        with self._started("1. a process is started", flags) as (node, first_start_s):
            first = node.run_turn("story", prompt[: self.n_tokens - N_ANSWER], N_ANSWER)
            self._told(
                "2. it computes a long prompt, and answers", f"RunTurn: {self.n_tokens - N_ANSWER} tokens", first
            )
            began_at = time.perf_counter()
            node.save("story")
            save_s = time.perf_counter() - began_at
            files = sorted(store.rglob("*.kv"))
            n_bytes = sum(path.stat().st_size for path in files)
            self.say("3. it saves the session", f"SaveSession: {n_bytes / 1e6:.1f} MB, {save_s:.3f} s")
            for path in files:
                self.say("", f"{path.relative_to(self.folder)}")
        self.say("4. kill -9", "")
        if self.from_cold_disk:
            forget(store)
            self.say("", "the system's cache of the snapshot is dropped")
        session = [*prompt[: self.n_tokens - N_ANSWER], *first.tokens, *prompt[self.n_tokens :]]
        with self._started("5. another process is started", (*flags, *NEVER_SAVES)) as (node, second_start_s):
            resumed = node.run_turn("resumed", session, N_AFTER)
            self._told(
                "6. the same conversation goes on, from the snapshot", f"RunTurn: {len(session)} tokens", resumed
            )
            node.drop("resumed")
            computed = node.run_turn("computed", session, N_AFTER, recompute=True)
            self._told("7. for comparison: the same turn, everything computed", "RunTurn, recompute=true", computed)
        if resumed.prefix.n_restored < self.n_tokens - 1 - N_ANSWER:
            raise RuntimeError(f"only {resumed.prefix.n_restored} of {self.n_tokens} rows came from the snapshot")
        if resumed.tokens != computed.tokens:
            raise RuntimeError(f"restored is not recomputed: {resumed.tokens} and {computed.tokens}")
        self.say("8. judged", f"{N_AFTER} tokens of both answers are the same")
        self.rounds.append(Round(first_start_s, second_start_s, save_s, n_bytes, first, resumed, computed))
        return self.rounds[-1]

    @contextmanager
    def _started(self, step: str, flags: tuple[str, ...]) -> Iterator[tuple[NodeProcess, float]]:
        """A node, and the seconds until it served."""
        began_at = time.perf_counter()
        with node_process(self.folder, self.model, *flags) as node:
            start_s = time.perf_counter() - began_at
            shown = " ".join(flags).replace(str(self.folder), "DIR")
            self.say(step, f"$ kvferry node run --model {self.model} {shown}")
            log = max(self.folder.glob("bench-*.log"), key=lambda path: path.stat().st_mtime_ns)
            for line in log.read_text().splitlines()[-2:]:
                self.say("", line.replace(str(self.folder), "DIR"))
            self.say("", f"serves after {start_s:.2f} s")
            yield node, start_s

    def _told(self, step: str, call: str, answer: Answer) -> None:
        prefix = answer.prefix
        self.say(step, call)
        self.say(
            "",
            f"rows: {prefix.n_resident} resident, {prefix.n_restored} restored in {prefix.restore_seconds:.3f} s, "
            f"{prefix.n_computed} computed in {prefix.prefill_seconds:.3f} s",
        )
        self.say("", f"first token after {answer.first_s:.3f} s")

    def median_of(self, figure: Callable[[Round], float]) -> float:
        """Over all rounds."""
        return median(map(figure, self.rounds))
