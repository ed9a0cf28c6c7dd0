"""How long answers live: those that somebody can ask for outlive his connection, the others end with it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from http.client import HTTPConnection
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from kvferry.client import Client, FinishReason, RawPrompt, Sampling, SessionInfo
from kvferry.client.errors import Conflict, NotFound, Unavailable
from kvferry.gateway.asking import Order, forget
from kvferry.gateway.context import Context
from kvferry.gateway.errors import ApiError
from kvferry.gateway.lifetimes import answered
from kvferry.gateway.sse import EventStream

LONG = "Tell a long story of a ferry and its captain."
CHAT = {"messages": [{"role": "user", "content": LONG}], "temperature": 0}
RESPONSE = {"input": LONG, "temperature": 0}


@pytest.fixture(scope="module")
def direct(cluster) -> Iterator[Client]:
    """The coordinator itself."""
    with Client(cluster.address) as client:
        yield client


def sessions_of(direct: Client) -> dict[str, SessionInfo]:
    return {session.session_id: session for session in direct.list_sessions()}


def wait_until(is_so: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it is not so in time"
        time.sleep(0.05)


def wait_until_over(direct: Client, before: set[str]) -> set[str]:
    """The sessions that came since, when none of them is being answered any more."""
    wait_until(lambda: not any(one.open_turn_id for name, one in sessions_of(direct).items() if name not in before))
    return set(sessions_of(direct)) - before


def ask_and_hang_up(direct: Client, url: str, body: dict) -> None:
    """Once the answer is being computed, whose beginning takes a busy machine a while."""
    before = set(sessions_of(direct))
    where = httpx.URL(url)
    connection = HTTPConnection(where.host, where.port, timeout=60)
    connection.request("POST", where.path, json.dumps(body), {"content-type": "application/json"})
    wait_until(lambda: any(one.open_turn_id for name, one in sessions_of(direct).items() if name not in before), 60)
    connection.close()


def read_stream(response: httpx.Response, at_most: int = 10**6) -> list[tuple[str, dict]]:
    """(id, data) of each event of a response."""
    events: list[tuple[str, dict]] = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = json.loads(line.removeprefix("data: "))
        elif line.startswith("id: "):
            events.append((line.removeprefix("id: "), data))
        if len(events) == at_most:
            break
    return events


def begin_stream(base_url: str, **fields: object) -> list[tuple[str, dict]]:
    """The first events of a response whose reader then loses his connection."""
    body = RESPONSE | {"stream": True, "max_output_tokens": 40} | fields
    with httpx.stream("POST", f"{base_url}/v1/responses", json=body, timeout=60) as response:
        return read_stream(response, at_most=6)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": ""}], "max_tokens": 10**6, "stop": [""]}),
        ("chat/completions", CHAT | {"temperature": -3}),
        ("chat/completions", CHAT | {"temperature": -3, "stream": True, "n": 2}),
        ("completions", {"prompt": ["One", ""], "max_tokens": 500}),
        ("responses", {"input": ""}),
        ("responses", {"input": "", "stream": True}),
        ("responses", {"input": "", "background": True}),
        ("responses", RESPONSE | {"temperature": -3}),
    ],
)
def test_a_refused_request_leaves_nothing(direct, base_url, path, body):
    before = set(sessions_of(direct))
    assert httpx.post(f"{base_url}/v1/{path}", json=body).status_code == 400
    wait_until(lambda: set(sessions_of(direct)) <= before)


async def test_a_prompt_whose_session_is_gone_does_not_hide_that_anothers_is_busy():
    class Deleting:
        def __init__(self, session_id: str) -> None:
            self.id = session_id

        async def delete(self) -> None:
            raise {"r.0": NotFound, "r.1": Conflict, "r.2": Unavailable}[self.id](self.id)

    order = Order(prompts=[RawPrompt("")] * 3, n=1, model="", sampling=Sampling(), max_tokens=1, stop=())
    with pytest.raises(Conflict):
        await forget(SimpleNamespace(session=Deleting), "r", order)


def test_a_refused_next_response_leaves_no_branch(direct, base_url):
    first = httpx.post(f"{base_url}/v1/responses", json=RESPONSE | {"max_output_tokens": 2}).json()
    before = set(sessions_of(direct))
    refused = httpx.post(f"{base_url}/v1/responses", json={"input": "", "previous_response_id": first["id"]})
    assert refused.status_code == 400
    wait_until(lambda: set(sessions_of(direct)) == before)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT | {"max_tokens": 1500}),
        ("chat/completions", CHAT | {"max_tokens": 1500, "n": 2}),
        ("completions", {"prompt": [LONG, "Two"], "max_tokens": 1500, "temperature": 0}),
    ],
)
def test_a_whole_answer_whose_client_hung_up_is_not_computed_to_its_end(direct, base_url, path, body):
    before = set(sessions_of(direct))
    ask_and_hang_up(direct, f"{base_url}/v1/{path}", body)
    begun = wait_until_over(direct, before)
    reasons = {turn.finish_reason for name in begun for turn in direct.session(name).details().turns}
    assert FinishReason.CANCELLED in reasons
    assert FinishReason.LENGTH not in reasons


@pytest.mark.parametrize("store", [True, False])
def test_a_whole_response_whose_client_hung_up_is_gone(direct, base_url, store):
    before = set(sessions_of(direct))
    ask_and_hang_up(direct, f"{base_url}/v1/responses", RESPONSE | {"store": store})
    wait_until(lambda: set(sessions_of(direct)) <= before)


def test_a_response_that_is_not_stored_goes_when_its_stream_was_picked_up_and_told(base_url):
    first = begin_stream(base_url, store=False)
    last_id = first[-1][0]
    url = f"{base_url}/v1/responses/{last_id.rpartition(':')[0]}"
    again = httpx.post(
        f"{base_url}/v1/responses", json=RESPONSE | {"stream": True, "store": False},
        headers={"last-event-id": last_id},
    )  # fmt: skip
    last = json.loads(again.text.rpartition("data: ")[2].partition("\n")[0])
    assert last["response"]["store"] is False
    assert httpx.get(url).status_code == 404


def test_a_response_that_is_not_stored_is_told_once(base_url):
    url = f"{base_url}/v1/responses/{begin_stream(base_url, store=False)[-1][0].rpartition(':')[0]}"
    told: list[dict] = []

    def is_gone() -> bool:
        answer = httpx.get(url)
        if answer.status_code == 200:
            told.append(answer.json())
        return answer.status_code == 404

    wait_until(is_gone, 30)
    assert [one["status"] for one in told].count("incomplete") in {1, 2}, "deleted when it was told"
    assert not any(one["store"] for one in told)


def test_a_browsers_event_source_goes_on_where_it_was(base_url):
    whole = begin_stream(base_url)
    response_id = whole[0][0].rpartition(":")[0]
    url = f"{base_url}/v1/responses/{response_id}?stream=true"
    with httpx.stream("GET", url, timeout=60) as response:
        events = read_stream(response)
    with httpx.stream("GET", url, headers={"last-event-id": events[9][0]}, timeout=60) as response:
        assert read_stream(response) == events[10:]
    ahead = httpx.get(f"{url}&starting_after=20", headers={"last-event-id": events[9][0]})
    assert ahead.text.count("\nid: ") == len(events) - 21, "the header is of an earlier stream than the address"
    assert httpx.get(url, headers={"last-event-id": events[-1][0]}).status_code == 204, "it asks no more then"
    for wrong in ("x", "resp_other:3"):
        assert httpx.get(url, headers={"last-event-id": wrong}).status_code == 400


def test_what_was_told_its_id_outlives_its_reader(direct, base_url):
    before = set(sessions_of(direct))
    response_id = begin_stream(base_url)[0][0].rpartition(":")[0]
    wait_until_over(direct, before)
    response = httpx.get(f"{base_url}/v1/responses/{response_id}").json()
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 40)


async def test_who_hangs_up_while_his_turn_just_begins_has_it_ended_as_well():
    """Neither a stream has a first word then, nor does the coordinator know of the turn."""
    told = asyncio.Event()
    n_asked, closed = 0, asyncio.Event()

    async def frames() -> AsyncGenerator[bytes]:
        try:
            yield b"data: {}"
        finally:
            closed.set()

    async def work() -> Response:
        await told.wait()
        return await EventStream.begun(frames())

    async def end() -> None:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 1:
            raise NotFound("not yet")
        told.set()

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    context = Context(
        client=None, models=None, dashboard=None, keep_seconds=1, keep_responses_seconds=1, new_id=str,
        new_seed=int, wall_clock=time.time,
    )  # fmt: skip
    with pytest.raises(ApiError) as caught:
        await answered(Request({"type": "http"}, gone), context, work(), if_refused=end, if_left=end)
    assert caught.value.status == 499
    async with asyncio.timeout(10):
        await closed.wait()
    assert n_asked == 2
