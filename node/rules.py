"""Grammars at work in a node: compiled in a thread, and each mask computed beside the forward pass that needs it.

A mask takes 30 us as a rule and some ms now and then, when a grammar meets text of a new kind: with a lane of their own
such masks hold up no other turn of the batch unless they take longer than the pass itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import EngineError, FormatTooComplex, InvalidFormat
from kvferry.engine.text.grammar import GrammarRule, Grammars, TextSide
from kvferry.node.errors import InvalidRequest

MAX_GRAMMAR_CHARACTERS: Final = 1 << 20


class RuleAhead:
    """A ``token_rule.TokenRule`` that works out its next mask as soon as it knows the token before."""

    def __init__(self, rule: GrammarRule, lane: ThreadPoolExecutor) -> None:
        self._rule = rule
        self._lane = lane
        self._next: Future[NDArray[np.uint32]] = lane.submit(rule.mask)

    def mask(self) -> NDArray[np.uint32]:
        """What may come next; waits for it. Raises FormatTooComplex, and EngineError for a token that was none."""
        return self._next.result()

    def accept(self, token_id: int) -> None:
        """That token came next."""
        self._next = self._lane.submit(self._advance, token_id)

    def _advance(self, token_id: int) -> NDArray[np.uint32]:
        self._rule.accept(token_id)
        return self._rule.mask()


class Rules:
    """Makes the rules of turns. Event loop only."""

    def __init__(self, model: TextSide) -> None:
        self._grammars = Grammars(model)
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="kvferry-grammar")

    async def rule(self, grammar: str, answer_ids: Sequence[int]) -> RuleAhead | None:
        """What a grammar allows after the answer tokens so far; None without a grammar.

        Raises InvalidFormat, FormatTooComplex, and InvalidRequest for answer tokens that the grammar does not allow.
        """
        if not grammar:
            return None
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(f"the grammar has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARACTERS} may be")
        try:
            rule = await asyncio.to_thread(self._grammars.rule, grammar, answer_ids)
        except (InvalidFormat, FormatTooComplex):
            raise
        except EngineError as error:
            raise InvalidRequest(f"the answer's tokens so far do not keep its format: {error}") from error
        return RuleAhead(rule, self._lane)

    def close(self) -> None:
        """Let go of the thread; who waits for a mask gets it."""
        self._lane.shutdown(wait=False)
