"""What saving costs: bytes on the disk, and time that anybody waits. Real nodes, spoken to over gRPC.

A chat of 20 turns grows from 2,000 to 6,000 tokens on a node that writes segments and on one that writes whole files
(version 1); their status tells what they wrote. Then turns run on a node with a store and on one without, in turn: a
save must delay neither the last token of its own turn nor the first one of the next.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

from kvferry.bench.node_process import Answer, NodeProcess, node_process

N_TURNS: Final = 20
N_FIRST: Final = 2000
N_A_TURN: Final = 200  # prompt and answer
N_ANSWER: Final = 32
N_PROMPT: Final = 600
N_TIMED: Final = 64
N_NEXT: Final = 40


class Tokens:
    """A conversation of random words: nothing in it is shared by chance."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.ids: list[int] = []

    def say(self, n: int) -> list[int]:
        """The conversation with so many more tokens."""
        self.ids += [self._chance.randrange(1000, 40_000) for _ in range(n)]
        return self.ids


def bytes_of_chat(node: NodeProcess) -> tuple[int, int]:
    """Bytes that 20 turns wrote, and the bytes of the rows they added."""
    chat = Tokens(0)
    chat.ids += node.run_turn("chat", chat.say(N_FIRST - N_ANSWER), N_ANSWER).tokens
    node.save("chat")
    n_before = node.status().load.store.bytes_saved
    for _ in range(N_TURNS):
        chat.ids += node.run_turn("chat", chat.say(N_A_TURN - N_ANSWER), N_ANSWER).tokens
        node.save("chat")
    status = node.status()
    n_row_bytes = (
        N_TURNS * N_A_TURN * 2 * 4 * status.geometry.n_layers * status.geometry.n_kv_heads * status.geometry.head_dim
    )
    return status.load.store.bytes_saved - n_before, n_row_bytes


def report_bytes(start: Callable[..., NodeProcess], folder: Path) -> None:
    """Both figures of one run."""
    written, of_rows = bytes_of_chat(start("--store", str(folder / "v3")))
    whole, _ = bytes_of_chat(start("--store", str(folder / "v1"), "--store-version", "1", "--store-max-bytes", "1GiB"))
    print(f"{N_TURNS} turns, {N_FIRST} to {N_FIRST + N_TURNS * N_A_TURN} tokens: {of_rows / 1e6:.0f} MB of new rows")
    print(f"  segments write {written / 1e6:9.1f} MB, {written / of_rows:.3f} of the new rows   (<= 1.1)")
    print(f"  version 1      {whole / 1e6:9.1f} MB, {whole / written:.1f} times as much   (>= 15)")


def two_turns(node: NodeProcess, number: int) -> tuple[Answer, Answer]:
    """A turn, and the next one as soon as it has ended."""
    chat = Tokens(number)
    first = node.run_turn(f"s{number}", chat.say(N_PROMPT), N_TIMED)
    chat.ids += first.tokens
    return first, node.run_turn(f"s{number}", chat.say(N_NEXT), N_TIMED)


def waits_of(turn: Answer, following: Answer) -> dict[str, float]:
    """Seconds that their caller waited."""
    return {
        f"last token of a turn of {N_PROMPT} + {N_TIMED}": turn.last_s,
        f"first token of the next, of {N_NEXT} more": following.first_s,
        "last token of the next": following.last_s,
    }


def report_waiting(start: Callable[..., NodeProcess], folder: Path, rounds: int) -> None:
    """Medians of the rounds' own ratios."""
    saving, not_saving = start("--store", str(folder / "timed")), start()
    for number, node in enumerate((saving, not_saving), start=1):
        two_turns(node, -number)
    ratios: dict[str, list[float]] = {}
    for number in range(1, rounds + 1):
        pair = (saving, not_saving) if number % 2 else (not_saving, saving)
        seconds = {node is saving: waits_of(*two_turns(node, number)) for node in pair}
        for name, waited in seconds[True].items():
            ratios.setdefault(name, []).append(waited / seconds[False][name])
    print(f"time with saving on / off, medians of {rounds} pairs ({saving.status().load.snapshots_published} saves)")
    for name, values in ratios.items():
        print(f"  {name:40} {median(values):.3f}   (last tokens: <= 1.02)")


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=["bytes", "waiting"], help="one of the two")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to write; default: the current one")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory or Path.cwd())))

        def start(*flags: str) -> NodeProcess:
            return stack.enter_context(
                node_process(folder, arguments.model, "--threads", str(arguments.threads), *flags)
            )

        if arguments.only != "waiting":
            report_bytes(start, folder)
        if arguments.only != "bytes":
            report_waiting(start, folder, arguments.rounds)


if __name__ == "__main__":
    main()
