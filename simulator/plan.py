"""A trace over a fleet that need not exist: the coordinator's own ``route`` decides, modelled boards take their time.

The same trace can be run under other rules (``rules.py``), to see what predicting is worth.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvferry.coordinator.forecasts import Awaiting, Forecasts
from kvferry.coordinator.membership import Load, Member, Node, NodeState
from kvferry.coordinator.prediction import Coming
from kvferry.coordinator.routing import RouteRequest, Rule, View
from kvferry.proto.v1 import common_pb2
from kvferry.simulator.fleet_model import BoardRates, Job, ModelBoard, SharedStore
from kvferry.simulator.trace import SessionPlan

FINGERPRINT: Final = "f"
CONTEXT_LENGTH: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """What is bought."""

    n_nodes: int
    rates: BoardRates
    # Boards of one purchase differ: the slowest computes at 1 / spread of the fastest's rate.
    spread: float = 1.5
    store_bytes_per_s: float = 110e6
    # Of each board by itself, in place of ``n_nodes`` and ``spread``.
    each: tuple[BoardRates, ...] = ()

    def board_rates(self, seed: int) -> list[BoardRates]:
        rng = random.Random(seed)  # noqa: S311 - a simulation, not a secret
        return list(self.each) or [self.rates.scaled(self.spread ** -rng.random()) for _ in range(self.n_nodes)]


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """What the users would have felt."""

    first_token_s: list[float] = dataclasses.field(default_factory=list)
    predicted_s: list[float] = dataclasses.field(default_factory=list)
    n_tokens: int = 0
    n_resident: int = 0
    n_restored: int = 0
    n_computed: int = 0
    n_bytes_read: int = 0
    n_switches: int = 0
    span_s: float = 0.0
    turns_by_node: dict[str, int] = dataclasses.field(default_factory=dict)
    # Of this process, not of the fleet.
    route_seconds: float = 0.0

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.first_token_s)

    def percentile_s(self, percent: float) -> float:
        ordered = sorted(self.first_token_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    @property
    def prediction_error(self) -> float:
        """Median of |predicted - actual| / actual."""
        return statistics.median(
            abs(p - a) / a for p, a in zip(self.predicted_s, self.first_token_s, strict=True) if a > 0
        )


@dataclasses.dataclass(slots=True)
class _Session:
    plan: SessionPlan
    number: int
    n_tokens: int = 0
    next_turn: int = 0
    node: str = ""


class Planner:
    """One run of one trace under one rule."""

    def __init__(
        self, fleet: FleetPlan, sessions: Sequence[SessionPlan], rule: Rule, seed: int = 0,
        make_board: Callable[[str, BoardRates, SharedStore], ModelBoard] = ModelBoard,
    ) -> None:  # fmt: skip
        self.store = SharedStore(fleet.store_bytes_per_s)
        self.boards: list[ModelBoard] = []
        self.nodes: list[Node] = []
        self.forecasts = Forecasts()
        self.now_s = 0.0
        self.outcome = Outcome()
        for number, rates in enumerate(fleet.board_rates(seed)):
            board = make_board(f"n{number:04}", rates, self.store)
            self.boards.append(board)
            self.nodes.append(
                Node(
                    node_id=board.name,
                    boot_id="b",
                    address="h:1",
                    model="m",
                    fingerprint=FINGERPRINT,
                    context_length=CONTEXT_LENGTH,
                    max_running=rates.max_running,
                    bytes_per_row=rates.bytes_per_row,
                    load=Load(prefill_tokens_per_second=rates.prefill_tokens_per_s),
                    resident=board.named,
                )
            )
        self._members = [Member(node=node, state=NodeState.LIVE, silent_seconds=0.0) for node in self.nodes]
        self._board_of = {board.name: board for board in self.boards}
        self._nodes_by_id = {node.node_id: node for node in self.nodes}
        # Kept up with each change, since a fleet of thousands cannot be counted for each question.
        self._n_turns: dict[str, int] = {}
        self._shared: dict[int, dict[str, int]] = {}
        # system → board → who computes it there
        self._coming: dict[int, dict[str, Awaiting]] = {}
        self._rule = rule
        self._sessions = [_Session(plan, number) for number, plan in enumerate(sessions)]
        self._events: list[tuple[float, int, str, object]] = []
        self._n_events = 0
        self._awaiting: dict[int, Awaiting] = {}
        self._decoding: dict[int, Awaiting] = {}

    def run(self) -> Outcome:
        """Until every session has had all its answers."""
        for session in self._sessions:
            self._at(session.plan.start_s, "ask", session)
        while self._events:
            self.now_s, _, kind, what = heapq.heappop(self._events)
            if kind == "ask" and isinstance(what, _Session):
                self._ask(what)
            elif isinstance(what, ModelBoard) and what.next_s() <= self.now_s + 1e-9:
                self._step(what)
        self.outcome.span_s = self.now_s
        self.outcome.n_bytes_read = self.store.n_bytes_read
        return self.outcome

    def view(self, session: _Session) -> View:
        """What a coordinator knows of its fleet at this moment."""
        plan = session.plan
        stored = self.store.rows_for(session.number, plan.system, plan.system_tokens)
        return View(
            members=self._members,
            n_turns=self._n_turns,
            n_stored={FINGERPRINT: min(stored, session.n_tokens - 1)} if stored else {},
            n_shared=self._shared.get(plan.system, {}),
            coming={
                name: Coming(plan.system_tokens, self.forecasts.seconds_left(awaiting, self.now_s))
                for name, awaiting in self._coming.get(plan.system, {}).items()
            },
            forecasts=self.forecasts.of(self._nodes_by_id, self.now_s),
        )

    def _ask(self, session: _Session) -> None:
        plan, turn = session.plan, session.plan.turns[session.next_turn]
        if session.next_turn == 0:
            session.n_tokens = plan.system_tokens
        session.n_tokens += turn.prompt_tokens
        request = RouteRequest(
            session_id=f"s{session.number}", n_tokens=session.n_tokens, n_context=session.n_tokens,
            fingerprint=FINGERPRINT,
        )  # fmt: skip
        began = time.perf_counter()
        choice = self._rule(self.view(session), request)
        self.outcome.route_seconds += time.perf_counter() - began
        if choice.member is None or choice.prediction is None:
            raise AssertionError(choice.summary)
        node, prediction = choice.member.node, choice.prediction
        board = self._board_of[node.node_id]
        job = Job(
            session.number, plan.system, plan.system_tokens, session.n_tokens, turn.answer_tokens, self.now_s,
            recompute=prediction.recompute, predicted_s=prediction.seconds,
        )  # fmt: skip
        self.outcome.n_switches += session.node not in {"", board.name}
        session.node = board.name
        session.n_tokens += turn.answer_tokens
        by_node = self.outcome.turns_by_node
        by_node[board.name] = by_node.get(board.name, 0) + 1
        awaiting = self._awaiting[id(job)] = self.forecasts.placed(node, prediction, board.n_turns, self.now_s)
        self._coming.setdefault(plan.system, {}).setdefault(board.name, awaiting)
        self._catch_up(board)
        board.submit(job, self.now_s)
        self._note(board, plan.system, plan.system_tokens)
        self._at(board.next_s(), "board", board)

    def _catch_up(self, board: ModelBoard) -> None:
        started, ended = board.advance(self.now_s)
        self._tell(started, ended)
        for job in [*started, *ended]:
            self._note(board, job.system, job.system_tokens)

    def _note(self, board: ModelBoard, system: int, system_tokens: int) -> None:
        """What the coordinator knows of this board now."""
        self._n_turns[board.name] = board.n_turns
        self._shared.setdefault(system, {})[board.name] = system_tokens
        for other, holders in self._shared.items():
            if not board.systems.get(other):
                holders.pop(board.name, None)

    def _step(self, board: ModelBoard) -> None:
        self._catch_up(board)
        if (next_s := board.next_s()) < float("inf"):
            self._at(next_s, "board", board)

    def _tell(self, started: list[Job], ended: list[Job]) -> None:
        for job in started:
            out = self.outcome
            out.first_token_s.append(self.now_s - job.arrived_s)
            out.predicted_s.append(job.predicted_s)
            out.n_tokens += job.n_tokens
            out.n_resident += job.n_resident
            out.n_restored += job.n_restored
            out.n_computed += job.n_computed
            awaiting = self._decoding[id(job)] = self._awaiting.pop(id(job))
            coming = self._coming[job.system]
            if coming.get(awaiting.node.node_id) is awaiting:
                del coming[awaiting.node.node_id]
            self.forecasts.reported(awaiting, report_of(job, self.now_s), self.now_s)
            self.forecasts.first_token(awaiting, self.now_s)
        for job in ended:
            self.forecasts.over(self._decoding.pop(id(job)), self.now_s)
            self.forecasts.turn_ended(job.ends_s - job.first_token_s)
            session = self._sessions[job.session]
            turn = session.plan.turns[session.next_turn]
            session.next_turn += 1
            if session.next_turn < len(session.plan.turns):
                self._at(self.now_s + turn.think_s, "ask", session)

    def _at(self, when_s: float, kind: str, what: object) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (when_s, self._n_events, kind, what))


def report_of(job: Job, now_s: float) -> common_pb2.PrefixReport:
    """As a node tells it with the first token."""
    return common_pb2.PrefixReport(
        n_tokens=job.n_tokens, n_resident=job.n_resident, n_restored=job.n_restored, n_computed=job.n_computed,
        queue_seconds=job.admitted_s - job.arrived_s, restore_seconds=job.restored_s - job.admitted_s,
        prefill_seconds=now_s - job.restored_s,
    )  # fmt: skip
