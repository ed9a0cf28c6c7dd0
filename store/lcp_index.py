"""Token-exact longest common prefix over a set of token sequences, as a radix tree. Pure: no files, no hashes, no
clock.

A query walks from the root, comparing token ids with token ids, so an answer is never a guess: no hash takes part
that could collide. Sequences that share a prefix share the tree's edges, so the turns of one conversation cost its
tokens once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvferry.store.geometry import TokenIds

_NO_TOKENS: Final[TokenIds] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A sequence that shares n_common leading tokens with the query; n_tokens is its own length."""

    n_common: int
    n_tokens: int
    key: str


@dataclass(frozen=True, slots=True)
class Run:
    """A run of tokens without a fork or an end inside, which n_below sequences have at [start, end).

    ``key`` and ``end`` name it: the shortest of those sequences. ``keys`` are those that end with it.
    """

    key: str
    start: int
    end: int
    parent: Run | None
    n_below: int
    n_children: int
    keys: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """The end of an edge. ``tokens`` label the edge that leads here; ``depth`` counts the tokens from the root to
    here."""

    tokens: TokenIds
    depth: int
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    keys: tuple[str, ...] = ()  # the sequences that end here: one, as a rule, and a set for it costs 200 bytes
    n_below: int = 0  # sequences that end here or below
    best: tuple[int, str] | None = (
        None  # (n_tokens, key) of the shortest sequence at or below, the smallest key among equals
    )

    def work_out_best(self) -> tuple[int, str] | None:
        """``best`` from the node's own sequences and its children's."""
        own = [(self.depth, min(self.keys))] if self.keys else []
        below = (child.best for child in self.children.values() if child.best is not None)
        return min([*own, *below], default=None)


class LcpIndex:
    """A set of token sequences with names, asked for the one that shares the longest prefix with a query.

    Not thread-safe; whoever owns it brings the lock. Time of a query: its length in numpy compares, plus one step per
    fork on its way.
    """

    def __init__(self) -> None:
        self._root = _Node(_NO_TOKENS, 0, None)
        self._ends: dict[str, _Node] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: object) -> bool:
        return key in self._ends

    def __iter__(self) -> Iterator[str]:
        return iter(self._ends)

    def n_tokens(self, key: str) -> int:
        """Length of a sequence. Raises KeyError."""
        return self._ends[key].depth

    def token_ids(self, key: str) -> TokenIds:
        """A sequence, int32 [n]. Raises KeyError."""
        pieces = []
        node: _Node | None = self._ends[key]
        while node is not None:
            pieces.append(node.tokens)
            node = node.parent
        return np.concatenate(pieces[::-1])

    def add(self, key: str, token_ids: TokenIds) -> None:
        """Adds a sequence, int32 [n]; the array is copied. Replaces the one of the same name."""
        self.remove(key)
        node, n_matched = self._descend(token_ids)
        if n_matched < node.depth:
            node = self._split(node, n_matched)
        if n_matched < len(token_ids):
            node = self._attach(node, np.array(token_ids[n_matched:], np.int32))
        node.keys = (*node.keys, key)
        self._ends[key] = node
        self._count_upward(node, 1)
        self._offer_upward(node, (node.depth, key))

    def remove(self, key: str) -> bool:
        """Forgets a sequence; says whether it was known."""
        node = self._ends.pop(key, None)
        if node is None:
            return False
        node.keys = tuple(other for other in node.keys if other != key)
        self._count_upward(node, -1)
        self._withdraw_upward(self._prune(node), key)
        return True

    def find(self, token_ids: TokenIds) -> Found | None:
        """The sequence with the longest common prefix; among equals the shortest, then the first by name. None when
        no token is shared."""
        node, n_matched = self._descend(token_ids)
        if n_matched == 0 or node.best is None:
            return None
        n_tokens, key = node.best
        return Found(n_matched, n_tokens, key)

    def runs(self, limit: int, below: tuple[str, int] | None = None) -> list[Run]:
        """The tree without its tokens, level by level from the root, at most ``limit`` runs.

        ``below``: only what continues the run with this key and end. Raises KeyError when it is not there any more.
        """
        level: list[tuple[_Node, Run | None]] = [(self._root if below is None else self._run_of(*below), None)]
        found: list[Run] = []
        for node, parent in level:
            for child in node.children.values():
                if len(found) == limit:
                    return found
                assert child.best is not None  # noqa: S101 -- only the root may have nothing below it
                run = Run(
                    child.best[1], node.depth, child.depth, parent, child.n_below, len(child.children), child.keys
                )
                found.append(run)
                level.append((child, run))
        return found

    def _run_of(self, key: str, end: int) -> _Node:
        node: _Node | None = self._ends[key]
        while node is not None and node.depth > end:
            node = node.parent
        if node is None or node.depth != end:
            raise KeyError(key)
        return node

    def _descend(self, token_ids: TokenIds) -> tuple[_Node, int]:
        """The last node on the query's way, and how many tokens match; fewer than its depth when the way ends inside
        its edge."""
        node, n_matched, n_query = self._root, 0, len(token_ids)
        ids = token_ids.data  # gives Python integers, at half the cost of numpy's
        while n_matched < n_query:
            child = node.children.get(ids[n_matched])
            if child is None:
                break
            node = child
            if node.depth - n_matched == 1:  # a run of single tokens must not pay for a numpy call each
                n_matched += 1
                continue
            n_matched += common_prefix(node.tokens, token_ids[n_matched:])
            if n_matched < node.depth:
                break
        return node, n_matched

    @staticmethod
    def _split(node: _Node, depth: int) -> _Node:
        """Cuts the edge to ``node`` at ``depth`` tokens from the root; returns the new node in between."""
        parent = node.parent
        assert parent is not None  # noqa: S101 -- only the root has none, and the root has no edge to cut
        n_upper = depth - parent.depth
        upper = _Node(node.tokens[:n_upper], depth, parent, n_below=node.n_below, best=node.best)
        parent.children[int(node.tokens[0])] = upper
        node.tokens = node.tokens[n_upper:]
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    @staticmethod
    def _attach(parent: _Node, tokens: TokenIds) -> _Node:
        leaf = _Node(tokens, parent.depth + len(tokens), parent)
        parent.children[int(tokens[0])] = leaf
        return leaf

    @staticmethod
    def _prune(node: _Node) -> _Node:
        """Takes away nodes that neither end a sequence nor fork; returns the lowest one left on the way up."""
        while node.parent is not None and not node.keys and not node.children:
            del node.parent.children[int(node.tokens[0])]
            node = node.parent
        if node.parent is not None and not node.keys and len(node.children) == 1:
            (child,) = node.children.values()
            child.tokens = np.concatenate((node.tokens, child.tokens))
            child.parent = node.parent
            node.parent.children[int(child.tokens[0])] = child
            node = child
        return node

    @staticmethod
    def _count_upward(node: _Node | None, change: int) -> None:
        while node is not None:
            node.n_below += change
            node = node.parent

    def _offer_upward(self, node: _Node, candidate: tuple[int, str]) -> None:
        """A new sequence is the best of every node above it until one knows a shorter. The root's best is never asked
        for."""
        while node is not self._root and (node.best is None or candidate < node.best):
            node.best = candidate
            assert node.parent is not None  # noqa: S101 -- only the root has none
            node = node.parent

    def _withdraw_upward(self, node: _Node, key: str) -> None:
        """A forgotten sequence is replaced wherever it was the best, from the lowest node left upward."""
        while node is not self._root:
            if node.best is not None and node.best[1] == key:
                node.best = node.work_out_best()
            assert node.parent is not None  # noqa: S101 -- only the root has none
            node = node.parent


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """How many leading tokens two sequences share, compared one by one."""
    n_both = min(len(left), len(right))
    differs = left[:n_both] != right[:n_both]
    first = int(differs.argmax()) if n_both else 0
    return first if n_both and differs[first] else n_both
