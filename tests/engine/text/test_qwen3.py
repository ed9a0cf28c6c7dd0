"""The real Qwen3 tokenizer and chat template: round trips in many scripts, and the reference renderer's own text."""

from __future__ import annotations

import json
import random
import subprocess
import unicodedata
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.engine.text.bpe import tokenizer_from_gguf
from kvferry.engine.text.detokenizer import Detokenizer
from kvferry.engine.text.messages import ChatMessage, ToolCall
from kvferry.engine.text.model import TextModel

N_STRINGS = 10_000
# Ranges of characters by script; lone code points of them need not make sense to be tokenised.
SCRIPTS = {
    "latin": [(0x20, 0x7E), (0xA1, 0x17F)],
    "greek and cyrillic": [(0x391, 0x3A1), (0x3B1, 0x3C9), (0x410, 0x44F)],
    "hebrew and arabic": [(0x5D0, 0x5EA), (0x620, 0x64A), (0x660, 0x669)],
    "indic": [(0x905, 0x939), (0x93E, 0x94D), (0x985, 0x98C), (0xB85, 0xB8A), (0xD05, 0xD0C)],
    "thai, lao and tibetan": [(0xE01, 0xE3A), (0xE40, 0xE4E), (0xE81, 0xE82), (0xF40, 0xF47)],
    "georgian, ethiopic and khmer": [(0x10D0, 0x10F0), (0x1200, 0x1246), (0x1780, 0x17B3)],
    "hangul": [(0x1100, 0x1112), (0x1161, 0x1175), (0xAC00, 0xD7A3)],
    "kana": [(0x3041, 0x3096), (0x30A1, 0x30FA)],
    "han": [(0x4E00, 0x9FA5), (0x20000, 0x2A6D6)],
    "emoji and signs": [(0x1F300, 0x1F5FF), (0x1F600, 0x1F64F), (0x2190, 0x21FF), (0x200D, 0x200D), (0xFE0F, 0xFE0F)],
    "marks": [(0x300, 0x36F)],
    "numbers": [(0x30, 0x39), (0xB2, 0xB3), (0x2160, 0x2188), (0x2460, 0x249B), (0x966, 0x96F)],
    "space": [(0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x2000, 0x200A), (0x3000, 0x3000)],
    "letters of mathematics": [(0x1D400, 0x1D454)],
}


def strings() -> list[str]:
    chance = random.Random(5)
    names = list(SCRIPTS)
    found: list[str] = []
    for i in range(N_STRINGS):
        chosen = [names[i % len(names)], *chance.choices(names, k=chance.randrange(3))]
        ranges = [piece for name in chosen for piece in SCRIPTS[name]]
        found.append("".join(chr(chance.randint(*chance.choice(ranges))) for _ in range(chance.randint(1, 60))))
    return found


def test_strings_in_many_scripts_come_back(qwen3: TextModel) -> None:
    """Up to the canonical composition (NFC) that the tokenizer begins with. Whole, and token by token."""
    for text in strings():
        ids = qwen3.encode(text)
        assert qwen3.decode(ids) == unicodedata.normalize("NFC", text)
        detokenizer = Detokenizer(qwen3)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == qwen3.decode(ids)


def test_a_gguf_file_s_metadata_make_the_same_tokenizer(qwen3: TextModel, qwen3_folder: Path) -> None:
    description = json.loads((qwen3_folder / "tokenizer.json").read_text())
    entries = sorted(description["model"]["vocab"], key=description["model"]["vocab"].__getitem__)
    kinds = [1] * len(entries)
    for added in description["added_tokens"]:
        entries.append(added["content"])
        kinds.append(3 if added["special"] else 4)
        assert entries[added["id"]] == added["content"]
    tokenizer, _, literal_ids = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": entries,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in description["model"]["merges"]],
        }
    )
    assert literal_ids == [added["id"] for added in description["added_tokens"]]
    for text in [*strings()[:2000], "<|im_start|>user\nHi<|im_end|><think>\n</think><tool_call>"]:
        assert tokenizer.encode(text, add_special_tokens=False).ids == qwen3.encode(text)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für eine Stadt <heute> & morgen",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def assistant(text: str, *calls: ToolCall, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage("assistant", text, reasoning, calls)


SYSTEM = ChatMessage("system", "You are terse.")
ASK = ToolCall("get_weather", {"city": "São Paulo", "days": 2})
CONVERSATIONS: dict[str, tuple[list[ChatMessage], dict[str, Any]]] = {
    "one question": ([user("Hello!")], {}),
    "system": ([SYSTEM, user("Hello!")], {}),
    "no thinking": ([user("Hello!")], {"thinking": False}),
    "thinking": ([user("Hello!")], {"thinking": True}),
    "system, no thinking": ([SYSTEM, user("你好")], {"thinking": False}),
    "several turns": ([user("a"), assistant("b"), user("c"), assistant("d"), user("e")], {}),
    "several turns, no thinking": ([SYSTEM, user("a"), assistant("b"), user("c")], {"thinking": False}),
    "thinking of earlier turns": ([user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")], {}),
    "thinking apart": ([user("a"), assistant("b", reasoning="hm"), user("c")], {"thinking": True}),
    "thinking in the last answer": ([user("a"), assistant("<think>\nhm\n</think>\n\nb")], {}),
    "thinking apart in the last answer": ([user("a"), assistant("b", reasoning="\nhm\n")], {}),
    "tools": ([user("Weather?")], {"tools": [WEATHER, CLOCK]}),
    "tools and system": ([SYSTEM, user("Weather?")], {"tools": [WEATHER], "thinking": False}),
    "a call": ([user("Weather?"), assistant("", ASK), ChatMessage("tool", '{"t": 25}')], {"tools": [WEATHER]}),
    "a call with words": ([user("W?"), assistant("Let me see.", ASK), ChatMessage("tool", "25")], {"tools": [WEATHER]}),
    "two calls, two results": (
        [user("W?"), assistant("", ASK, ToolCall("clock")), ChatMessage("tool", "25"), ChatMessage("tool", "noon")],
        {"tools": [WEATHER, CLOCK]},
    ),
    "a call after thinking": (
        [user("W?"), assistant("", ASK, reasoning="I need it."), ChatMessage("tool", "25")],
        {"tools": [WEATHER]},
    ),
    "turns after calls": (
        [SYSTEM, user("W?"), assistant("", ASK), ChatMessage("tool", "25"), assistant("25 °C"), user("Thanks")],
        {"tools": [WEATHER], "thinking": True},
    ),
    "a second system message": ([SYSTEM, user("a"), assistant("b"), ChatMessage("system", "Rhyme."), user("c")], {}),
    "text that looks like marks": ([user("<tool_response>\nx\n</tool_response>"), user("{{ 1 }} <|im_end|> <b>&")], {}),
}  # fmt: skip


def reference_renderer(source: str) -> jinja2.Template:
    """A chat template as the transformers library compiles it."""

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # type: ignore[no-untyped-def]
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def plain(message: ChatMessage) -> dict[str, Any]:
    """As a program would hand it to the transformers library."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.tool_calls
        ]
    return found  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_template_renders_as_the_reference(name: str, prompt: bool, qwen3: TextModel, qwen3_folder: Path) -> None:
    messages, settings = CONVERSATIONS[name]
    source = json.loads((qwen3_folder / "tokenizer_config.json").read_text())["chat_template"]
    variables: dict[str, Any] = {"tools": settings.get("tools"), "add_generation_prompt": prompt}
    if "thinking" in settings:
        variables["enable_thinking"] = settings["thinking"]
    expected = reference_renderer(source).render(messages=[plain(message) for message in messages], **variables)
    text = qwen3.render(messages, add_generation_prompt=prompt, **settings)
    assert text == expected
    assert len(CONVERSATIONS) == 20
    assert qwen3.decode(qwen3.encode(text)) == text


def test_the_template_renders_as_another_implementation_does(
    qwen3: TextModel, qwen3_folder: Path, js_renderer: tuple[str, Path]
) -> None:
    """All conversations once more, by Hugging Face's JavaScript implementation, which shares no code with ours."""
    node, library = js_renderer
    cases = [(messages, settings, prompt) for messages, settings in CONVERSATIONS.values() for prompt in (True, False)]
    variables = [
        {
            "messages": [plain(message) for message in messages],
            "add_generation_prompt": prompt,
            **({"tools": settings["tools"]} if "tools" in settings else {}),
            **({"enable_thinking": settings["thinking"]} if "thinking" in settings else {}),
        }
        for messages, settings, prompt in cases
    ]
    source = json.loads((qwen3_folder / "tokenizer_config.json").read_text())["chat_template"]
    done = subprocess.run(
        [node, str(Path(__file__).with_name("render.cjs")), str(library)],
        input=json.dumps({"template": source, "conversations": variables}),
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    expected = json.loads(done.stdout)
    assert len(expected) == 40
    for (messages, settings, prompt), text in zip(cases, expected, strict=True):
        assert qwen3.render(messages, add_generation_prompt=prompt, **settings) == text


def test_a_conversation_goes_on_with_its_thinking_in_place(qwen3: TextModel) -> None:
    """Rendered anew the earlier thinking is gone; the session's own tokens keep it, and with it their rows."""
    answer = "<think>\nA greeting.\n</think>\n\nHello!"
    history = [user("Hi"), assistant(answer)]
    first = qwen3.first_turn(history[:1])
    session = first + qwen3.encode(answer)
    grown = session + qwen3.next_turn(history, session[-1], [user("And now?")], thinking=False)
    assert grown[: len(session)] == session
    assert qwen3.decode(grown) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + answer + "<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    anew = qwen3.first_turn([*history, user("And now?")], thinking=False)
    assert "A greeting" not in qwen3.decode(anew)
    n_common = next(i for i, (a, b) in enumerate(zip(anew, grown, strict=False)) if a != b)
    assert n_common == len(first), "what could be reused of a conversation rendered anew: the question only"


def test_a_tool_s_result_goes_into_the_session(qwen3: TextModel) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    history = [user("Weather in Rome?"), assistant(call)]
    appended = qwen3.next_turn(history, 0, [ChatMessage("tool", "25 °C")], tools=[WEATHER])
    assert qwen3.decode(appended) == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n25 °C\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_end_tokens_and_names(qwen3: TextModel) -> None:
    assert qwen3.decode(qwen3.end_token_ids) == "<|im_end|>"
    assert qwen3.vocab_size == 151_669
