"""Every error that a coordinator knows, as OpenAI's Python client raises it: status, class, code, when to try again."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Self

import httpx
import openai
import pytest

from kvferry.client import Finished, FinishReason, ModelInfo, NodeLost, SampleEvent, Started, Token, TurnEvent
from kvferry.client.errors import CLASS_OF, ClientError, Unavailable
from kvferry.gateway.app import create_app
from kvferry.gateway.context import Context
from kvferry.gateway.models import Models

BAD = (400, openai.BadRequestError)
CONFLICT = (409, openai.ConflictError)
GONE = (404, openai.NotFoundError)
LATER = (429, openai.RateLimitError)
NOT_NOW = (503, openai.InternalServerError)
BUG = (500, openai.InternalServerError)

EXPECTED = {
    **dict.fromkeys(
        [
            "bad_request", "empty_prompt", "invalid_image", "no_vision", "images_too_large", "invalid_message",
            "invalid_name", "invalid_sampling", "invalid_request", "invalid_tools", "invalid_format",
            "format_too_complex", "invalid_address", "invalid_credentials", "prompt_too_long", "invalid_import",
            "index_out_of_range",
        ],
        BAD,
    ),
    "request_too_large": (413, openai.APIStatusError),
    "unauthenticated": (401, openai.AuthenticationError),
    **dict.fromkeys(["refused", "permission_denied"], (403, openai.PermissionDeniedError)),
    **dict.fromkeys(["not_found", "unknown_model", "unknown_session", "unknown_turn"], GONE),
    **dict.fromkeys(["conflict", "session_exists", "turn_exists", "session_busy", "model_mismatch"], CONFLICT),
    **dict.fromkeys(
        [
            "overloaded", "queue_full", "limit_reached", "rate_limited", "too_many_turns", "out_of_kv_memory",
            "slow_client",
        ],
        LATER,
    ),
    **dict.fromkeys(
        [
            "not_now", "unavailable", "no_node", "draining", "starting", "store_unavailable", "registry_unavailable",
            "placements_exhausted",
        ],
        NOT_NOW,
    ),
    **dict.fromkeys(["client_error", "internal"], BUG),
}  # fmt: skip

NEW_NAMES = {
    "prompt_too_long": "context_length_exceeded",
    "unauthenticated": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
    "too_many_turns": "rate_limit_exceeded",
}


class Refusing:
    """A coordinator's client that raises what it was given, or takes a session and tells of a turn that failed."""

    def __init__(self, error: ClientError, *, on_the_way: bool, before: Sequence[TurnEvent] = (Started(3, 0),)) -> None:
        self._error, self._on_the_way, self._before = error, on_the_way, before

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo("m", "", 0, 0, sees_images=False, n_nodes=1, fingerprints=())]

    async def create_session(self, name: str, **_: object) -> Refusing:
        del name
        if not self._on_the_way:
            raise self._error
        return self

    def samples(self, *_: object, **__: object) -> AsyncGenerator[SampleEvent]:
        return self._events()

    def session(self, session_id: str) -> Refusing:
        del session_id
        return self

    async def delete(self) -> None:
        """What was refused leaves nothing."""

    async def _events(self) -> AsyncGenerator[SampleEvent]:
        failed = Finished(
            FinishReason.ERROR, 3, 0, "", 0.0, 0.0, 0.0, 1, error_code=self._error.code, error=str(self._error)
        )
        for event in (*self._before, failed):
            yield SampleEvent(0, "s", event)


def client_of(coordinator: Refusing | Breaking | ClientError, *, on_the_way: bool = False) -> openai.AsyncOpenAI:
    """OpenAI's client, before a gateway in this process."""
    if isinstance(coordinator, ClientError):
        coordinator = Refusing(coordinator, on_the_way=on_the_way)
    app = create_app(lambda: pytest.fail("the lifespan does not run"))
    app.state.context = Context(
        client=coordinator, models=Models(coordinator, lambda: 0.0), dashboard=None, keep_seconds=1,
        keep_responses_seconds=1, new_id=lambda: "i", new_seed=lambda: 1, wall_clock=lambda: 0.0,
    )  # fmt: skip
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="unused", max_retries=0, http_client=http)


async def ask(client: openai.AsyncOpenAI, *, stream: bool = False) -> object:
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=stream)
    return [chunk async for chunk in answer] if stream else answer


def test_no_error_is_forgotten_here():
    assert set(EXPECTED) == set(CLASS_OF)


@pytest.mark.parametrize(
    ("code", "stream"), [*((code, False) for code in sorted(EXPECTED)), ("no_node", True), ("rate_limited", True)]
)
async def test_what_is_refused_has_the_status_and_the_class(code, stream):
    status, kind = EXPECTED[code]
    error = CLASS_OF[code]("No, and this is why.", retry_after_s=2.4)
    with pytest.raises(kind) as caught:
        await ask(client_of(error), stream=stream)
    told = caught.value
    assert (told.status_code, told.code) == (status, NEW_NAMES.get(code, code))
    assert told.body["message"] == "No, and this is why."
    headers = told.response.headers
    if status == 401:
        assert headers["www-authenticate"] == "Bearer"
    else:
        assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "2400")


@pytest.mark.parametrize("code", ["out_of_kv_memory", "format_too_complex", "placements_exhausted"])
async def test_a_turn_that_fails_on_the_way_is_told_alike(code):
    status, kind = EXPECTED[code]
    with pytest.raises(kind) as caught:
        await ask(client_of(CLASS_OF[code]("It failed."), on_the_way=True))
    assert (caught.value.status_code, caught.value.code) == (status, code)


async def test_after_the_first_word_an_error_is_an_event_of_the_stream():
    with pytest.raises(openai.APIError, match=r"It failed\.") as caught:
        await ask(client_of(CLASS_OF["placements_exhausted"]("It failed."), on_the_way=True), stream=True)
    assert caught.value.code == "placements_exhausted"


async def test_after_a_remark_about_a_lost_node_an_error_is_an_event_too():
    lost = Started(3, 0), NodeLost("node-1", "silent", "", 0)
    coordinator = Refusing(CLASS_OF["placements_exhausted"]("It failed."), on_the_way=True, before=lost)
    stream = await client_of(coordinator).completions.create(model="m", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match=r"It failed\.") as caught:
        await anext(aiter(stream))
    assert caught.value.code == "placements_exhausted"


class Breaking:
    """A coordinator's client whose stream breaks in mid-answer."""

    session_id = id = "resp_i"

    async def models(self) -> list[ModelInfo]:
        return await Refusing(ClientError("x"), on_the_way=False).models()

    async def create_session(self, name: str, **_: object) -> Breaking:
        del name
        return self

    def session(self, session_id: str) -> Breaking:
        del session_id
        return self

    async def details(self) -> SimpleNamespace:
        session = SimpleNamespace(session_id=self.id, created_at_ms=0, model="m", forked_from="", open_turn_id="")
        return SimpleNamespace(session=session, turns=())

    def generate(self, *_: object, **__: object) -> Breaking:
        return self

    resume = generate

    async def delete(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> AsyncGenerator[TurnEvent]:
        yield Started(3, 0)
        yield Token(7, "A", 0, content="A")
        raise Unavailable("The coordinator is away.")


async def test_a_response_that_breaks_says_so_with_an_event_of_its_own_kind_and_number():
    stream = await client_of(Breaking()).responses.create(model="m", input="x", stream=True)
    *before, last = [event async for event in stream]
    assert (last.type, last.code, last.message) == ("error", "unavailable", "The coordinator is away.")
    assert [event.sequence_number for event in [*before, last]] == list(range(len(before) + 1))
    assert before[-1].type == "response.output_text.delta"
    again = await client_of(Breaking()).responses.retrieve("resp_i", stream=True, starting_after=2)
    assert [event.sequence_number async for event in again] == list(range(3, len(before) + 1))


class Going(Breaking):
    """One with two models, of which the first one answered whatever is gone on from."""

    async def models(self) -> list[ModelInfo]:
        (first,) = await super().models()
        return [first, dataclasses.replace(first, name="other")]

    async def fork(self, session_id: str) -> Going:
        del session_id
        return self

    async def __aiter__(self) -> AsyncGenerator[TurnEvent]:
        yield Started(3, 0)
        yield Finished(FinishReason.END, 3, 1, "A river.", 0.0, 0.0, 0.0, 1, tail_content="A river.")


async def test_what_follows_a_response_is_of_its_model():
    responses = client_of(Going()).responses
    assert (await responses.create(model="m", input="x", previous_response_id="resp_p")).output_text == "A river."
    with pytest.raises(openai.BadRequestError, match="resp_p is of m") as caught:
        await responses.create(model="other", input="x", previous_response_id="resp_p")
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError, match="not another"):
        await responses.create(model="another", input="x", previous_response_id="resp_p")


async def test_paths_and_methods_that_are_not_there():
    client = client_of(CLASS_OF["internal"]("x"))
    with pytest.raises(openai.NotFoundError) as caught:
        await client.moderations.create(input="x")
    assert caught.value.code == "unknown_url"
