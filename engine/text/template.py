"""A model's chat template, rendered in a sandbox with limits: it comes with the model file and is not trusted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.engine.errors import InvalidMessage, ModelInvalid
from kvferry.engine.text.messages import ChatMessage, template_message, template_tools

TEMPLATE_CHARS_MAX: Final = 1 << 18  # the largest published template has some 20,000
RENDERED_CHARS_MAX: Final = 1 << 24  # 16 million characters: several times the longest context
# Lines of template code one rendering may run, about a second's worth. A message takes some 10 to 50.
STEPS_MAX: Final = 2_000_000


class ChatTemplate:
    """A compiled template. Rendering has no clock and no state: equal messages, equal text. Any thread may render."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are variables of the template, such as ``bos_token``. Raises ModelInvalid."""
        if len(source) > TEMPLATE_CHARS_MAX:
            raise ModelInvalid(
                f"the chat template has {len(source)} characters, more than the limit of {TEMPLATE_CHARS_MAX}"
            )
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ModelInvalid(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> str:
        """The conversation as the model's text. Raises InvalidMessage for what the template or the limits refuse.

        ``tools``: functions described in JSON schema. ``thinking``: whether the model shall think before it answers,
        where its template knows of that; None leaves it to the template.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [template_message(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": template_tools(tools),
        }
        if thinking is not None:
            variables["enable_thinking"] = thinking
        try:
            with _step_limit(STEPS_MAX):
                return _join(self._template.generate(variables))
        except _LimitReachedError as error:
            raise InvalidMessage(f"the model's chat template was stopped: it makes {error}") from error
        except jinja2.TemplateError as error:
            raise InvalidMessage(f"the model's chat template refuses these messages: {error}") from error
        except (
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            raise InvalidMessage(f"the model's chat template failed on these messages: {error!r}") from error


class _LimitReachedError(Exception):
    """A rendering was stopped; says what there was too much of."""


def _join(pieces: Iterable[Any]) -> str:
    kept: list[str] = []
    n_chars = 0
    for piece in pieces:
        text = str(piece)
        n_chars += len(text)
        _check_size(n_chars)
        kept.append(text)
    return "".join(kept)


def _check_size(size: int) -> None:
    if size > RENDERED_CHARS_MAX:
        raise _LimitReachedError(f"a value of more than {RENDERED_CHARS_MAX} characters or items")


class _CodeGenerator(CodeGenerator):
    """Compiles the operator ~ to the bounded join; jinja2's own cannot be intercepted."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  # jinja2's name
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with the operations that make a huge value out of small ones bounded or left out."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator
    concat = staticmethod(_join)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise _LimitReachedError(f"use of the operator {operator!r}, which is not allowed here")
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "*":
            _check_size(max(_size(left) * _factor(right), _size(right) * _factor(left)))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is not None:  # str.format pads to any width
            raise _LimitReachedError("use of str.format, which is not allowed here")
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str) and attr in _UNBOUNDED_METHODS) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        owner = getattr(function, "__self__", None)
        bounded = _BOUNDED_METHODS.get(function.__name__) if isinstance(owner, str) else None
        if bounded is not None:
            return bounded(owner, *arguments, **named)
        return super().call(context, function, *arguments, **named)


_UNBOUNDED_METHODS: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "translate", "zfill"})
_UNBOUNDED_FILTERS: Final = ("center", "format", "indent", "urlize", "wordwrap", "xmlattr")


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
    n_found = text.count(old) if count is None or count < 0 else min(text.count(old), count)
    _check_size(len(text) + n_found * (len(new) - len(old)))
    return text.replace(old, new, -1 if count is None else count)


def _join_with(separator: str, parts: Iterable[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


_BOUNDED_METHODS: Final[dict[str, Callable[..., str]]] = {"replace": _replace, "join": _join_with}


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _factor(value: Any) -> int:
    return max(value, 1) if isinstance(value, int) else 1


def _environment() -> _Environment:
    """The dialect that chat templates are written in: that of the transformers library, without its clock."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    environment.filters["replace"] = lambda text, *arguments: _replace(str(text), *arguments)
    environment.filters["join"] = _join_filter
    for name in (*_UNBOUNDED_FILTERS, "random"):  # there is no chance in a rendering
        del environment.filters[name]
    return environment


def _join_filter(parts: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        parts = [part[attribute] if isinstance(part, Mapping) else "" for part in parts]
    return _join_with(separator, parts)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers defines it: jinja2's own would escape characters for HTML."""
    if separators is not None:
        separators = (str(separators[0])[:8], str(separators[1])[:8])
    indent = min(int(indent), 8) if indent is not None else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@contextmanager
def _step_limit(n_steps_max: int) -> Iterator[None]:
    """Stop this thread's Python code after a number of lines: counted, not timed, so the outcome is always the same."""
    n_steps = 0

    def on_line(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal n_steps
        if event == "line":
            n_steps += 1
            if n_steps > n_steps_max:
                raise _LimitReachedError(f"more than {n_steps_max} steps")
        return on_line

    previous = sys.gettrace()
    sys.settrace(on_line)
    try:
        yield
    finally:
        sys.settrace(previous)
