"""A template is a stranger's program: it runs in a sandbox and within limits."""

from __future__ import annotations

import sys

import pytest

from kvferry.engine.errors import InvalidMessage, ModelInvalid
from kvferry.engine.text.template import RENDERED_CHARS_MAX, TEMPLATE_CHARS_MAX, ChatMessage, ChatTemplate

HELLO = [ChatMessage("user", "hello")]


def render(source: str, messages: list[ChatMessage] = HELLO) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {{ m.role }}: {{ m['content'] }}\n{% endfor %}", "  user: hello\n"),
        ("{{ bos_token ~ messages[0].content ~ 1 }}", "<s>hello1"),
        ("{% for m in messages %}{% if loop.first %}{% break %}{% endif %}x{% endfor %}", ""),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{{ messages[0].content.replace('l', 'LL') | replace('o', 'O') }}", "heLLLLO"),
        ("{{ ', '.join(['a', 'b']) }}{{ messages | join('-', attribute='role') }}", "a, buser"),
        ("{{ messages[0].content.split('l')[-1].strip() }}{{ 7 % 4 }}{{ '-' * 3 }}", "o3---"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% if tools %}tools{% endif %}{% if strftime_now is defined %}clock{% endif %}", ""),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('y') }}{% set b %}z{% endset %}{{ b }}", "[y]z"),
    ],
)
def test_what_chat_templates_use_works(source: str, text: str) -> None:
    assert render(source) == text


def test_a_template_can_refuse_messages_in_its_own_words() -> None:
    with pytest.raises(InvalidMessage, match="refuses these messages: System role not supported"):
        render("{{ raise_exception('System role not supported') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ (messages | attr('append'))(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ''.format_map(messages[0]) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages[0].missing.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_way_out_of_the_sandbox_is_refused(source: str) -> None:
    with pytest.raises(InvalidMessage):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 2 ** 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'a'.replace('a', 'b' * 5000).replace('b', 'c' * 5000) }}",
        "{{ 'a' | replace('a', 'b' * 5000) | replace('b', 'c' * 5000) }}",
        "{{ ('x' * 9999).join('y' * 9999) }}",
        "{{ ('y' * 9999) | join('x' * 9999) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n=namespace(s='a') %}{% for i in 'x'*60 %}{% set s %}{{ n.s*9 }}{%endset%}{% set n.s=s %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_a_bomb_is_stopped(source: str) -> None:
    with pytest.raises(InvalidMessage):
        render(source)
    assert sys.gettrace() is None or "coverage" in sys.modules, "nothing of the limit is left behind"


def test_filters_that_pad_without_limit_do_not_exist() -> None:
    with pytest.raises(ModelInvalid, match="cannot be compiled: No filter named 'center'"):
        render("{{ 'a' | center(1000000000) }}")


def test_an_endless_template_is_not_compiled() -> None:
    with pytest.raises(ModelInvalid, match="more than the limit"):
        render("x" * (TEMPLATE_CHARS_MAX + 1))
    with pytest.raises(ModelInvalid, match="cannot be compiled"):
        render("{{ " + "(" * 5000 + ")" * 5000 + " }}")


def test_a_long_conversation_is_within_the_limits() -> None:
    messages = [ChatMessage("user", "word " * 200)] * 5000
    text = render(
        "{% for m in messages %}{% if m.role %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}", messages
    )
    assert len(text) == 5000 * 1006 < RENDERED_CHARS_MAX
