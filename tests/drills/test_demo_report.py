"""The demo's report says what happened, and its exit code says whether the promise was kept."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvferry.client.errors import BrokenSequence
from kvferry.client.sdk import Finished, FinishReason, NodeLost, Placed, PrefixReport, Started, Token
from kvferry.drills import cli
from kvferry.drills.conversation import TurnLog, TurnRequest
from kvferry.drills.demo import DemoResult, Kill, conversation
from kvferry.drills.errors import VerdictFailed
from kvferry.drills.judge import Fault, judge
from kvferry.drills.report import as_json, print_report


def turn_log(token_ids: list[int], *, moved: bool = False) -> TurnLog:
    """A turn as the SDK would tell it; `moved`: from n1 to n2 after the second token."""
    prefix = PrefixReport(9, 4, 3, 2, 0.0, 0.0, 0.0, "", ())
    events = [Started(9, 0), Placed("n1", 1, 0, (), prefix)]
    events += [Token(index, token_id, f"w{token_id} ") for index, token_id in enumerate(token_ids)]
    if moved:
        events[4:4] = [NodeLost("n1", "broken_stream", "", 2), Placed("n2", 2, 2, (), prefix)]
    events.append(Finished(FinishReason.LENGTH, 9, len(token_ids), "", 0.1, 1.0, 0.0, 1 + moved))
    return TurnLog(TurnRequest("hello", 9), [(0.1 * i, event) for i, event in enumerate(events)])


def result(second: list[int]) -> DemoResult:
    control = [turn_log([1, 2, 3]), turn_log([4, 5, 6, 7]), turn_log([8])]
    disturbed = [turn_log([1, 2, 3]), turn_log(second, moved=True), turn_log([8])]
    verdict = judge([log.record for log in disturbed], [log.record for log in control])
    return DemoResult(3, control, disturbed, Kill("n1", 77, 2), verdict)


def printed(demo: DemoResult) -> str:
    out = io.StringIO()
    print_report(demo, Console(file=out, width=160, no_color=True))
    return out.getvalue()


def test_the_report_tells_who_served_where_it_was_killed_and_the_verdict():
    text = printed(result([4, 5, 6, 7]))
    assert "n1 lost: SIGKILL after token 2; broken_stream after 2 tokens" in text
    assert "n2 goes on from token 2" in text
    assert "9: 4 resident, 3 restored, 2 computed" in text
    assert "w4 w5" in text
    assert "tokens lost 0, duplicated 0, differing 0" in text
    assert ": kept\n" in text


@pytest.mark.parametrize("width", [20, 60, 110])
def test_the_last_line_is_the_one_of_the_readme_however_narrow_the_terminal(width):
    out = io.StringIO()
    print_report(result([4, 5, 6, 7]), Console(file=out, width=width, no_color=True))
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    last = out.getvalue().splitlines()[-1]
    assert last == "tokens lost 0, duplicated 0, differing 0"
    assert f"`{last}`" in readme


def test_a_broken_promise_is_said_with_its_place():
    text = printed(result([4, 5, 9, 7]))
    assert "turn 2: token 2 is 9, the control has 6" in text
    assert "tokens lost 0, duplicated 0, differing 1" in text
    assert "BROKEN" in text


def test_a_sequence_that_the_sdk_refused_reaches_the_judge():
    log = turn_log([4, 5, 6, 7])
    log.events = log.events[:4]  # two tokens, then the second once more
    log.broken = BrokenSequence("token 1 came twice", expected=2, received=1)
    verdict = judge([log.record], [turn_log([4, 5, 6, 7]).record])
    assert verdict.count(Fault.DUPLICATED) == 1
    assert verdict.count(Fault.LOST) == 2


@pytest.mark.parametrize(("second", "good"), [([4, 5, 6, 7], True), ([4, 5, 6], False)])
def test_the_command_fails_when_the_verdict_is_bad(monkeypatch, tmp_path, second, good):
    demo = result(second)
    monkeypatch.setattr(cli, "run_demo", lambda options, say: dataclasses.replace(demo, seed=options.seed))
    ran = CliRunner().invoke(cli.drill, ["demo", "--seed", "5", "--json", str(tmp_path / "out.json")])
    assert (ran.exception is None) is good, ran.output
    if not good:
        assert isinstance(ran.exception, VerdictFailed)
        assert ran.exception.exit_code not in {0, 1, 2}
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["seed"], written["verdict"]["good"]) == (5, good)
    assert written == json.loads(json.dumps(as_json(dataclasses.replace(demo, seed=5))))


def test_the_demo_talks_about_a_real_text_of_its_own():
    turns = conversation(seed=1)
    assert 400 < len(turns[0].text.split()) < 600
    assert turns[1].sampling.seed == 1
    assert conversation(seed=2)[0] == turns[0]
