"""The demo: a conversation survives the board that serves it, and then the whole cluster, bit for bit.

Control first: the same three turns on a single node that nobody disturbs. It also says how long the second answer is,
so that the kill can be at any of its tokens. Then three nodes: turn 1; turn 2, in which the node that serves is killed
by SIGKILL at a random token; everything is stopped and started again; turn 3. The judge compares.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Final

from kvferry.client.sdk import Client, Placed, Sampling, Token, TurnEvent
from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.conversation import TurnLog, TurnRequest, hold_turn
from kvferry.drills.errors import DrillImpossible
from kvferry.drills.judge import Verdict, judge
from kvferry.drills.model import DEFAULT_MODEL, get_ready

SESSION_ID: Final = "demo"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """`seed` chooses where the kill happens and how turn 2 is sampled; `directory` holds both clusters' files."""

    directory: Path
    seed: int
    model: str = DEFAULT_MODEL
    n_nodes: int = 3
    threads_per_node: int = 1


@dataclass(frozen=True)
class Kill:
    """Where the drill struck."""

    node_id: str
    pid: int
    after_token: int


@dataclass
class DemoResult:
    """All that a report needs."""

    seed: int
    control: list[TurnLog]
    disturbed: list[TurnLog]
    kill: Kill
    verdict: Verdict
    seconds: dict[str, float] = field(default_factory=dict)


def conversation(seed: int) -> list[TurnRequest]:
    """A prompt of some 600 tokens and two more questions; greedy, sampled, and greedy with a penalty."""
    text = files("kvferry.drills").joinpath("texts/ferry.txt").read_text(encoding="utf-8")
    return [
        TurnRequest(f"Here is a text.\n\n{text}\nWhat is this text about?", max_tokens=96),
        TurnRequest(
            "What happened on the night of the flood, when the cable broke?",
            max_tokens=96,
            sampling=Sampling(temperature=0.6, top_p=0.95, repetition_penalty=1.1, seed=seed),
        ),
        TurnRequest(
            "Why are there two boats? Answer in two sentences.",
            max_tokens=72,
            sampling=Sampling(repetition_penalty=1.15, repetition_window=256),
        ),
    ]


def run_demo(options: DemoOptions, say: Say) -> DemoResult:
    """Runs it all; `say` gets a line per step.

    Raises DrillError when it could not be done; a bad verdict is a result.
    """
    seconds: dict[str, float] = {}
    turns = conversation(options.seed)
    with _timed(seconds, "model"):
        get_ready(options.model)
    say(f"seed {options.seed}")
    with _timed(seconds, "control"):
        say("control: one node, undisturbed")
        control, control_tokens = _control(options, turns)
    n_tokens = len(control[1].record.received)
    if n_tokens < 2:
        raise DrillImpossible(f"The second answer has {n_tokens} tokens, too few to be interrupted; try another seed.")
    kill_after = random.Random(options.seed).randrange(1, n_tokens)  # noqa: S311 - repeatable, not secret
    with _timed(seconds, "disturbed"):
        disturbed, disturbed_tokens, kill = _disturbed(options, turns, kill_after, say)
    verdict = judge(
        [log.record for log in disturbed], [log.record for log in control], disturbed_tokens, control_tokens
    )
    return DemoResult(options.seed, control, disturbed, kill, verdict, seconds)


def _control(options: DemoOptions, turns: list[TurnRequest]) -> tuple[list[TurnLog], tuple[int, ...]]:
    with LocalCluster(_cluster_options(options, "control", 1)) as cluster, Client(cluster.address) as client:
        session = client.create_session(SESSION_ID)
        logs = [hold_turn(session, turn) for turn in turns]
        return logs, session.details().token_ids


def _disturbed(
    options: DemoOptions, turns: list[TurnRequest], kill_after: int, say: Say
) -> tuple[list[TurnLog], tuple[int, ...], Kill]:
    say(f"cluster: {options.n_nodes} nodes, each a process of its own")
    with LocalCluster(_cluster_options(options, "cluster", options.n_nodes)) as cluster:
        with Client(cluster.address) as client:
            session = client.create_session(SESSION_ID)
            say("turn 1")
            first = hold_turn(session, turns[0])
            say(f"turn 2: its node will be killed after token {kill_after} has arrived")
            striker = Striker(cluster, kill_after)
            second = hold_turn(session, turns[1], striker)
            if striker.kill is None:
                raise DrillImpossible("The second answer ended before its node was killed.")
        say(f"killed {striker.kill.node_id} (pid {striker.kill.pid}); now everything is stopped and started again")
        cluster.restart()
        with Client(cluster.address) as client:
            session = client.session(SESSION_ID)
            say("turn 3")
            third = hold_turn(session, turns[2])
            return [first, second, third], session.details().token_ids, striker.kill


class Striker:
    """Kills the node that serves a turn once `after_token` tokens have arrived."""

    def __init__(self, cluster: LocalCluster, after_token: int) -> None:
        self.kill: Kill | None = None
        self._cluster = cluster
        self._after_token = after_token
        self._node_id = ""

    def __call__(self, _log: TurnLog, event: TurnEvent) -> None:
        """For hold_turn."""
        if isinstance(event, Placed):
            self._node_id = event.node_id
        if self.kill is None and isinstance(event, Token) and event.sequence + 1 >= self._after_token:
            self.kill = Kill(self._node_id, self._cluster.nodes[self._node_id].pid, event.sequence + 1)
            self._cluster.kill_node(self._node_id)


def _cluster_options(options: DemoOptions, name: str, n_nodes: int) -> ClusterOptions:
    return ClusterOptions(
        model=options.model,
        directory=options.directory / name,
        n_nodes=n_nodes,
        threads_per_node=options.threads_per_node,
    )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - start, 2)
