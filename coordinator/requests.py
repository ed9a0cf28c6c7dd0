"""What a client may ask: every request checked before anything is looked up, tokenised or kept. Pure."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

from kvferry.coordinator.errors import (
    BadRequest,
    EmptyPrompt,
    InvalidMessage,
    InvalidName,
    InvalidSampling,
    PromptTooLong,
)
from kvferry.coordinator.form_requests import NO_FORM, FormRequest, checked_call_id, checked_calls, form_request
from kvferry.coordinator.pictures import Upload, uploads
from kvferry.coordinator.registry import Message, PageKey, SessionRecord
from kvferry.proto.v1 import chat_pb2, common_pb2

ROLES: Final = ("system", "user", "assistant", "tool")
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_MESSAGES: Final = 1_024
"""A conversation is sent turn by turn; imports of long ones fit."""
MAX_PRIORITY: Final = 100
"""As worker.proto has it."""
MAX_TIMEOUT_S: Final = 30 * 86_400.0
MAX_SAMPLES: Final = 32
"""More than a board runs side by side."""
DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1_000

SAMPLING_DEFAULTS: Final = common_pb2.SamplingSettings(
    temperature=0,
    top_k=0,
    top_p=1,
    min_p=0,
    repetition_penalty=1,
    repetition_window=64,
    seed=0,
    top_logprobs=0,
    logprobs=False,
)
"""As common.proto names them."""

SAMPLING_RANGES: Final = {
    "temperature": (0.0, 100.0, "[0, 100]"),
    "top_p": (math.nextafter(0.0, 1.0), 1.0, "(0, 1]"),
    "min_p": (0.0, 1.0, "[0, 1]"),
    "repetition_penalty": (math.nextafter(0.0, 1.0), 10.0, "(0, 10]"),
    "top_logprobs": (0, 20, "[0, 20]"),
}
"""As common.proto names them. Comparisons with NaN are false, so NaN is in no range."""


@dataclasses.dataclass(frozen=True, slots=True)
class RawPrompt:
    """What the model goes on writing: a text, or tokens."""

    text: str = ""
    token_ids: tuple[int, ...] = ()

    def digest_parts(self) -> tuple[str, ...]:
        """Of the request that has it."""
        return "\0raw", self.text, ",".join(map(str, self.token_ids))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A GenerateRequest that may be."""

    session_id: str
    # Empty: the coordinator chooses.
    turn_id: str
    # None, and a raw prompt; or at least one.
    messages: tuple[Message, ...]
    # With every default filled in.
    sampling: common_pb2.SamplingSettings
    # 0: to the end of the context.
    max_tokens: int
    stop: tuple[str, ...]
    form: FormRequest = NO_FORM
    images: tuple[Upload, ...] = ()
    priority: int = 0
    # 0: none.
    timeout_s: float = 0.0
    # Of the call it came with, where that has fewer left; it is no part of what was asked for.
    call_seconds: float = 0.0
    n_samples: int = 1
    raw_prompt: RawPrompt | None = None

    @property
    def digest(self) -> str:
        """Equal for equal requests, whichever defaults were spelled out."""
        digest = hashlib.sha256()
        fields = [part for message in self.messages for part in digest_parts(message)]
        images = [image.digest_part for image in self.images]
        limits = ("\0stop", *self.stop, f"\0max {self.max_tokens}")
        raw = () if self.raw_prompt is None else self.raw_prompt.digest_parts()
        for part in (*fields, *limits, *self.form.digest_parts(), *images, *self._term_parts(), *raw):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        digest.update(self.sampling.SerializeToString(deterministic=True))
        return digest.hexdigest()

    def _term_parts(self) -> tuple[str, ...]:
        """Only what was said, so that turns begun before there was such a thing keep their digest."""
        plain = {"priority": 0, "timeout_s": 0.0, "n_samples": 1}
        return tuple(f"\0{name} {getattr(self, name)}" for name, value in plain.items() if getattr(self, name) != value)


def turn_request(request: chat_pb2.GenerateRequest) -> TurnRequest:
    """Raises a BadRequest whose sentence says which field, which value and what is allowed."""
    raw_prompt = checked_raw_prompt(request)
    return TurnRequest(
        session_id=name("session_id", request.session_id),
        turn_id=name("turn_id", request.turn_id) if request.turn_id else "",
        messages=checked_messages(request.messages) if raw_prompt is None else (),
        sampling=checked_sampling(request.sampling),
        max_tokens=request.max_tokens,
        stop=checked_stops(request.stop),
        form=form_request(request),
        images=uploads(request.messages),
        priority=checked_priority(request.priority),
        timeout_s=checked_timeout(request.timeout_seconds),
        n_samples=checked_samples(request.n_samples),
        raw_prompt=raw_prompt,
    )


def checked_raw_prompt(request: chat_pb2.GenerateRequest) -> RawPrompt | None:
    """None for a request with messages. Raises EmptyPrompt, BadRequest."""
    if not request.HasField("raw_prompt"):
        return None
    if request.messages:
        raise BadRequest("there are messages and a raw_prompt: give one of them")
    if request.tools or request.tool_choice or request.HasField("thinking"):
        raise BadRequest("tools, tool_choice and thinking need a chat template: a raw_prompt is answered by a text")
    text, token_ids = request.raw_prompt.text, tuple(request.raw_prompt.token_ids)
    if text and token_ids:
        raise BadRequest("raw_prompt has a text and token_ids: give one of them")
    if not text and not token_ids:
        raise EmptyPrompt("the raw_prompt is empty: give a text, or token_ids")
    return RawPrompt(text, token_ids)


def checked_priority(priority: int) -> int:
    """Raises BadRequest."""
    if abs(priority) > MAX_PRIORITY:
        raise BadRequest(f"priority is {priority}: give a whole number in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    return priority


def checked_timeout(timeout_s: float) -> float:
    """Raises BadRequest."""
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise BadRequest(f"timeout_seconds is {timeout_s:g}: give 0, for none, to {MAX_TIMEOUT_S:g}")
    return timeout_s


def resumed_samples(from_indexes: Sequence[int]) -> Sequence[int]:
    """Raises BadRequest."""
    checked_samples(len(from_indexes))
    return from_indexes


def checked_samples(n_samples: int) -> int:
    """Raises BadRequest."""
    if n_samples > MAX_SAMPLES:
        raise BadRequest(f"n_samples is {n_samples}: at most {MAX_SAMPLES} answers are given to one request")
    return n_samples or 1


def digest_parts(message: Message) -> tuple[str, ...]:
    """Role and content; more only where there is more, so that turns begun before there was keep their digest."""
    if message == Message(message.role, message.content):
        return message.role, message.content
    more = {key: value for key, value in dataclasses.asdict(message).items() if key not in {"role", "content"}}
    return message.role, message.content, "\0more", json.dumps(more, sort_keys=True)


def name(field: str, value: str) -> str:
    """Names go into logs, paths of metrics and SQL keys; one plain alphabet for all. Raises InvalidName."""
    if not NAME.fullmatch(value):
        raise InvalidName(f"{field} is {value[:140]!r}: give 1 to 128 characters of A-Z a-z 0-9 . _ -")
    return value


def checked_messages(messages: Sequence[chat_pb2.ChatMessage]) -> tuple[Message, ...]:
    """Raises EmptyPrompt, InvalidMessage."""
    if not messages:
        raise EmptyPrompt("the prompt is empty: give at least one message, the last one from the user or a tool")
    if len(messages) > MAX_MESSAGES:
        raise InvalidMessage(f"{len(messages)} messages in one request: at most {MAX_MESSAGES} are allowed")
    for number, message in enumerate(messages, start=1):
        if message.role not in ROLES:
            raise InvalidMessage(f"message {number} has the role {message.role[:40]!r}: give one of {', '.join(ROLES)}")
        if message.role == "system" and number > 1:
            raise InvalidMessage(
                f"message {number} has the role system: only the first message of a session may have it"
            )
    if messages[-1].role not in {"user", "tool"}:
        raise InvalidMessage(f"the last message has the role {messages[-1].role}: it has to be the user's or a tool's")
    if messages[-1].role == "user" and not messages[-1].content.strip() and not messages[-1].images:
        raise EmptyPrompt("the prompt is empty: the last message has no text")
    return tuple(checked_message(number, message) for number, message in enumerate(messages, start=1))


def checked_message(number: int, message: chat_pb2.ChatMessage) -> Message:
    """Raises InvalidMessage for what messages of its role do not have."""
    if message.role != "assistant" and (message.tool_calls or message.HasField("reasoning")):
        raise InvalidMessage(
            f"message {number} has the role {message.role}: only an assistant's message has reasoning or tool calls"
        )
    if message.role != "tool" and message.tool_call_id:
        raise InvalidMessage(f"message {number} has the role {message.role}: only a tool's message has a tool_call_id")
    return Message(
        message.role,
        message.content,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
        tool_calls=checked_calls(number, message.tool_calls),
        tool_call_id=checked_call_id(number, message.tool_call_id),
    )


def checked_sampling(given: common_pb2.SamplingSettings) -> common_pb2.SamplingSettings:
    """The settings with every default filled in. Raises InvalidSampling."""
    sampling = common_pb2.SamplingSettings()
    sampling.CopyFrom(SAMPLING_DEFAULTS)
    sampling.MergeFrom(given)
    for field, (low, high, allowed) in SAMPLING_RANGES.items():
        value = getattr(sampling, field)
        if not low <= value <= high:
            raise InvalidSampling(f"{field} is {value:g}: give a number in {allowed}")
    return sampling


def checked_stops(stops: Iterable[str]) -> tuple[str, ...]:
    """Raises BadRequest."""
    checked = tuple(stops)
    if len(checked) > MAX_STOPS:
        raise BadRequest(f"{len(checked)} stop strings: at most {MAX_STOPS} are allowed")
    for number, stop in enumerate(checked, start=1):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise BadRequest(f"stop string {number} has {len(stop)} characters: give 1 to {MAX_STOP_CHARACTERS}")
    return checked


def answer_budget(n_prompt_tokens: int, max_tokens: int, contexts: Sequence[int]) -> int:
    """How many tokens the answer may have. ``contexts``: what the fleet's nodes (or the model, with no node) can hold.

    Without a limit of its own a turn gets what every node that can hold its prompt offers, so that it can move
    between them. Raises PromptTooLong with the numbers.
    """
    usable = [context for context in contexts if context > n_prompt_tokens]
    if not usable:
        longest = max(contexts)
        raise PromptTooLong(
            f"the prompt has {n_prompt_tokens} tokens with the session's history, and the context holds {longest}, "
            "of which the answer needs at least 1: shorten the prompt or begin a new session"
        )
    if max_tokens == 0:
        return min(usable) - n_prompt_tokens
    return min(max_tokens, max(usable) - n_prompt_tokens)


def page_size(asked: int) -> int:
    return min(asked or DEFAULT_PAGE, MAX_PAGE)


def page_token(key: PageKey) -> str:
    return base64.urlsafe_b64encode(f"{key.updated_at_ms}:{key.session_id}".encode()).decode()


def page_key(token: str) -> PageKey | None:
    """Raises BadRequest for a token that ``page_token`` did not make."""
    if not token:
        return None
    try:
        updated_at_ms, _, session_id = base64.b64decode(token, altchars=b"-_", validate=True).decode().partition(":")
        return PageKey(updated_at_ms=int(updated_at_ms), session_id=name("session_id", session_id))
    except (binascii.Error, ValueError, InvalidName) as e:
        raise BadRequest("page_token is not one that an earlier listing gave: leave it empty to begin again") from e


def key_of(session: SessionRecord) -> PageKey:
    return PageKey(updated_at_ms=session.updated_at_ms, session_id=session.session_id)
