"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from kvferry.client import AnswerForm, Message
from kvferry.gateway.body import Listed, NullIsNotGiven
from kvferry.gateway.errors import fields_at_fault, invalid, unsupported
from kvferry.gateway.messages import ROLES, Part, read_content, tool_call
from kvferry.gateway.parameters import (
    FunctionTool,
    NumberOfTokens,
    ReasoningEffort,
    SamplingFields,
    ToolMode,
    answer_form,
    output_format,
)


class Item(NullIsNotGiven):
    """One thing of the conversation: a message, a call that the model wanted, its result, or what it thought."""

    model_config = ConfigDict(extra="ignore")

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Listed[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | Listed[Part] = ""


class ResponseTool(FunctionTool):
    """A tool; functions are the only kind. In this API its fields stand beside the kind."""

    type: str
    name: str = ""


class NamedTool(NullIsNotGiven):
    """The tool that has to be called."""

    type: Literal["function"]
    name: str


class TextFormat(NullIsNotGiven):
    """What the content has to be; the schema's own name changes nothing."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    type: str = "text"
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(NullIsNotGiven):
    """Of the answer's text."""

    model_config = ConfigDict(extra="ignore")

    format: TextFormat = TextFormat()


class Reasoning(NullIsNotGiven):
    """Of the thinking before the answer."""

    model_config = ConfigDict(extra="ignore")

    effort: ReasoningEffort | None = None


class ResponseRequest(SamplingFields):
    """See OpenAI's reference; docs/openai.md says what is honoured."""

    model: str = ""
    input: str | Listed[Item] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool = False
    background: bool = False
    max_output_tokens: NumberOfTokens | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    include: Listed[str] | None = None
    text: TextOptions = TextOptions()
    tools: Listed[ResponseTool] | None = None
    tool_choice: ToolMode | NamedTool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None

    @property
    def is_stored(self) -> bool:
        """Whether it can be asked for later."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Of the output's text."""
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def fields_at_fault(self) -> Mapping[str, str]:
        """By the coordinator's codes."""
        return fields_at_fault("input", "tools" if self.text.format.type == "text" else "text.format")

    def check(self) -> None:
        """What no field alone can tell; raises ApiError."""
        self.check_unknown()
        if self.truncation == "auto":
            raise unsupported("truncation", "what is cut away would be lost in silence; shorten the input")
        if self.background and not self.is_stored:
            raise invalid("a response in the background has to be stored, or nobody could ask for it", "store")
        for number, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                raise unsupported(f"tools[{number}]", f"tools are functions, not {tool.type}")

    def messages(self) -> list[Message]:
        """The new messages. Raises ApiError that names the item at fault."""
        messages = [] if self.instructions is None else [Message("system", self.instructions)]
        if isinstance(self.input, str):
            messages.append(Message("user", self.input))
        else:
            messages += _messages_of(self.input)
        return messages

    def form(self) -> AnswerForm:
        """Tools, thinking and format of the answer."""
        output = output_format(self.text.format.type, self.text.format.json_schema, "text.format")
        effort = None if self.reasoning is None else self.reasoning.effort
        return answer_form(self.tools or (), self.tool_choice, output, effort)


def _messages_of(items: Sequence[Item]) -> list[Message]:
    """What an assistant thought and wanted called belongs to one message, whichever items it came in."""
    messages: list[Message] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        match item.type:
            case "message":
                text, images = read_content(item.content, f"{where}.content")
                role = item.role or "user"
                if images and role != "user":
                    raise invalid(f"{where}: only a user's message may have images", where)
                messages.append(Message(ROLES.get(role, role), text, images))
            case "function_call":
                call = tool_call(item.call_id, item.name, item.arguments, where)
                last = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant", "")
                messages.append(Message("assistant", last.content, tool_calls=(*last.tool_calls, call)))
            case "function_call_output":
                text, _ = read_content(item.output, f"{where}.output")
                messages.append(Message("tool", text, tool_call_id=item.call_id))
            case "reasoning":
                pass  # earlier thinking is not shown to the model again, as its template has it
            case _:
                raise unsupported(where, f"an item is a message, a function_call or its output, not {item.type}")
    return messages
