"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from kvferry.client import AnswerForm
from kvferry.gateway.body import Listed, NullIsNotGiven
from kvferry.gateway.errors import fields_at_fault, invalid
from kvferry.gateway.messages import ChatMessage
from kvferry.gateway.parameters import (
    FunctionTool,
    NumberOfTokens,
    ReasoningEffort,
    StreamedFields,
    ToolMode,
    answer_form,
    output_format,
)


class ChatTool(NullIsNotGiven):
    """A tool; functions are the only kind."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(NullIsNotGiven):
    """A function by its name."""

    name: str


class NamedTool(NullIsNotGiven):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.name


class ResponseFormat(NullIsNotGiven):
    """What the content has to be."""

    model_config = ConfigDict(extra="ignore")

    type: str
    json_schema: dict[str, Any] | None = None


class ChatRequest(StreamedFields):
    """See OpenAI's reference; docs/openai.md says what is honoured."""

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_tokens: NumberOfTokens | None = None
    max_completion_tokens: NumberOfTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: ResponseFormat | None = None
    tools: Listed[ChatTool] | None = None
    tool_choice: ToolMode | NamedTool | None = None
    reasoning_effort: ReasoningEffort | None = None

    @property
    def n_tokens_at_most(self) -> int:
        """0: to the end of the context."""
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def fields_at_fault(self) -> Mapping[str, str]:
        """By the coordinator's codes."""
        return fields_at_fault("messages", "tools" if self.response_format is None else "response_format")

    def check(self) -> None:
        """What no field alone can tell; raises ApiError."""
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")

    def form(self) -> AnswerForm:
        """Tools, thinking and format of the answer."""
        tools = [tool.function for tool in self.tools or ()]
        output = None
        if self.response_format is not None:
            schema = (self.response_format.json_schema or {}).get("schema")
            output = output_format(self.response_format.type, schema, "response_format")
        return answer_form(tools, self.tool_choice, output, self.reasoning_effort)
