"""Promise 23: the longest common prefix is exact, whatever was added and removed before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.store.geometry import TokenIds
from kvferry.store.lcp_index import Found, LcpIndex, common_prefix

# Few different tokens, so that prefixes are shared often.
sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def _array(tokens: list[int]) -> TokenIds:
    return np.array(tokens, np.int32)


def _brute_force(known: dict[str, list[int]], query: list[int]) -> Found | None:
    best = None
    for key, tokens in known.items():
        n_common = next(
            (i for i, (a, b) in enumerate(zip(tokens, query, strict=False)) if a != b), min(len(tokens), len(query))
        )
        if n_common and (best is None or (-n_common, len(tokens), key) < (-best.n_common, best.n_tokens, best.key)):
            best = Found(n_common, len(tokens), key)
    return best


class IndexMachine(RuleBasedStateMachine):
    """The index against a dictionary and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.index = LcpIndex()
        self.known: dict[str, list[int]] = {}

    @rule(key=st.sampled_from("abcdefgh"), tokens=sequences)
    def add(self, key: str, tokens: list[int]) -> None:
        self.index.add(key, _array(tokens))
        self.known[key] = tokens

    @rule(key=st.sampled_from("abcdefgh"))
    def remove(self, key: str) -> None:
        assert self.index.remove(key) == (self.known.pop(key, None) is not None)

    @rule(query=sequences)
    def find(self, query: list[int]) -> None:
        assert self.index.find(_array(query)) == _brute_force(self.known, query)

    @invariant()
    def holds_exactly_what_was_added(self) -> None:
        assert len(self.index) == len(self.known)
        assert set(self.index) == set(self.known)
        for key, tokens in self.known.items():
            assert self.index.token_ids(key).tolist() == tokens
            assert self.index.n_tokens(key) == len(tokens)
            assert self.index.find(_array(tokens)) == _brute_force(self.known, tokens)

    @invariant()
    def tells_which_sequences_share_which_run(self) -> None:
        runs = self.index.runs(1000)
        for run in runs:
            prefix = self.known[run.key][: run.end]
            assert run.start == (run.parent.end if run.parent else 0) < run.end
            assert run.n_below == sum(tokens[: run.end] == prefix for tokens in self.known.values())
            assert sorted(run.keys) == sorted(key for key, tokens in self.known.items() if tokens == prefix)
            below = self.index.runs(1000, (run.key, run.end))
            assert run.n_children == sum(other.start == run.end for other in below)
        assert sorted(key for run in runs for key in run.keys) == sorted(self.known)
        assert self.index.runs(2) == runs[:2]


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


@given(
    st.dictionaries(st.text("xyz", min_size=1, max_size=3), sequences, max_size=20), st.lists(sequences, max_size=20)
)
def test_equals_brute_force(known: dict[str, list[int]], queries: list[list[int]]) -> None:
    index = LcpIndex()
    for key, tokens in known.items():
        index.add(key, _array(tokens))
    for query in queries:
        assert index.find(_array(query)) == _brute_force(known, query)


def test_an_emptied_index_keeps_nothing() -> None:
    index = LcpIndex()
    generator = np.random.default_rng(7)
    for key in range(200):
        index.add(str(key), generator.integers(0, 3, 50, np.int32))
    for key in range(200):
        assert index.remove(str(key))
    assert len(index) == 0
    assert not index._root.children
    assert index.find(_array([0, 1, 2])) is None


def test_the_index_keeps_a_copy_of_the_ids() -> None:
    index = LcpIndex()
    ids = _array([5, 6, 7])
    index.add("a", ids)
    ids[:] = 0
    assert index.find(_array([5, 6, 9])) == Found(2, 3, "a")


def test_a_conversation_of_many_turns_costs_its_tokens_once() -> None:
    index = LcpIndex()
    talk = np.arange(8192, dtype=np.int32)
    for n in range(64, 8193, 64):
        index.add(f"turn {n}", talk[:n])
    node, n_held = index._root, 0
    while node.children:
        (node,) = node.children.values()
        n_held += len(node.tokens)
    assert n_held == 8192


@pytest.mark.parametrize("n_random", [100_000])
def test_many_random_sets_against_brute_force(n_random: int) -> None:
    """100,000 queries, 200 sets of up to 40 sequences each with shared prefixes, in numpy for speed."""
    generator = np.random.default_rng(23)
    for _ in range(200):
        n_sequences = int(generator.integers(1, 40))
        known = {
            f"{i:02}": generator.integers(0, 2, int(generator.integers(1, 20)), np.int32) for i in range(n_sequences)
        }
        index = LcpIndex()
        for key, tokens in known.items():
            index.add(key, tokens)
        order = sorted(known, key=lambda key: (len(known[key]), key))
        padded = np.full((n_sequences, 24), -1, np.int32)
        for row, key in enumerate(order):
            padded[row, : len(known[key])] = known[key]
        for _ in range(n_random // 200):
            query = generator.integers(0, 2, int(generator.integers(1, 24)), np.int32)
            common = np.cumprod(padded[:, : len(query)] == query, axis=1).sum(axis=1)
            best = int(common.argmax())  # the first of the longest: the shortest, then by name
            found = index.find(query)
            if common[best] == 0:
                assert found is None
            else:
                assert found == Found(int(common[best]), len(known[order[best]]), order[best])


@given(sequences, sequences)
def test_common_prefix_is_the_one_of_a_loop(left: list[int], right: list[int]) -> None:
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    assert common_prefix(_array(left), _array(right)) == n
