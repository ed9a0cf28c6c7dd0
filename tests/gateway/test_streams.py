"""Streams that outlive what they run on: nodes die, connections break, gateways change."""

from __future__ import annotations

import json

import httpx
import pytest
from openai._streaming import SSEDecoder

from kvferry.client import Client
from kvferry.gateway import sse
from kvferry.gateway.errors import ApiError

pytestmark = pytest.mark.alone  # a node is killed in mid-answer, within a second

BODY = {
    "messages": [{"role": "user", "content": "Tell a long story of a ferry and its captain."}],
    "max_tokens": 48,
    "temperature": 0,
    "stream": True,
}


def read_events(response: httpx.Response, at_most: int = 10**6) -> list[tuple[str, dict]]:
    """(id, data) of each event until [DONE]."""
    events: list[tuple[str, dict]] = []
    data = ""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif line.startswith("id: "):
            events.append((line.removeprefix("id: "), json.loads(data)))
        if data == "[DONE]" or len(events) == at_most:
            break
    return events


def post(base_url: str, at_most: int = 10**6, body: dict = BODY, **headers: str):
    with httpx.stream("POST", f"{base_url}/v1/chat/completions", json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        return read_events(response, at_most)


def text_of(events: list[tuple[str, dict]]) -> str:
    return "".join(choice["delta"].get("content", "") for _, data in events for choice in data["choices"])


@pytest.fixture(scope="module")
def whole(base_url) -> str:
    return text_of(post(base_url))


def test_a_node_killed_in_mid_answer_is_invisible_to_the_official_client(cluster, client, base_url):
    body = BODY | {"max_tokens": 160}  # far from its end when the node is found and killed
    whole = text_of(post(base_url, body=body))
    texts = []
    killed = None
    with Client(cluster.address) as direct:

        def placements(chunk_id: str) -> list[str]:
            return [one.node_id for one in direct.session(f"{chunk_id}.0").details().turns[-1].placements]

        for chunk in client.chat.completions.create(model="any", **body):
            texts.append(chunk.choices[0].delta.content or "")
            if len(texts) == 12:
                (killed,) = placements(chunk.id)
                cluster.kill_node(killed)
            last_id = chunk.id
        assert killed is not None
        assert "".join(texts) == whole
        assert [node_id == killed for node_id in placements(last_id)] == [True, False]
    cluster.ensure_all_live()


def test_a_broken_stream_goes_on_after_the_last_event_its_reader_has(base_url, whole):
    for n_seen in (1, 2, 20, 40):
        first = post(base_url, at_most=n_seen)
        rest = post(base_url, **{"last-event-id": first[-1][0]})
        assert text_of(first) + text_of(rest) == whole
        assert rest[-1][1]["choices"][0]["finish_reason"] == "length"
        assert {data["id"] for _, data in first + rest} == {first[0][1]["id"]}


def test_another_gateway_goes_on_with_what_this_one_began(cluster, base_url, new_gateway, whole):
    first = post(base_url, at_most=10)
    rest = post(new_gateway(cluster.address), **{"last-event-id": first[-1][0]})
    assert text_of(first) + text_of(rest) == whole


def test_a_reader_who_had_it_all_is_told_that_it_is_done(base_url):
    events = post(base_url)
    assert post(base_url, **{"last-event-id": events[-1][0]}) == []


def test_ids_of_others_are_refused(base_url):
    for wrong, status in (("x", 400), ("chatcmpl-none:1", 404), (":1", 400), ("a:1,x", 400)):
        response = httpx.post(f"{base_url}/v1/chat/completions", json=BODY, headers={"last-event-id": wrong})
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_event_ids_are_read_as_they_are_written():
    assert sse.parse_event_id(sse.event_id("chatcmpl-1", [3, 0])) == ("chatcmpl-1", (3, 0))
    with pytest.raises(ApiError):
        sse.parse_event_id("chatcmpl-1:9999999999999")


def test_comments_are_no_events_to_the_official_client():
    pieces = [
        sse.encode({"a": 1}, event_id="x:1"),
        sse.KEEP_ALIVE,
        sse.comment("a node\nwas lost"),
        sse.encode({"b": 2}),
    ]
    events = list(SSEDecoder().iter_bytes(iter(pieces)))
    assert [event.json() for event in events] == [{"a": 1}, {"b": 2}]
