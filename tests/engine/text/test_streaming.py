"""Text leaves as soon as it can: whole characters, and never the beginning of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.errors import InvalidSampling
from kvferry.engine.text.detokenizer import Detokenizer
from kvferry.engine.text.model import TextModel
from kvferry.engine.text.stop import StopWatcher


@given(st.lists(st.integers(0, 49151), max_size=60))
def test_pushed_text_together_is_the_decoded_text(smollm2: TextModel, ids: list[int]) -> None:
    detokenizer = Detokenizer(smollm2)
    for _ in range(2):  # flushed, it is as new
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == smollm2.decode(ids)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
def test_text_of_whole_characters_needs_no_replacement(smollm2: TextModel, text: str) -> None:
    detokenizer = Detokenizer(smollm2)
    pieces = [detokenizer.push(token_id) for token_id in smollm2.encode(text)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_a_character_of_several_tokens_comes_whole(smollm2: TextModel) -> None:
    ids = smollm2.encode("𐍈")
    assert len(ids) > 1
    detokenizer = Detokenizer(smollm2)
    assert [detokenizer.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["𐍈"]
    detokenizer.push(ids[0])
    assert detokenizer.flush() == "\ufffd"


def outcome(stops: list[str], pushes: list[str]) -> tuple[str, bool]:
    watcher = StopWatcher(stops)
    passed = ""
    for push in pushes:
        text, stopped = watcher.push(push)
        passed += text
        if stopped:
            assert watcher.push("more") == ("", True)
            assert watcher.flush() == ""
            return passed, True
    return passed + watcher.flush(), False


@pytest.mark.parametrize(
    ("stops", "pushes", "passed", "stopped"),
    [
        ([], ["a", "b"], "ab", False),
        (["END"], ["one E", "N", "D two"], "one ", True),
        (["END"], ["one E", "N", "X"], "one ENX", False),
        (["END"], ["EEN", "D"], "E", True),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", True),
        (["abc", "b"], ["abc"], "a", True),  # "b" is complete first
        (["bc", "abc"], ["xabc"], "x", True),  # complete together: the longest
        (["aab"], ["aa", "ab"], "a", True),
    ],
)
def test_stop_strings(stops: list[str], pushes: list[str], passed: str, stopped: bool) -> None:
    assert outcome(stops, pushes) == (passed, stopped)


SMALL_TEXTS = st.text(st.sampled_from("abc"), max_size=12)


@given(st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=4), max_size=3), st.lists(SMALL_TEXTS, max_size=6))
def test_how_the_text_is_cut_makes_no_difference(stops: list[str], pushes: list[str]) -> None:
    whole = "".join(pushes)
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    if ends:
        longest = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
        expected = (whole[: ends[0] - len(longest)], True)
    else:
        expected = (whole, False)
    assert outcome(stops, pushes) == outcome(stops, list(whole)) == expected


@given(st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=4), max_size=3), st.lists(SMALL_TEXTS, max_size=6))
def test_no_more_is_held_back_than_could_begin_a_stop_string(stops: list[str], pushes: list[str]) -> None:
    watcher = StopWatcher(stops)
    passed, pushed = "", ""
    for push in pushes:
        text, stopped = watcher.push(push)
        if stopped:
            return
        passed, pushed = passed + text, pushed + push
        held = pushed[len(passed) :]
        assert pushed == passed + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidSampling, match="stop string is empty"):
        StopWatcher(["a", ""])
