"""Runs one scenario on one target: steady state, truth, disturbance, healing, verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kvferry.client.errors import ClientError
from kvferry.client.sdk import Client
from kvferry.drills.errors import DrillImpossible
from kvferry.drills.scenarios import COORDINATOR, STORE, Injection, Scenario, Where
from kvferry.drills.stage import Conversation, Stage, hold_undisturbed, requests_of
from kvferry.drills.targets.base import Target
from kvferry.drills.verdict import (
    Figures,
    LimitResult,
    Ruling,
    Seen,
    Strike,
    figures_of,
    hold_to,
    ruling_of,
)
from kvferry.drills.watch import Sight, Watch, is_well

STEADY_S: Final = 60.0
"""For a cluster that was just started, or that the last drill has left, to be whole."""

Say = Callable[[str], None]


@dataclass
class Outcome:
    """All that a report needs. `began_at`: time.monotonic when the disturbed conversations began."""

    scenario: Scenario
    target: str
    started: float
    seed: int = 0
    ruling: Ruling = Ruling.SKIPPED
    reason: str = ""
    began_at: float = 0.0
    seconds: float = 0.0
    n_nodes: int = 0
    ways: dict[str, str] = field(default_factory=dict)
    strikes: list[Strike] = field(default_factory=list)
    sights: list[Sight] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    control: list[Conversation] = field(default_factory=list)
    figures: Figures | None = None
    limits: list[LimitResult] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def why_not(scenario: Scenario, target: Target) -> str | None:
    """The reason why this scenario cannot be done on this target, or None."""
    missing = sorted(scenario.disturbances - set(target.ways))
    if missing:
        return "; ".join(f"{what}: {target.why_not(what)}" for what in missing)
    if len(target.node_ids) < scenario.needs_nodes:
        return f"it needs {scenario.needs_nodes} nodes, there are {len(target.node_ids)}"
    return None


def run_scenario(scenario: Scenario, target: Target, started: float, say: Say) -> Outcome:
    """Everything but making and ending the journal. `started`: seconds since 1970, for the report.

    Raises DrillError when it could not be done; a broken hypothesis is an outcome.
    """
    outcome = Outcome(scenario, target.kind, started, n_nodes=len(target.node_ids))
    reason = why_not(scenario, target)
    if reason is not None:
        outcome.reason = reason
        return outcome
    outcome.ways = {what.value: target.ways[what] for what in sorted(scenario.disturbances)}
    begun = time.monotonic()
    say("starting the cluster")
    try:
        target.start(scenario)
        _disturb(scenario, target, outcome, say)
    finally:
        say("stopping")
        target.stop()
    outcome.seconds = round(time.monotonic() - begun, 1)
    return outcome


def _disturb(scenario: Scenario, target: Target, outcome: Outcome, say: Say) -> None:
    plans = [requests_of(number, scenario.n_turns, target.answer_tokens) for number in range(scenario.n_conversations)]
    with target.connect(scenario.duration_s) as client, target.connect(0) as impatient:
        _wait_until_steady(client, target)
        say(f"steady state: {len(target.node_ids)} nodes live; now the undisturbed answers")
        # of this run: what an earlier one left in memory and in the store would be found again, and nothing restored
        tenant = f"drill-{outcome.started:.0f}"
        outcome.control = [hold_undisturbed(client, plan, f"{tenant}-control", i) for i, plan in enumerate(plans)]
        with Watch(impatient) as watch:
            outcome.began_at = time.monotonic()
            until = outcome.began_at + scenario.duration_s
            stage = Stage(client, plans, tenant)
            outcome.conversations = stage.conversations
            director = _Director(target, stage, say)
            try:
                director.run(scenario, until)
                if not stage.end(until):
                    outcome.findings.append(f"the conversations had not ended after {scenario.duration_s:.0f} s")
                director.heal_rest()
                whole_at = _wait_until_whole(watch, target, scenario.limits.recovery_s)
            finally:
                director.heal_rest()
                outcome.strikes = director.strikes
    outcome.sights = watch.sights
    seen = Seen(
        conversations=outcome.conversations,
        control=outcome.control,
        strikes=outcome.strikes,
        sights=watch.sights,
        bytes_restored=watch.bytes_restored,
        files_refused=watch.files_refused,
        saves_without_room=watch.saves_without_room,
        whole_at=whole_at,
        findings=outcome.findings,
    )
    outcome.figures, outcome.findings = figures_of(seen)
    outcome.limits = hold_to(scenario.limits, outcome.figures)
    outcome.ruling = ruling_of(outcome.limits, outcome.figures, outcome.findings)


class _Director:
    """Strikes when it is time, and heals when it is time, also between two strikes."""

    def __init__(self, target: Target, stage: Stage, say: Say) -> None:
        self.strikes: list[Strike] = []
        self._target = target
        self._stage = stage
        self._say = say
        self._heal_at: dict[int, float] = {}
        self._until_turn: dict[int, int] = {}

    def run(self, scenario: Scenario, until: float) -> None:
        """All injections, then all healings that are due before the conversations end."""
        for number, injection in enumerate(scenario.injections):
            while not self._stage.has_come_to(injection.turn, injection.after_tokens):
                if time.monotonic() > until:
                    raise DrillImpossible("The conversations did not get to where they were to be disturbed.")
                self._stage.wait(0.05)
                self._heal_due()
            self._stage.check_answering(injection.turn, time.monotonic())
            if number == 0:
                self._stage.check_undisturbed()
            self._strike(number, injection)
            self._stage.check_answering(injection.turn, self.strikes[number].at)
        while self._heal_at and time.monotonic() < until:
            self._heal_due()
            time.sleep(0.02)

    def heal_rest(self) -> None:
        """Whatever is not healed yet, due or not."""
        for number in list(self._heal_at):
            self._heal(number)

    def _strike(self, number: int, injection: Injection) -> None:
        parts = self._parts(injection.where)
        self._say(f"{injection.what.value}: {', '.join(parts)} ({self._target.ways[injection.what]})")
        way = self._target.ways[injection.what]
        strike = Strike(time.monotonic(), injection.what, injection.where, parts, way)
        self.strikes.append(strike)  # before it is done: it is healed even if it fails half-way
        self._heal_at[number] = strike.at + injection.hold_s
        if injection.until_turn is not None:
            self._until_turn[number] = injection.until_turn
        self.strikes[number] = replace(strike, at=self._target.inject(number, injection.what, parts))

    def _heal_due(self) -> None:
        now = time.monotonic()
        for number, at in list(self._heal_at.items()):
            turn = self._until_turn.get(number)
            if at <= now or (turn is not None and self._stage.has_come_to(turn, 1)):
                self._heal(number)

    def _heal(self, number: int) -> None:
        strike = self.strikes[number]
        del self._heal_at[number]
        self._say(f"healing {strike.what.value}: {', '.join(strike.parts)}")
        self._target.heal(strike.what, strike.parts)
        self.strikes[number] = replace(strike, healed_at=time.monotonic())

    def _parts(self, where: Where) -> tuple[str, ...]:
        serving = self._stage.serving
        others = sorted(self._target.node_ids - {serving})
        match where:
            case Where.SERVING:
                return (serving,)
            case Where.SERVING_AND_ANOTHER:
                return (serving, others[0])
            case Where.COORDINATOR:
                return (COORDINATOR,)
            case Where.EVERYTHING:
                return (COORDINATOR, serving, *others)
            case Where.STORE:
                return (STORE,)


def _wait_until_steady(client: Client, target: Target) -> None:
    """Raises DrillImpossible when the cluster is not well to begin with: nothing could be learned from it."""
    until = time.monotonic() + STEADY_S
    problem = ""
    while time.monotonic() < until:
        try:
            nodes = {node.node_id: node for node in client.nodes()}
        except ClientError as error:
            problem = str(error)
        else:
            unwell = sorted(id_ for id_ in target.node_ids if id_ not in nodes or not is_well(nodes[id_]))
            if not unwell:
                return
            problem = f"{', '.join(unwell)} not live, or without its store"
        time.sleep(0.1)
    raise DrillImpossible(f"The cluster is not in its steady state: {problem}.")


def _wait_until_whole(watch: Watch, target: Target, seconds: float) -> float | None:
    """When all nodes serve again; None when they do not in time."""
    until = time.monotonic() + seconds
    time.sleep(0.3)  # a look that was taken after the last healing
    while time.monotonic() < until:
        if watch.is_whole(target.node_ids):
            return max((sight.at for sight in watch.sights if sight.is_well), default=time.monotonic())
        time.sleep(0.05)
    return None
