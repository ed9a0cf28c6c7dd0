"""What others do instead of predicting, as rules that a coordinator or a planner can follow: to compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from kvferry.coordinator.membership import Member
from kvferry.coordinator.routing import (
    Choice,
    RouteRequest,
    Rule,
    View,
    load_of,
    n_resident,
    obstacle,
    option,
    prefer_untried,
    route,
)


def least_loaded(view: View, request: RouteRequest) -> Choice:
    """The node with the fewest turns."""
    return first_by(view, request, lambda member: load_of(view, member))


def longest_prefix(view: View, request: RouteRequest) -> Choice:
    """The node that has most of it in memory, the least loaded among equals."""
    return first_by(view, request, lambda member: (-n_resident(view, request, member), load_of(view, member)))


class Sticky:
    """A session stays where its first turn went, which was the least loaded node then, for as long as that can be."""

    def __init__(self) -> None:
        self._home: dict[str, str] = {}

    def __call__(self, view: View, request: RouteRequest) -> Choice:
        home = self._home.get(request.session_id)
        choice = first_by(view, request, lambda member: (member.node.node_id != home, load_of(view, member)))
        if choice.member is not None:
            self._home[request.session_id] = choice.member.node.node_id
        return choice


def first_by(view: View, request: RouteRequest, rank: Callable[[Member], Any]) -> Choice:
    """The smallest of those that may take it, by name among equals. Whoever takes it reads what the store has."""
    able = prefer_untried([m for m in view.members if obstacle(m, request) is None], request.failed)
    if not able:
        return Choice(member=None, candidates=())
    member = min(able, key=lambda m: (rank(m), m.node.node_id))
    prediction = dataclasses.replace(option(view, request, member).prediction, recompute=False)
    return Choice(member=member, candidates=(), n_candidates=len(view.members), prediction=prediction)


RULES: Final[dict[str, Callable[[], Rule]]] = {
    "predicted": lambda: route,
    "sticky": Sticky,
    "longest prefix": lambda: longest_prefix,
    "least loaded": lambda: least_loaded,
}
"""Each makes a rule that has seen nothing yet."""
