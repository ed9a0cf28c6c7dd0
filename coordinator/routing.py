"""Which node answers: a pure decision over what is known, with a reason for every node.

Among the nodes that may take the turn, the one that is predicted to show the first token soonest (``prediction.py``),
where a second of it counts as much as a second by which the turns that wait there already would wait longer; among
equals the least loaded one, then the lowest id. So a long prefix on a busy node competes with a short one on an idle
node, and a fast board with a slow one, in the same unit: seconds. Without the others' seconds each turn takes its own
advantage at their expense: on replayed traces the mean got worse by up to a third (docs/coordinator.md).

A prediction is no reason to let one node starve another: a node with turns in its queue is passed over while another
that may take the turn has ``MAX_QUEUE_LEAD`` fewer of them.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvferry.coordinator.membership import Member, Node, NodeState
from kvferry.coordinator.prediction import (
    DEFAULT_MAX_RUNNING,
    NOTHING_COMING,
    Coming,
    Forecast,
    Prediction,
    RowSources,
    forecast_of,
    predict,
)

MAX_QUEUE_LEAD: Final = 2
"""Turns; promise 24: no node idles while another one queues more than two."""

MAX_WEIGHED_EACH: Final = 16
"""Nodes that are weighed for their memory, and as many for their idleness: a decision stays below some milliseconds."""

MAX_CANDIDATES_KEPT: Final = 16
"""Per placement, in its record and in the event to the client: a fleet of thousands would write half a megabyte."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a turn needs of a node."""

    session_id: str
    # That the session speaks to; empty: any, in a fleet of one.
    model: str = ""
    # Prompt and answer tokens so far; at least one of them is always computed.
    n_tokens: int
    # Tokens that the turn may reach.
    n_context: int
    # Empty: any. A turn that has begun goes on under one fingerprint only, since its tokens could differ under another.
    fingerprint: str = ""
    # (first, end) tokens of each of the session's images.
    images: tuple[tuple[int, int], ...] = ()
    # node_id -> why, in the order of failing; such nodes are chosen only when nobody else is left, the last of them
    # last.
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is known at the moment of the decision."""

    members: Sequence[Member]
    # node_id -> turns there; of a node that is not here, what its last heartbeat said.
    n_turns: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # fingerprint -> tokens of this request that the shared store could restore.
    n_stored: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # node_id -> leading tokens of this request whose rows other sessions have in the node's memory.
    n_shared: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # node_id -> leading tokens of this request that another turn there is computing, and how long that takes.
    coming: Mapping[str, Coming] = dataclasses.field(default_factory=dict)
    # node_id -> its speed and its work; a node that is not there is taken for an idle one of ordinary speed.
    forecasts: Mapping[str, Forecast] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    node_id: str
    chosen: bool
    n_resident: int
    n_stored: int
    n_running: int
    n_queued: int
    reason: str
    queue_seconds: float = 0.0
    restore_seconds: float = 0.0
    look_seconds: float = 0.0
    prefill_seconds: float = 0.0
    predicted_seconds: float = 0.0
    others_seconds: float = 0.0
    n_restored: int = 0
    n_computed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``member`` is None when no node may take the turn; the candidates say why.

    ``candidates``: the chosen one and the best of the others, by id; of small fleets all.
    """

    member: Member | None
    candidates: tuple[Candidate, ...]
    n_candidates: int = 0
    prediction: Prediction | None = None

    @property
    def summary(self) -> str:
        """Why there is no node, for a person."""
        if not self.candidates:
            return "no node has registered"
        return "; ".join(f"{c.node_id}: {c.reason}" for c in self.candidates)


Rule = Callable[[View, RouteRequest], Choice]
"""``route``, or what it is compared with (``simulator/rules.py``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    """A node that may take the turn, with what is predicted."""

    member: Member
    prediction: Prediction
    n_turns: int

    @property
    def rank(self) -> tuple[float, int, str]:
        """Smaller is better, field by field."""
        return self.prediction.cost_seconds, self.n_turns, self.member.node.node_id

    @property
    def n_waiting(self) -> int:
        """Turns beyond the node's batch."""
        return max(0, self.n_turns - (self.member.node.max_running or DEFAULT_MAX_RUNNING))


def route(view: View, request: RouteRequest) -> Choice:
    """Choose a node for ``request``."""
    able = [m for m in view.members if m.state is NodeState.LIVE and unfit(m.node, request) is None]
    weighed = worth_weighing(view, request, prefer_untried(able, request.failed))
    considered = {m.node.node_id: option(view, request, m) for m in weighed}
    least_waiting = min((o.n_waiting for o in considered.values()), default=0)
    fair = [o for o in considered.values() if o.n_waiting <= least_waiting + MAX_QUEUE_LEAD]
    best = min(fair, key=lambda o: o.rank, default=None)
    shown = worth_showing(view.members, considered, best)

    def candidate(member: Member) -> Candidate:
        node_id, load = member.node.node_id, member.node.load
        found = considered.get(node_id)
        if (why := obstacle(member, request)) is not None:
            reason = f"cannot take it: {why}"
        elif node_id in request.failed and found is None:
            reason = f"passed over: it failed this turn ({request.failed[node_id]})"
        elif found is None or best is None:
            reason = "not weighed: others have more of it, or less to do"
        elif found is best:
            reason = "chosen: " + praise(request, best, len(considered))
        elif found.n_waiting > least_waiting + MAX_QUEUE_LEAD:
            reason = f"passed over: {turns(found.n_waiting)} in its queue, and {least_waiting} in another one's"
        else:
            reason = "passed over: " + compare(found, best)
        p = None if found is None else found.prediction
        return Candidate(
            node_id=node_id,
            chosen=found is not None and found is best,
            n_resident=n_resident(view, request, member),
            n_stored=n_stored(view, member),
            n_running=load.n_running,
            n_queued=load.n_queued,
            reason=reason,
            queue_seconds=p.queue_seconds if p else 0.0,
            restore_seconds=p.restore_seconds if p else 0.0,
            look_seconds=p.look_seconds if p else 0.0,
            prefill_seconds=p.prefill_seconds if p else 0.0,
            predicted_seconds=p.seconds if p else 0.0,
            others_seconds=p.others_seconds if p else 0.0,
            n_restored=p.n_restored if p else 0,
            n_computed=p.n_computed if p else 0,
        )

    return Choice(
        member=None if best is None else best.member,
        candidates=tuple(candidate(m) for m in shown),
        n_candidates=len(view.members),
        prediction=None if best is None else best.prediction,
    )


def worth_weighing(view: View, request: RouteRequest, able: Sequence[Member]) -> Sequence[Member]:
    """Everybody in a fleet of dozens; of thousands those with most of it in memory, now or soon, and the least busy."""
    if len(able) <= 2 * MAX_WEIGHED_EACH:
        return able
    holding = [m for m in able if request.session_id in m.node.resident or has_others_rows(view, m)]
    holders = heapq.nlargest(MAX_WEIGHED_EACH, holding, key=lambda m: n_soon_resident(view, request, m))
    idlest = heapq.nsmallest(MAX_WEIGHED_EACH, able, key=lambda m: load_of(view, m))
    return list({m.node.node_id: m for m in [*holders, *idlest]}.values())


def worth_showing(
    members: Sequence[Member], considered: Mapping[str, _Option], best: _Option | None
) -> Sequence[Member]:
    """Everybody in a small fleet; else the chosen one and those that came nearest, in the fleet's order."""
    if len(members) <= MAX_CANDIDATES_KEPT:
        return members
    nearest = sorted(considered.values(), key=lambda o: (o is not best, o.rank))[:MAX_CANDIDATES_KEPT]
    if not nearest:
        return members[:MAX_CANDIDATES_KEPT]
    kept = {o.member.node.node_id for o in nearest}
    return [m for m in members if m.node.node_id in kept]


def option(view: View, request: RouteRequest, member: Member) -> _Option:
    coming = view.coming.get(member.node.node_id, NOTHING_COMING)
    rows = RowSources(
        n_tokens=request.n_tokens, n_resident=n_resident(view, request, member), n_stored=n_stored(view, member),
        bytes_per_row=member.node.bytes_per_row, images=request.images,
        n_coming=min(coming.n_tokens, request.n_tokens - 1), coming_s=coming.seconds,
    )  # fmt: skip
    n_turns = load_of(view, member)
    return _Option(member, predict(member, rows, forecast_of(view.forecasts, member.node.node_id), n_turns), n_turns)


def prefer_untried(able: Sequence[Member], failed: Mapping[str, str]) -> Sequence[Member]:
    """Nodes that did not fail this turn, else those that did not fail it last, else whoever is left."""
    *_, last_failed = ["", *failed]
    untried = [m for m in able if m.node.node_id not in failed]
    return untried or [m for m in able if m.node.node_id != last_failed] or able


def obstacle(member: Member, request: RouteRequest) -> str | None:
    """Why this node may not take the turn, or None."""
    match member.state:
        case NodeState.DEAD:
            stalled_s = member.node.load.stalled_seconds
            return f"dead, nothing heard for {member.silent_seconds:.1f} s" + (
                f", no engine step for {stalled_s:.0f} s" if stalled_s else ""
            )
        case NodeState.SUSPECT:
            return f"suspect, nothing heard for {member.silent_seconds:.1f} s or a connection broke"
        case NodeState.DRAINING:
            return "draining"
        case NodeState.LIVE:
            pass
    return unfit(member.node, request)


def unfit(node: Node, request: RouteRequest) -> str | None:
    """Why this node could not take the turn even if it were idle, or None."""
    if request.model and node.model != request.model:
        return f"it serves {node.model}, and the session speaks to {request.model}"
    if request.fingerprint and node.fingerprint != request.fingerprint:
        return "the turn began under another fingerprint"
    if request.images and not node.sees_images:
        return "it has no vision tower, and the session has images"
    if node.context_length < request.n_context:
        return f"its context holds {node.context_length} tokens and this turn may need {request.n_context}"
    return None


def n_resident(view: View, request: RouteRequest, member: Member) -> int:
    """Rows of this request that are in the node's memory, be they this session's; the last token is always computed."""
    own = member.node.resident.get(request.session_id, 0)
    return min(max(own, view.n_shared.get(member.node.node_id, 0)), request.n_tokens - 1)


def has_others_rows(view: View, member: Member) -> bool:
    """Of other sessions that begin alike; computed already or not."""
    return member.node.node_id in view.n_shared or member.node.node_id in view.coming


def n_soon_resident(view: View, request: RouteRequest, member: Member) -> int:
    """With what a turn there is computing."""
    coming = view.coming.get(member.node.node_id, NOTHING_COMING)
    return max(n_resident(view, request, member), coming.n_tokens)


def n_stored(view: View, member: Member) -> int:
    """Tokens that this node could restore from the store."""
    load = member.node.load
    reads_it = load.store_ok and not load.other_store and not load.other_key
    return view.n_stored.get(member.node.fingerprint, 0) if reads_it else 0


def load_of(view: View, member: Member) -> int:
    """Turns on the node, running or waiting."""
    n_turns = view.n_turns.get(member.node.node_id)
    return member.node.load.n_running + member.node.load.n_queued if n_turns is None else n_turns


def praise(request: RouteRequest, best: _Option, n_considered: int) -> str:
    p = best.prediction
    reused = request.n_tokens - p.n_computed
    if p.n_restored:
        source = f"{reused} of {request.n_tokens} tokens from the store"
    elif p.awaits_rows:
        source = f"{reused} of {request.n_tokens} tokens with another turn that computes them"
    elif reused:
        source = f"{reused} of {request.n_tokens} tokens in memory"
    else:
        source = f"all {request.n_tokens} tokens to compute"
    sooner = ", sooner than reading them from the store" if p.recompute else ""
    alone = "the only node that can; " if n_considered == 1 else ""
    return f"{alone}first token in {seconds(p.seconds)}, {source}{sooner}"


def compare(worse: _Option, better: _Option) -> str:
    """By how much, and the part in which the chosen node gained most."""
    ours, theirs = worse.prediction, better.prediction
    if ours.seconds <= theirs.seconds and ours.cost_seconds > theirs.cost_seconds:
        return (
            f"first token in {seconds(ours.seconds)}, but {seconds(ours.others_seconds)} later for the turns that "
            f"wait there against {seconds(theirs.others_seconds)}"
        )
    if ours.cost_seconds <= theirs.cost_seconds:
        if worse.n_turns != better.n_turns:
            return f"as soon, but busier, {turns(worse.n_turns)} against {better.n_turns}"
        return f"as good as {better.member.node.node_id}, which comes first by name"
    parts = {
        "queue": (ours.queue_seconds, theirs.queue_seconds),
        "restore": (ours.restore_seconds, theirs.restore_seconds),
        "look": (ours.look_seconds, theirs.look_seconds),
        "prefill": (ours.prefill_seconds, theirs.prefill_seconds),
    }
    most = max(parts, key=lambda part: parts[part][0] - parts[part][1])
    values = parts[most]
    return f"first token in {seconds(ours.seconds)}, {most} {seconds(values[0])} against {seconds(values[1])}"


def seconds(s: float) -> str:
    """For a person."""
    return f"{s * 1000:.0f} ms" if s < 1 else f"{s:.1f} s"


def turns(n: int) -> str:
    return f"{n} turn" if n == 1 else f"{n} turns"
