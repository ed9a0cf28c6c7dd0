"""Which node answers: a pure decision over what is known, with a reason for every node.

The rule of this version: among the nodes that may take the turn, the one with the longest prefix in its memory, where
that saves something over the shared store; then the longest prefix in the store; then the least loaded one; then the
lowest id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from kvferry.coordinator.membership import Member, NodeState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a turn needs of a node."""

    session_id: str
    # Prompt and answer tokens so far; at least one of them is always computed.
    n_tokens: int
    # Tokens that the turn may reach.
    n_context: int
    # Empty: any. A turn that has begun goes on under one fingerprint only, since its tokens could differ under another.
    fingerprint: str = ""
    # node_id -> why, in the order of failing; such nodes are chosen only when nobody else is left, the last of them
    # last.
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is known at the moment of the decision."""

    members: Sequence[Member]
    # node_id -> turns this coordinator has placed there; fresher than the node's last heartbeat.
    n_placed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # fingerprint -> tokens of this request that the shared store could restore.
    n_stored: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    node_id: str
    chosen: bool
    n_resident: int
    n_stored: int
    n_running: int
    n_queued: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``member`` is None when no node may take the turn; the candidates say why."""

    member: Member | None
    candidates: tuple[Candidate, ...]

    @property
    def summary(self) -> str:
        """Why there is no node, for a person."""
        if not self.candidates:
            return "no node has registered"
        return "; ".join(f"{c.node_id}: {c.reason}" for c in self.candidates)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _Rank:
    """Smaller is better, field by field."""

    minus_resident: int
    minus_stored: int
    load: int
    node_id: str


def route(view: View, request: RouteRequest) -> Choice:
    """Choose a node for ``request``; the candidates are all known nodes, by id."""
    obstacles = {m.node.node_id: obstacle(m, request) for m in view.members}
    able = [m for m in view.members if obstacles[m.node.node_id] is None]
    ranks = {m.node.node_id: rank(view, request, m) for m in prefer_untried(able, request.failed)}
    best = min(ranks.values(), default=None)
    chosen = next((m for m in view.members if best and m.node.node_id == best.node_id), None)

    def reason(member: Member) -> str:
        node_id = member.node.node_id
        if (why := obstacles[node_id]) is not None:
            return f"cannot take it: {why}"
        if node_id not in ranks or best is None:
            return f"passed over: it failed this turn ({request.failed[node_id]})"
        if member is chosen:
            return "chosen: " + praise(view, request, member)
        return "passed over: " + compare(ranks[node_id], best)

    return Choice(
        member=chosen,
        candidates=tuple(
            Candidate(
                node_id=m.node.node_id,
                chosen=m is chosen,
                n_resident=n_resident(request, m),
                n_stored=n_stored(view, m),
                n_running=m.node.load.n_running,
                n_queued=m.node.load.n_queued,
                reason=reason(m),
            )
            for m in view.members
        ),
    )


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
    if request.fingerprint and member.node.fingerprint != request.fingerprint:
        return "the turn began under another fingerprint"
    if member.node.context_length < request.n_context:
        return f"its context holds {member.node.context_length} tokens and this turn may need {request.n_context}"
    return None


def n_resident(request: RouteRequest, member: Member) -> int:
    """Rows of this session that the node holds and can use; the last token is always computed."""
    return min(member.node.resident.get(request.session_id, 0), request.n_tokens - 1)


def n_stored(view: View, member: Member) -> int:
    """Tokens that this node could restore from the store."""
    return view.n_stored.get(member.node.fingerprint, 0) if member.node.load.store_ok else 0


def load_of(view: View, member: Member) -> int:
    """Turns on the node: its own count may be a heartbeat old, ours does not see other coordinators'."""
    load = member.node.load
    return max(load.n_running + load.n_queued, view.n_placed.get(member.node.node_id, 0))


def rank(view: View, request: RouteRequest, member: Member) -> _Rank:
    stored = n_stored(view, member)
    resident = n_resident(request, member)
    # A memory that holds less than the store restores anywhere is no reason to prefer a node.
    return _Rank(-resident if resident > stored else 0, -stored, load_of(view, member), member.node.node_id)


def praise(view: View, request: RouteRequest, member: Member) -> str:
    stored, resident, load = n_stored(view, member), n_resident(request, member), load_of(view, member)
    if resident > stored:
        return f"holds {resident} of {request.n_tokens} tokens in memory"
    if stored:
        return f"can restore {stored} of {request.n_tokens} tokens from the store, {turns(load)} running or queued"
    return f"nothing of this session is cached anywhere, {turns(load)} running or queued"


def compare(worse: _Rank, better: _Rank) -> str:
    """The first thing in which the chosen node was better."""
    if worse.minus_resident != better.minus_resident:
        return f"{-worse.minus_resident} useful tokens in memory against {-better.minus_resident}"
    if worse.minus_stored != better.minus_stored:
        return f"could restore {-worse.minus_stored} tokens against {-better.minus_stored}"
    if worse.load != better.load:
        return f"busier, {turns(worse.load)} against {better.load}"
    return f"as good as {better.node_id}, which comes first by name"


def turns(n: int) -> str:
    return f"{n} turn" if n == 1 else f"{n} turns"
