"""What a turn adds to its session, and what its answer has to be: all that is worked out before it becomes durable."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from kvferry.coordinator.conversation import History, TextSide, new_prompt_ids, opened_thinking, raw_prompt_ids
from kvferry.coordinator.form_requests import NO_FORM, FormRequest
from kvferry.coordinator.pictures import PictureReader
from kvferry.coordinator.registry import AnswerForm, Picture, TokenArray, TurnRecord
from kvferry.coordinator.requests import TurnRequest
from kvferry.coordinator.surroundings import InThread
from kvferry.engine.errors import InvalidTools
from kvferry.engine.text.answer_form import Thinking, answer_grammar, can_think
from kvferry.engine.text.messages import Tool

QUICK_CHARACTERS: Final = 1_000
"""New text and tokens of history together: about 0.5 ms on a server's core, 3 ms on a small board's."""

LARGE_CHARACTERS: Final = 1_000_000
"""While a text is tokenised it takes 120 times its size, so one of these 120 MB."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """``prompt_ids``: int32[n], what the turn adds to the history."""

    prompt_ids: TokenArray
    form: AnswerForm
    pictures: tuple[Picture, ...]
    # PNG files by content hash.
    pixels: Mapping[str, bytes] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Preparation:
    """Any thread may call it. ``check_grammar`` raises for a grammar that no node could follow."""

    model: TextSide
    check_grammar: Callable[[str], None]
    reader: PictureReader
    # Images and large texts are worked on one turn at a time: each takes hundreds of megabytes meanwhile.
    _large: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(1))

    async def prepare(
        self, in_thread: InThread, request: TurnRequest, turns: Sequence[TurnRecord], history: History
    ) -> Prepared:
        """The same, away from the loop unless it is done before a thread has woken."""
        if is_quick(request, turns, history):
            return self(request, turns, history)
        is_large = bool(request.images) or n_characters(request) > LARGE_CHARACTERS
        async with self._large if is_large else contextlib.nullcontext():
            return await in_thread(lambda: self(request, turns, history))

    def __call__(self, request: TurnRequest, turns: Sequence[TurnRecord], history: History) -> Prepared:
        """Of a session with these turns, and what they are as tokens.

        Raises InvalidMessage, InvalidTools, InvalidFormat, FormatTooComplex, NoVision, InvalidImage, ImagesTooLarge.
        """
        asked = request.form
        tools = session_tools(turns, asked)
        calls = callable_tools(tools, asked)
        images = self.reader.develop(request.images, history.pictures)
        if request.raw_prompt is not None:
            marked_ids = raw_prompt_ids(self.model, request.raw_prompt, len(history.token_ids))
        else:
            marked_ids = new_prompt_ids(
                self.model, turns, history.token_ids, request.messages, tools, asked.thinking, request.images
            )
        prompt_ids, pictures = self.reader.place(marked_ids, images, len(history.token_ids))
        is_raw = request.raw_prompt is not None
        opened = not is_raw and opened_thinking(self.model, np.concatenate([history.token_ids, prompt_ids]))
        thinking: Thinking = "no"
        grammar = ""
        if asked.content is not None or asked.must_call:
            if not is_raw and can_think(self.model) and (opened or asked.thinking is not False):
                thinking = "has begun" if opened else "may"
            grammar = answer_grammar(self.model, content=asked.content, tools=calls, thinking=thinking)
            self.check_grammar(grammar)
        reads_thinking = not is_raw and (not grammar or thinking != "no")
        form = AnswerForm(
            tools=tools,
            thinking=asked.thinking,
            grammar=grammar,
            prompt_opened_thinking=opened and reads_thinking,
            reads_thinking=reads_thinking,
        )
        return Prepared(prompt_ids, form, pictures, {image.content_hash: image.png for image in images})


def is_quick(request: TurnRequest, turns: Sequence[TurnRecord], history: History) -> bool:
    """A little plain text in a short conversation without tools or images: half a millisecond."""
    is_plain = request.form == NO_FORM and not request.images and not history.pictures
    if not is_plain or any(message.tool_calls for message in request.messages):
        return False
    if any(turn.form.tools for turn in turns):
        return False
    return n_characters(request) + len(history.token_ids) <= QUICK_CHARACTERS


def n_characters(request: TurnRequest) -> int:
    """Of a turn's new text; a token that is given as such counts as one."""
    n_new = sum(len(message.content) + len(message.reasoning or "") for message in request.messages)
    if request.raw_prompt is not None:
        n_new += len(request.raw_prompt.text) + len(request.raw_prompt.token_ids)
    return n_new


def session_tools(turns: Sequence[TurnRecord], asked: FormRequest) -> tuple[Tool, ...]:
    """The tools that the model was told of, or is told of now. Raises InvalidTools: it is told once."""
    kept = [turn for turn in turns if turn.outcome is not None and turn.outcome.kept]
    if not kept:
        return asked.tools
    told = kept[0].form.tools
    if asked.tools and asked.tools != told:
        raise InvalidTools(
            "the model is told of the tools with a session's first turn, and these are others: repeat the same ones, "
            "leave them out, or begin a new session"
        )
    return told


def callable_tools(tools: Sequence[Tool], asked: FormRequest) -> Sequence[Tool]:
    """Those that an answer may call. Raises InvalidTools when a call is required of a tool that is not there."""
    if asked.must_call and not tools:
        raise InvalidTools("a call is required, and the session has no tools: give them with its first turn")
    if not asked.tool_name:
        return tools
    named = [tool for tool in tools if tool.name == asked.tool_name]
    if not named:
        known = ", ".join(tool.name for tool in tools)
        raise InvalidTools(f"there is no tool {asked.tool_name[:80]!r}; the session's tools are {known}")
    return named
