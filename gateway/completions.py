"""POST /v1/completions: a text that the model goes on writing, in the shape that came before chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from kvferry.client import Finished, Placed, RawPrompt, Started, Token, TurnEvent
from kvferry.gateway.answering import Json, Shape, answer
from kvferry.gateway.asking import Order
from kvferry.gateway.body import Listed, read_body
from kvferry.gateway.choices import FINISH_REASON, n_cached_of
from kvferry.gateway.context import context_of
from kvferry.gateway.errors import fields_at_fault, invalid, unsupported
from kvferry.gateway.logprobs import Entry, HeldLogprobs, old_json
from kvferry.gateway.parameters import NumberOfTokens, StreamedFields

MAX_ANSWERS: Final = 64
"""Of all prompts of a request."""

DEFAULT_MAX_TOKENS: Final = 16
"""As OpenAI has it."""


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class CompletionRequest(StreamedFields):
    """See OpenAI's reference; docs/openai.md says what is honoured."""

    prompt: str | Listed[str] | Listed[TokenId] | Listed[Listed[TokenId]]
    suffix: str | None = None
    echo: bool = False
    best_of: int | None = None
    max_tokens: NumberOfTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def prompts(self) -> list[RawPrompt]:
        """One or several. Raises ApiError."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [RawPrompt(prompt)]
        if not prompt:
            raise invalid("prompt is empty: give a text, tokens, or a list of either", "prompt")
        return [RawPrompt(one) for one in prompt]  # type: ignore[arg-type]  # as above

    @property
    def fields_at_fault(self) -> Mapping[str, str]:
        """By the coordinator's codes; an answer has no form here."""
        return fields_at_fault("prompt", "prompt")

    def check(self) -> None:
        """What no field alone can tell; raises ApiError."""
        self.check_stream()
        if self.suffix:
            raise unsupported("suffix", "the models here write on, they do not fill in")
        if self.best_of is not None and self.best_of != self.n:
            raise unsupported("best_of", "ask n answers with logprobs, and choose")
        if self.echo and self.logprobs is not None:
            raise invalid(
                "echo is not supported with logprobs: tokens of a prompt that are found in a cache have none",
                "echo",
                code="unsupported_parameter",
            )
        prompts = self.prompts()
        if self.echo and not all(isinstance(one.prompt, str) for one in prompts):
            raise unsupported("echo", "prompts that are tokens are not told back; send them as text")
        if len(prompts) * self.n > MAX_ANSWERS:
            raise invalid(f"{len(prompts)} prompts with n {self.n}: at most {MAX_ANSWERS} answers", "prompt")


async def completions(request: Request) -> Response:
    """Whole, or as a stream that may be picked up again with Last-Event-ID. Raises ApiError and ClientError."""
    context = context_of(request)
    asked = await read_body(request, CompletionRequest)
    asked.check()
    prompts = asked.prompts()
    order = Order(
        prompts=prompts,
        n=asked.n,
        model=await context.models.find(asked.model),
        sampling=asked.sampling(
            context.new_seed, logprobs=asked.logprobs is not None, top_logprobs=asked.logprobs or 0
        ),
        max_tokens=asked.max_tokens or DEFAULT_MAX_TOKENS,
        stop=asked.stops,
    )

    def new_choice(index: int) -> TextChoice:
        prompt = prompts[index // asked.n].prompt
        return TextChoice(index, prompt if asked.echo and isinstance(prompt, str) else "")

    shape = Shape(kind="text_completion", chunk_kind="text_completion", id_prefix="cmpl-", new_choice=new_choice)
    return await answer(request, context, order, shape, stream=asked.stream, wants_usage=asked.wants_usage)


@dataclass(slots=True)
class TextChoice:
    """One answer so far, event by event. Pure. `echo`: the prompt, if it is to be told back."""

    index: int
    echo: str = ""
    place: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    finished: Finished | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    _held: HeldLogprobs = field(default_factory=HeldLogprobs)

    def push(self, event: TurnEvent) -> Json | None:
        """What one event adds to the stream, if anything."""
        match event:
            case Started():
                self.n_prompt = event.n_prompt_tokens
                self.place = 1
                return self._part(self.echo) if self.echo else None
            case Placed():
                self.n_cached = n_cached_of(event, self.n_prompt, self.n_cached)
            case Token():
                self.place = event.sequence + 2
                entries = self._held.push(event)
                return self._part(event.text, entries) if event.text else None
            case Finished():
                self.finished = event
                self.place += 1
                return self._part(event.tail_text, self._held.flush(event), FINISH_REASON.get(event.reason, "stop"))
        return None

    def whole(self) -> Json:
        """As an answer that is not streamed has it."""
        reason = None if self.finished is None else FINISH_REASON.get(self.finished.reason, "stop")
        return self._choice("".join(self.text), self.logprobs, reason)

    def _part(self, text: str, entries: Sequence[Entry] = (), reason: str | None = None) -> Json:
        self.text.append(text)
        self.logprobs += entries
        return self._choice(text, entries, reason)

    def _choice(self, text: str, entries: Sequence[Entry], reason: str | None) -> Json:
        logprobs = old_json(entries) if entries else None
        return {"text": text, "index": self.index, "logprobs": logprobs, "finish_reason": reason}
