"""Who is alive: a function of what was heard and of the time, which is an argument here too."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.coordinator.errors import NodeIdTaken
from kvferry.coordinator.membership import MAX_NODES_REMEMBERED, Load, Membership, Node, NodeState

LEASE_S, TICK_S, STALL_S = 3.0, 0.25, 60.0


def node(node_id: str = "a", boot_id: str = "boot1", **changes: object) -> Node:
    fields = {
        "node_id": node_id,
        "boot_id": boot_id,
        "address": "h:1",
        "model": "m",
        "fingerprint": "fp",
        "context_length": 2048,
    }
    return Node(**{**fields, **changes})


def fleet(*nodes: Node) -> Membership:
    membership = Membership(LEASE_S, TICK_S, STALL_S)
    for n in nodes:
        membership.register(n, 0.0)
    return membership


def beat(
    membership: Membership, now_s: float, node_id: str = "a", boot_id: str = "boot1", *, draining: bool = False
) -> bool:
    return membership.heartbeat(node_id, boot_id, Load(), {}, draining, now_s)


def state(membership: Membership, now_s: float, node_id: str = "a") -> NodeState:
    return next(m.state for m in membership.members(now_s) if m.node.node_id == node_id)


@pytest.mark.parametrize(
    ("silent_s", "expected"),
    [
        (0.0, NodeState.LIVE),
        (1.49, NodeState.LIVE),
        (1.5, NodeState.SUSPECT),
        (2.99, NodeState.SUSPECT),
        (3.0, NodeState.DEAD),
        (99.0, NodeState.DEAD),
    ],
)
def test_silence_makes_suspect_after_half_a_lease_and_dead_after_a_whole_one(
    silent_s: float, expected: NodeState
) -> None:
    membership = fleet(node())
    beat(membership, 10.0)
    assert state(membership, 10.0 + silent_s) is expected
    assert (membership.why_lost("a", "boot1", 10.0 + silent_s) is not None) is (expected is NodeState.DEAD)


def test_a_heartbeat_brings_even_a_dead_node_back() -> None:
    membership = fleet(node())
    assert state(membership, 50.0) is NodeState.DEAD
    assert beat(membership, 50.0)
    assert state(membership, 50.0) is NodeState.LIVE


def test_a_broken_stream_makes_suspect_at_once_until_the_node_is_heard_again() -> None:
    membership = fleet(node())
    membership.stream_broke("a", "boot1")
    assert state(membership, 0.1) is NodeState.SUSPECT
    assert membership.why_lost("a", "boot1", 0.1) is None
    beat(membership, 0.5)
    assert state(membership, 0.5) is NodeState.LIVE


def test_a_node_whose_engine_hangs_is_dead_however_well_it_speaks() -> None:
    membership = fleet(node())
    membership.heartbeat("a", "boot1", Load(stalled_seconds=59.0), {}, False, 1.0)
    assert state(membership, 1.0) is NodeState.LIVE  # slow is not dead
    membership.heartbeat("a", "boot1", Load(stalled_seconds=61.0), {}, False, 2.0)
    assert state(membership, 2.0) is NodeState.DEAD
    lost = membership.why_lost("a", "boot1", 2.0)
    assert lost is not None
    assert lost.detail == "its engine hangs, no step for 61 s"
    membership.heartbeat("a", "boot1", Load(), {}, False, 3.0)
    assert state(membership, 3.0) is NodeState.LIVE


@pytest.mark.parametrize(
    ("limit_s", "stalled_s", "expected"),
    [
        (0.4, 2.4, NodeState.LIVE),  # not sooner than one whose silence is noticed
        (0.4, 2.5, NodeState.DEAD),
        (20.0, 19.0, NodeState.LIVE),
        (20.0, 20.0, NodeState.DEAD),
        (500.0, 60.0, NodeState.DEAD),  # the setting is the last word
    ],
)
def test_a_node_that_knows_its_steps_says_how_long_is_too_long(
    limit_s: float, stalled_s: float, expected: NodeState
) -> None:
    membership = fleet(node())
    load = Load(stalled_seconds=stalled_s, stall_limit_seconds=limit_s)
    membership.heartbeat("a", "boot1", load, {}, False, 1.0)
    assert state(membership, 1.0) is expected


def test_a_draining_node_says_so_itself_and_dies_like_any_other() -> None:
    membership = fleet(node())
    beat(membership, 1.0, draining=True)
    assert state(membership, 1.1) is NodeState.DRAINING
    assert state(membership, 4.0) is NodeState.DEAD


def test_a_heartbeat_of_an_unknown_boot_asks_for_registration() -> None:
    membership = fleet(node())
    assert not beat(membership, 1.0, boot_id="boot2")
    assert not beat(membership, 1.0, node_id="b")


def test_a_new_boot_replaces_the_old_one_whose_turns_are_lost() -> None:
    membership = fleet(node())
    assert membership.register(node(boot_id="boot2"), 1.0) == "boot1"
    assert membership.why_lost("a", "boot1", 1.0) is not None
    assert membership.why_lost("a", "boot2", 1.0) is None
    assert len(membership.members(1.0)) == 1


def test_registering_again_is_no_new_boot() -> None:
    membership = fleet(node())
    assert membership.register(node(), 1.0) is None
    assert membership.why_lost("a", "boot1", 1.0) is None


def test_two_processes_with_one_id_do_not_push_each_other_out_for_ever() -> None:
    membership = fleet(node())
    membership.register(node(boot_id="boot2", address="h:2"), 1.0)
    with pytest.raises(NodeIdTaken, match=r"h:2.*--node-id"):
        membership.register(node(), 2.0)


def test_a_node_that_left_is_forgotten_by_that_boot_only() -> None:
    membership = fleet(node())
    assert not membership.deregister("a", "boot0")
    assert membership.deregister("a", "boot1")
    assert membership.members(1.0) == ()
    assert membership.why_lost("a", "boot1", 1.0) is not None


def test_a_coordinator_that_slept_does_not_take_its_own_sleep_for_the_fleets_silence() -> None:
    membership = fleet(node("a"), node("b"))
    for tick in range(8):
        membership.tick(tick * TICK_S)
        beat(membership, tick * TICK_S)
    membership.tick(60.0)
    assert state(membership, 60.0, "a") is NodeState.LIVE
    assert membership.why_lost("a", "boot1", 60.0) is None
    assert state(membership, 60.0 + LEASE_S) is NodeState.DEAD  # it had its chance


def test_resident_rows_are_known_before_the_next_heartbeat_says_it() -> None:
    membership = fleet(node(resident={"s": 5}))
    membership.note_resident("a", "boot1", "t", 7)
    assert dict(membership.members(0.0)[0].node.resident) == {"s": 5, "t": 7}
    membership.heartbeat("a", "boot1", Load(), {"t": 9}, False, 1.0)
    assert dict(membership.members(1.0)[0].node.resident) == {"t": 9}


def test_the_longest_dead_make_room_when_very_many_are_known() -> None:
    membership = fleet()
    for number in range(MAX_NODES_REMEMBERED):
        membership.register(node(f"n{number:05}"), float(number))
    membership.register(node("new"), 5_000.0)
    known = {m.node.node_id for m in membership.members(5_000.0)}
    assert len(known) == MAX_NODES_REMEMBERED
    assert "new" in known
    assert "n00000" not in known


class AnyHistory(RuleBasedStateMachine):
    """Against a model that only remembers when each boot was heard last."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.membership = Membership(LEASE_S, TICK_S, STALL_S)
        self.heard: dict[str, tuple[str, float]] = {}
        self.boots = 0

    @rule(node_id=st.sampled_from("abc"))
    def start(self, node_id: str) -> None:
        self.boots += 1
        self.membership.register(node(node_id, f"boot{self.boots}"), self.now)
        self.heard[node_id] = (f"boot{self.boots}", self.now)

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        node_id = data.draw(st.sampled_from(sorted(self.heard)))
        assert beat(self.membership, self.now, node_id, self.heard[node_id][0])
        self.heard[node_id] = (self.heard[node_id][0], self.now)

    @rule(seconds=st.sampled_from([0.1, 0.25, 0.5, 0.9]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.membership.tick(self.now)

    @rule(node_id=st.sampled_from("abc"))
    def break_stream(self, node_id: str) -> None:
        if node_id in self.heard:
            self.membership.stream_broke(node_id, self.heard[node_id][0])

    @invariant()
    def nobody_is_lost_before_the_lease_or_live_after_half_of_it(self) -> None:
        states = {m.node.node_id: m.state for m in self.membership.members(self.now)}
        assert set(states) == set(self.heard)
        for node_id, (boot, heard_s) in self.heard.items():
            silent_s = self.now - heard_s
            assert (self.membership.why_lost(node_id, boot, self.now) is not None) == (silent_s >= LEASE_S)
            assert states[node_id] is not NodeState.LIVE or silent_s < LEASE_S / 2


TestAnyHistory = AnyHistory.TestCase
