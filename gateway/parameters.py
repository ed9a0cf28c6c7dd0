"""Fields that several endpoints share, as the coordinator takes them; what cannot be honoured is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import ConfigDict, Field

from kvferry.client import AnswerForm, JsonObject, JsonSchema, OutputFormat, Sampling, Tool
from kvferry.gateway.body import NullIsNotGiven
from kvferry.gateway.errors import invalid, unsupported

MAX_SEED: Final = 2**64 - 1

LEAST_FLOAT: Final = 2.0**-149
"""Above 0, of the 32 bits that travel."""

NO_EFFECT: Final = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
     "service_tier", "store", "user", "verbosity"}
)  # fmt: skip
"""Fields that change nothing about the answer here, and are taken in silence."""

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None,),
    "functions": (None,),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "web_search_options": (None,),
}
"""Fields that would change the answer, which kvferry cannot, with the values that ask for nothing."""

WHY_NOT: Final = {
    "frequency_penalty": "use repetition_penalty, which looks at the last repetition_window tokens",
    "presence_penalty": "use repetition_penalty, which looks at the last repetition_window tokens",
    "functions": "use tools",
    "function_call": "use tool_choice",
}


class SamplingFields(NullIsNotGiven):
    """How tokens are drawn. `top_k` to `repetition_window` are kvferry's own, as extra fields of the body."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    # As the coordinator has them (docs/api.md), so that a refusal names the field; NaN is in no range.
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=LEAST_FLOAT, le=1)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=MAX_SEED)
    top_k: int | None = Field(default=None, ge=0, le=2**31)
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_FLOAT, le=10)] | None = None
    repetition_window: int | None = Field(default=None, ge=0, le=2**31)

    def check_unknown(self) -> None:
        """Raises ApiError for a field that is not known, or that asks for what cannot be."""
        for name, value in (self.model_extra or {}).items():
            if name in NO_EFFECT:
                continue
            if name not in NEUTRAL:
                raise invalid(f"Unrecognized request argument supplied: {name}", name, code="unknown_parameter")
            if value not in NEUTRAL[name]:
                raise unsupported(name, WHY_NOT.get(name, "no model here can do that"))

    def sampling(self, new_seed: Callable[[], int], *, logprobs: bool, top_logprobs: int) -> Sampling:
        """OpenAI's defaults: temperature 1, and a seed of its own for each request that names none."""
        seed = new_seed() if self.seed is None else self.seed % (MAX_SEED + 1)
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            repetition_window=self.repetition_window,
            seed=seed,
            logprobs=logprobs or None,
            top_logprobs=top_logprobs or None,
        )


class StreamOptions(NullIsNotGiven):
    """Of a stream."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


MAX_SAMPLES: Final = 16

NumberOfTokens = Annotated[int, Field(ge=1, le=2**32 - 1)]
"""That an answer may have."""

StopString = Annotated[str, Field(min_length=1, max_length=256)]


class StreamedFields(SamplingFields):
    """What both kinds of completions have."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None

    @property
    def stops(self) -> list[str]:
        """Always a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_usage(self) -> bool:
        """At the end of a stream."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream(self) -> None:
        """Raises ApiError, also for fields that are not known."""
        self.check_unknown()
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream: true", "stream_options")


class FunctionTool(NullIsNotGiven):
    """A function as a tool describes it."""

    model_config = ConfigDict(extra="ignore")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def tool(self) -> Tool:
        """As the coordinator takes it."""
        return Tool(self.name, self.description or "", self.parameters)


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def thinking_of(effort: ReasoningEffort | None) -> bool | None:
    """Whether the model shall think; None leaves it to its template."""
    return None if effort is None else effort not in {"none", "minimal"}


ToolMode = Literal["none", "auto", "required"]


class NamesTool(Protocol):
    """A choice of one tool."""

    @property
    def name(self) -> str: ...


def must_call_of(choice: ToolMode | NamesTool | None) -> bool | str | None:
    """Whether a tool, or which one, has to be called; None: none may be."""
    if choice is None or choice == "auto":
        return False
    if choice == "none":
        return None
    return True if isinstance(choice, str) else choice.name


def answer_form(
    tools: Sequence[FunctionTool],
    choice: ToolMode | NamesTool | None,
    output: OutputFormat | None,
    effort: ReasoningEffort | None,
) -> AnswerForm:
    """Where no tool may be called, none is told. Raises ApiError for a choice that the tools do not allow."""
    must_call = must_call_of(choice)
    if isinstance(must_call, str) and must_call not in {tool.name for tool in tools}:
        raise invalid(f"tool_choice names {must_call}, which is none of the tools", "tool_choice")
    if must_call is True and not tools:
        raise invalid("tool_choice asks for a call, and there are no tools", "tool_choice")
    told = () if must_call is None else tuple(tool.tool() for tool in tools)
    return AnswerForm(
        tools=told, must_call=(bool(told) and must_call) or False, thinking=thinking_of(effort), format=output
    )


def output_format(kind: str, schema: Any, parameter: str) -> OutputFormat | None:
    """What the content has to be, by its kind in the request."""
    match kind:
        case "text":
            return None
        case "json_object":
            return JsonObject()
        case "json_schema" if isinstance(schema, dict):
            return JsonSchema(schema)
        case "json_schema":
            raise invalid(f"{parameter} has no schema, or one that is not an object", parameter)
        case _:
            raise unsupported(parameter, f"an answer is text, json_object or json_schema, not {kind}")
