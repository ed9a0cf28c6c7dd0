"""Figures and verdicts, from what clients could have seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.client.sdk import Finished, FinishReason, NodeLost, NodeState, Placed, Token
from kvferry.drills.conversation import TurnLog, TurnRequest
from kvferry.drills.drill_report import as_html, as_json, as_text, write_report
from kvferry.drills.runner import Outcome
from kvferry.drills.scenarios import SCENARIOS, Disturbance, Limits, Where
from kvferry.drills.stage import Conversation, Heard
from kvferry.drills.verdict import Figures, Ruling, Seen, Strike, figures_of, hold_to, ruling_of
from kvferry.drills.watch import Sight

N_TOKENS = 6
REQUEST = TurnRequest("Hello", N_TOKENS)


def conversation(
    token_ids: list[int],
    times: list[float] | None = None,
    lost_at: float | None = None,
    indexes: list[int] | None = None,
) -> Conversation:
    """One turn, asked at 100.0; a token each 0.1 s unless told otherwise."""
    times = times or [100.1 + 0.1 * i for i in range(len(token_ids))]
    events: list[tuple[float, object]] = [(100.0, Placed("node-1", 1, 0, (), None))]
    if lost_at is not None:
        events.append((lost_at, NodeLost("node-1", "lease_expired", "", 3)))
    order = indexes if indexes is not None else list(range(len(token_ids)))
    events += [(at, Token(index, id_, "x")) for at, index, id_ in zip(times, order, token_ids, strict=True)]
    events.append((times[-1], Finished(FinishReason.LENGTH, 9, N_TOKENS, "", 0.1, 1.0, 0.1, 1)))
    events.sort(key=lambda pair: pair[0])
    log = TurnLog(REQUEST, [(at - 100.0, event) for at, event in events])  # type: ignore[misc]
    heard = [Heard(100.0, 1, None), *(Heard(at, 1, event) for at, event in events)]  # type: ignore[arg-type]
    return Conversation(0, [REQUEST], heard, {1: log}, turn=1)


TRUTH = list(range(10, 10 + N_TOKENS))
FREEZE = Strike(100.3, Disturbance.FREEZE, Where.SERVING, ("node-1",), "SIGSTOP", healed_at=108.0)


def seen(got: Conversation, *sights: Sight, whole_at: float | None = 109.5) -> Seen:
    return Seen([got], [conversation(TRUTH)], [FREEZE], sights, 4096, 0, whole_at)


def test_a_pause_without_a_wrong_token_holds() -> None:
    got = conversation(TRUTH, [100.1, 100.2, 100.3, 103.4, 103.5, 103.6], lost_at=103.1)
    figures, sentences = figures_of(seen(got))
    assert sentences == []
    assert figures.longest_pause_s == pytest.approx(3.1)
    assert figures.detection_s == pytest.approx(2.8)
    assert figures.recovery_s == pytest.approx(1.5)
    assert (figures.failovers, figures.bytes_restored, figures.tokens_compared) == (1, 4096, N_TOKENS)
    results = hold_to(SCENARIOS["freeze"].limits, figures)
    assert ruling_of(results, figures, sentences) is Ruling.HELD


def test_what_no_client_had_to_be_told_counts_from_the_coordinators_list() -> None:
    before, after = (Sight(at, "node-1", NodeState.SUSPECT, True) for at in (100.2, 102.3))
    figures, _ = figures_of(seen(conversation(TRUTH), before, after))
    assert figures.detection_s == pytest.approx(2.0)  # what was so before the strike does not count
    lost = conversation(TRUTH, [100.1, 100.2, 100.3, 104.4, 104.5, 104.6], lost_at=104.3)
    assert figures_of(seen(lost, after))[0].detection_s == pytest.approx(4.0)  # suspected is not left


def test_a_store_is_noticed_when_a_node_says_so() -> None:
    hung = Strike(100.3, Disturbance.STORE_HUNG, Where.STORE, ("store",), "SIGSTOP", healed_at=108.0)
    sights = [Sight(101.0, "node-2", NodeState.SUSPECT, True), Sight(104.3, "node-1", NodeState.LIVE, False)]
    told = Seen([conversation(TRUTH)], [conversation(TRUTH)], [hung], sights, 0, 0, 109.0)
    assert figures_of(told)[0].detection_s == pytest.approx(4.0)


def test_what_was_never_seen_breaks_its_limit() -> None:
    figures, sentences = figures_of(seen(conversation(TRUTH), whole_at=None))
    assert (figures.detection_s, figures.recovery_s) == (None, None)
    broken = {result.name for result in hold_to(SCENARIOS["freeze"].limits, figures) if not result.held}
    assert broken == {"detection at most", "recovery at most", "failovers at least"}
    assert ruling_of(hold_to(SCENARIOS["freeze"].limits, figures), figures, sentences) is Ruling.BROKEN


def test_a_store_that_was_full_but_refused_no_save_proves_nothing() -> None:
    figures, _ = figures_of(seen(conversation(TRUTH, lost_at=100.35)))
    assert {r.name for r in hold_to(SCENARIOS["store-full"].limits, figures) if not r.held} == {
        "saves without room at least"
    }
    refused = replace(figures, saves_without_room=1)
    assert all(result.held for result in hold_to(SCENARIOS["store-full"].limits, refused))


@given(st.permutations(range(N_TOKENS)), st.sets(st.integers(0, N_TOKENS - 1)), st.sets(st.integers(0, N_TOKENS - 1)))
def test_every_lost_doubled_and_differing_token_is_counted(order: list[int], lost: set[int], other: set[int]) -> None:
    came = [index for index in range(N_TOKENS) if index not in lost] or [0]
    lost = set(range(N_TOKENS)) - set(came)
    ids = [TRUTH[index] + (100 if index in other else 0) for index in came]
    figures, sentences = figures_of(seen(conversation(ids, indexes=came)))
    assert figures.tokens_lost == len(lost)
    assert figures.tokens_differing == len(other & set(came))
    results = hold_to(Limits(longest_pause_s=10), figures)
    assert (ruling_of(results, figures, sentences) is Ruling.HELD) == (not lost and not other & set(came))


def test_a_failed_conversation_is_no_good_news_even_if_all_tokens_came() -> None:
    got = conversation(TRUTH)
    got.error = "no node left"
    figures, sentences = figures_of(seen(got))
    assert any("no node left" in sentence for sentence in sentences)
    assert ruling_of(hold_to(Limits(longest_pause_s=10), figures), figures, sentences) is Ruling.BROKEN


def outcome() -> Outcome:
    got = conversation(TRUTH, [100.1, 100.2, 100.3, 103.4, 103.5, 103.6], lost_at=103.1)
    told = Outcome(SCENARIOS["freeze"], "local", 1.7e9, began_at=100.0, n_nodes=3, ways={"freeze": "SIGSTOP <&>"})
    told.conversations, told.control, told.strikes = [got], [conversation(TRUTH)], [FREEZE]
    told.sights = [Sight(100.0, "node-1", NodeState.LIVE, True), Sight(103.0, "node-1", NodeState.DEAD, True)]
    told.figures, told.findings = figures_of(seen(got, *told.sights))
    told.limits = hold_to(told.scenario.limits, told.figures)
    told.ruling = ruling_of(told.limits, told.figures, told.findings)
    return told


def test_a_report_has_all_that_its_schema_names(tmp_path: Path) -> None:
    place = write_report(outcome(), tmp_path, ["a process"])
    told = json.loads((place / "report.json").read_text())
    documented = (Path(__file__).parents[2] / "docs/drills.md").read_text()
    for name in (*told, *told["figures"], *told["limits"][0], *told["timeline"][0]):
        assert f"`{name.removesuffix('[]')}`" in documented or f"`{name}[]`" in documented, name
    assert told["verdict"] == "held"
    assert told["left_behind"] == ["a process"]
    assert [moment["at_s"] for moment in told["timeline"]] == sorted(moment["at_s"] for moment in told["timeline"])
    assert {moment["kind"] for moment in told["timeline"]} >= {"strike", "heal", "lost", "node", "finished"}
    assert set(told["figures"]) == set(Figures.__dataclass_fields__)


def test_a_page_has_a_picture_with_every_token_and_nothing_from_elsewhere() -> None:
    page = as_html(outcome())
    picture = page[page.index("<svg") : page.index("</svg>")]
    assert picture.count('v16"') == N_TOKENS
    assert "node-1" in picture
    assert "SIGSTOP &lt;&amp;&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "held" in as_text(outcome()).splitlines()[0]


def test_a_skipped_drill_says_why() -> None:
    told = Outcome(SCENARIOS["cut"], "local", 1.7e9, reason="there are no cables")
    assert as_json(told, [])["verdict"] == "skipped"
    assert "there are no cables" in as_text(told)
    assert "there are no cables" in as_html(told)


def test_a_store_rots_for_longer_than_its_node_is_away() -> None:
    """What is put right before somebody reads it proves nothing."""
    rot, kill = SCENARIOS["store-rotten"].injections
    assert rot.hold_s > kill.hold_s


def test_every_scenario_can_be_judged() -> None:
    for name, scenario in SCENARIOS.items():
        assert name == scenario.name
        assert scenario.injections
        assert all(injection.turn <= scenario.n_turns for injection in scenario.injections)
        assert scenario.limits.longest_pause_s < scenario.duration_s
