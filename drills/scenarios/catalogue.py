"""All scenarios. Limits on detection are those of promise 18 for a lease of 3 s; pauses add a restore, and starting
processes where a scenario needs that, on a slow machine that does other work as well."""

from __future__ import annotations

from typing import Final

from kvferry.drills.scenarios.model import Disturbance, Injection, Limits, Scenario, Where

LEASE_DETECTION_S: Final = 3.5
"""A node that is silent: a lease of 3 s, and half a second to act."""

CLOSED_DETECTION_S: Final = 0.5
"""A node whose connections are closed under it."""

STALL_DETECTION_S: Final = 8.0
"""Of a store that hangs: its first call that does not return for 4 s, which may come as late as the answer's end."""

RESUME_S: Final = 6.0
"""To restore or compute a conversation of the drill elsewhere."""

START_S: Final = 45.0
"""Until processes that start together serve: kernels loaded, model read, registered."""


def _in_second_answer(what: Disturbance, where: Where, hold_s: float) -> Injection:
    return Injection(what=what, where=where, turn=2, after_tokens=12, hold_s=hold_s)


def _lost_node(name: str, hypothesis: str, proves: str, injection: Injection, detection_s: float) -> Scenario:
    limits = Limits(detection_s=detection_s, longest_pause_s=detection_s + RESUME_S, failovers_at_least=1)
    return Scenario(name=name, hypothesis=hypothesis, proves=proves, injections=(injection,), limits=limits)


_ALL: Final = (
    _lost_node(
        "kill",
        "A node that is killed in mid-answer costs a pause; the answer goes on elsewhere, bit for bit.",
        "Failover with restored rows, and that a closed connection is noticed at once.",
        _in_second_answer(Disturbance.KILL, Where.SERVING, 2.0),
        CLOSED_DETECTION_S,
    ),
    _lost_node(
        "freeze",
        "A node that freezes is left when its lease ends, and does no harm when it thaws.",
        "Leases and epochs: nobody closes a connection, so only silence tells.",
        _in_second_answer(Disturbance.FREEZE, Where.SERVING, 8.0),
        LEASE_DETECTION_S,
    ),
    _lost_node(
        "cut",
        "A node whose cable is pulled is left when its lease ends, and joins again when it is plugged in.",
        "Detection without any packet: neither an end nor a reset of a connection arrives.",
        _in_second_answer(Disturbance.CUT, Where.SERVING, 8.0),
        LEASE_DETECTION_S,
    ),
    _lost_node(
        "cut-one-way",
        "A node that hears but is not heard is left when its lease ends.",
        "The lease is judged by what arrives, not by whether something can be sent.",
        _in_second_answer(Disturbance.CUT_OUTGOING, Where.SERVING, 8.0),
        LEASE_DETECTION_S,
    ),
    Scenario(
        name="slow-link",
        hypothesis="A slow cable makes tokens late; it moves no turn and changes none.",
        proves="Late is not dead: heartbeats get through a narrow link beside tokens.",
        injections=(_in_second_answer(Disturbance.SLOW_LINK, Where.SERVING, 8.0),),
        limits=Limits(longest_pause_s=10.0, failovers_at_most=0),
    ),
    Scenario(
        name="store-hung",
        hypothesis="A store that hangs is noticed, delays no token, and a node that needs it computes instead.",
        proves="No engine waits for the store: first nothing pauses, then a failover does without restoring.",
        injections=(
            _in_second_answer(Disturbance.STORE_HUNG, Where.STORE, 12.0),
            Injection(what=Disturbance.KILL, where=Where.SERVING, turn=3, after_tokens=12, hold_s=14.0),
        ),
        limits=Limits(detection_s=STALL_DETECTION_S, longest_pause_s=14.0, failovers_at_least=1),
    ),
    Scenario(
        name="store-full",
        hypothesis="A full store fails no turn; what could not be saved is computed again.",
        proves="A failed save is not a failed answer, also when the node is killed afterwards.",
        injections=(
            Injection(  # until the third: a node says that it can save again when it has saved
                what=Disturbance.STORE_FULL, where=Where.STORE, turn=1, after_tokens=1, hold_s=60.0, until_turn=3
            ),
            _in_second_answer(Disturbance.KILL, Where.SERVING, 2.0),
        ),
        limits=Limits(longest_pause_s=12.0, failovers_at_least=1, failed_saves_at_least=1),
    ),
    Scenario(
        name="store-rotten",
        hypothesis="Snapshots with flipped bits are refused and computed again; no token is made of them.",
        proves="Every byte that is restored was checked.",
        injections=(
            _in_second_answer(
                Disturbance.STORE_ROTTEN, Where.STORE, RESUME_S
            ),  # put right by boards: not before it is read
            Injection(what=Disturbance.KILL, where=Where.SERVING, turn=2, after_tokens=13, hold_s=2.0),
        ),
        limits=Limits(longest_pause_s=12.0, failovers_at_least=1, refused_files_at_least=1),
    ),
    Scenario(
        name="clock-jump",
        hypothesis="Clocks that jump by an hour, against each other, disturb nobody.",
        proves="Leases, deadlines and pauses are measured by clocks that do not jump.",
        injections=(
            _in_second_answer(Disturbance.CLOCK_FORWARD, Where.SERVING, 6.0),
            Injection(what=Disturbance.CLOCK_BACK, where=Where.COORDINATOR, turn=2, after_tokens=16, hold_s=6.0),
        ),
        limits=Limits(longest_pause_s=5.0, failovers_at_most=0),
    ),
    Scenario(
        name="coordinator-loss",
        hypothesis="A coordinator that is killed costs a pause; clients ask again from the next token and get it.",
        proves="The turn's record is durable before its first token, and answers are regenerated exactly.",
        injections=(_in_second_answer(Disturbance.KILL, Where.COORDINATOR, 1.0),),
        limits=Limits(detection_s=CLOSED_DETECTION_S, longest_pause_s=15.0),
    ),
    _lost_node(
        "power-cut",
        "A board without power is left when its lease ends, and comes back by itself when the power does.",
        "As cut, and nothing of the board is there any more when it starts again.",
        _in_second_answer(Disturbance.POWER_CUT, Where.SERVING, 6.0),
        LEASE_DETECTION_S,
    ),
    Scenario(
        name="two-at-once",
        hypothesis="Two nodes that are killed at the same instant cost no more than one.",
        proves="A failover does not depend on the node that was second best.",
        injections=(_in_second_answer(Disturbance.KILL, Where.SERVING_AND_ANOTHER, 2.0),),
        limits=Limits(
            detection_s=CLOSED_DETECTION_S, longest_pause_s=CLOSED_DETECTION_S + 2 * RESUME_S, failovers_at_least=1
        ),
        n_conversations=3,
        needs_nodes=3,
    ),
    Scenario(
        name="thundering-herd",
        hypothesis="After a power cut of everything all conversations come back at once, and each goes on.",
        proves="Sessions survive in the registry and the store alone; nodes are not flooded when all ask together.",
        injections=(_in_second_answer(Disturbance.KILL, Where.EVERYTHING, 1.0),),
        limits=Limits(longest_pause_s=START_S + 2 * RESUME_S, recovery_s=START_S),
        n_conversations=8,
        n_turns=2,
        duration_s=240.0,
    ),
)

SCENARIOS: Final = {scenario.name: scenario for scenario in _ALL}
