"""Following a grammar token by token: which tokens may come next, as a bit mask over the vocabulary.

The parser is llguidance's; it is loaded when a grammar is used for the first time. Its limits count steps, not seconds,
so a grammar is too complex on every machine or on none.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.errors import EngineError, FormatTooComplex, InvalidFormat

REMEMBERED_GRAMMARS: Final = 256
"""Those that were found good; a program asks for the same few over and over."""

# llguidance's own limits are for servers with many cores. With these a mask of a hostile expression takes 20 ms at most
# on a slow one, and its first, which may take most of what a grammar costs, 0.1 s.
_LIMITS: Final[dict[str, Any]] = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000}

_TOO_COMPLEX: Final = ("too many", "too large", "too complex", "too big", "fuel", "limit", "max is")
_DEAD_END: Final = "NoExtensionBias"


class TextSide(Protocol):
    """What grammars need of a TextModel."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_token_ids(self) -> tuple[int, ...]: ...

    @property
    def literal_ids(self) -> tuple[int, ...]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str) -> list[int]: ...


class GrammarRule:
    """A ``token_rule.TokenRule``: what a grammar allows after the answer tokens so far.

    End tokens are allowed when the grammar accepts the answer, and are all that is left when nothing can follow. Not
    for several threads at once.
    """

    def __init__(self, matcher: Any, n_words: int) -> None:
        """``matcher``: llguidance's, owned from now on. ``n_words``: of the mask."""
        self._matcher = matcher
        self._mask = np.zeros(n_words, np.uint32)

    def mask(self) -> NDArray[np.uint32]:
        """One bit for each token that may come next, uint32 [n_words]; good until the next call.

        Raises FormatTooComplex, and InvalidFormat when no text at all is of the form.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        return self._mask

    def accept(self, token_id: int) -> None:
        """That token came next. Raises EngineError when the grammar does not allow it, FormatTooComplex."""
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def accepts(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        reason = _reason(self._matcher.get_error())
        if reason == _DEAD_END:
            raise InvalidFormat("the answer's format cannot be met: no text is of that form")
        if _is_too_complex(reason):
            raise FormatTooComplex(f"the answer's format is too complex to follow: {reason}")
        raise EngineError(f"a token does not fit the answer's format: {reason}")


class Grammars:
    """Compiles grammars for one model. Any thread may call; compiling lets go of the interpreter lock."""

    def __init__(self, model: TextSide) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._known_good: OrderedDict[str, None] = OrderedDict()  # the least recently used first

    def check(self, grammar: str) -> None:
        """Raises InvalidFormat or FormatTooComplex for a grammar that cannot be followed, or not even by one token."""
        if grammar not in self._known_good:
            rule = self.rule(grammar)
            allowed = np.unpackbits(rule.mask().view(np.uint8), bitorder="little")
            rule.accept(int(allowed.argmax()))  # what the mask cost too much of shows only now
        with self._lock:
            self._known_good[grammar] = None
            self._known_good.move_to_end(grammar)
            while len(self._known_good) > REMEMBERED_GRAMMARS:
                self._known_good.popitem(last=False)

    def rule(self, grammar: str, answer_ids: Sequence[int] = ()) -> GrammarRule:
        """A rule that has been told the answer tokens so far.

        Raises InvalidFormat, FormatTooComplex, and EngineError when the tokens are none that the grammar allows.
        """
        # Compiled anew for each answer: copies of one matcher share what counts towards its limits, and what is too
        # complex would depend on the answers before.
        matcher = _compile(self._loaded_tokenizer(), grammar)
        rule = GrammarRule(matcher, -(-self._model.vocab_size // 32))
        for token_id in answer_ids:
            rule.mask()  # as it was done when the token was drawn, so that what is too complex here was so there
            rule.accept(int(token_id))
        return rule

    def _loaded_tokenizer(self) -> Any:
        """llguidance's view of the vocabulary; takes most of a second for 150,000 tokens."""
        with self._lock:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                ends = list(self._model.end_token_ids)
                if not ends:
                    raise InvalidFormat(
                        "this model has no end token, so no answer of it could end when its format is met"
                    )
                vocabulary: Any = _Vocabulary(self._model)
                self._tokenizer = LLTokenizer(vocabulary, n_vocab=self._model.vocab_size, eos_token=ends)
            return self._tokenizer


class _Vocabulary:
    """What llguidance asks of a tokenizer that is not one of its own kinds."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, model: TextSide) -> None:
        self._model = model
        self.eos_token_id = model.end_token_ids[0]
        self.tokens = [model.token_bytes(i) for i in range(model.vocab_size)]
        self.special_token_ids = list(model.literal_ids)
        literals = sorted((re.escape(self.tokens[i].decode("utf-8", "replace")) for i in model.literal_ids), key=len)
        self._literal = re.compile("|".join(literal for literal in reversed(literals) if literal) or r"(?!)")

    def __call__(self, text: str | bytes) -> list[int]:
        """Text that a grammar asks for stands for itself, never for a control token that is spelled alike."""
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        cuts = [0, *(match.start() + 1 for match in self._literal.finditer(text)), len(text)]
        return [token for start, stop in pairwise(cuts) for token in self._model.encode(text[start:stop])]


def _compile(tokenizer: Any, grammar: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, **_LIMITS))
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        if _is_too_complex(reason):
            raise FormatTooComplex(f"the answer's format is too complex: {reason}")
        raise InvalidFormat(f"the answer's format cannot be used: {reason}")
    return matcher


def _reason(error: str) -> str:
    """llguidance's report in one line, without the place in a grammar that nobody wrote by hand."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["unknown"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    if reason.startswith("at ") and ": " in reason:
        reason = reason.split(": ", 1)[1]
    reason = reason.removeprefix("failed to compile JSON schema: ")
    return reason if len(reason) <= 300 else f"{reason[:300]}..."


def _is_too_complex(reason: str) -> bool:
    return any(word in reason.lower() for word in _TOO_COMPLEX)
