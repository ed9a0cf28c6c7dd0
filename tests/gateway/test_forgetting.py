"""What a gateway leaves behind: sessions that nobody will ask for say themselves when they may go."""

from __future__ import annotations

import time

import openai
import pytest

from kvferry.client import Client

QUESTION = [{"role": "user", "content": "Name a river."}]


def test_sessions_say_when_they_may_be_forgotten(cluster, client):
    chat = client.chat.completions.create(model="any", messages=QUESTION, max_tokens=2, n=2)
    text = client.completions.create(model="any", prompt="One", max_tokens=2)
    response = client.responses.create(model="any", input="Name a river.", max_output_tokens=2)
    with Client(cluster.address) as direct:
        expiry = {session.session_id: session.expires_after_s for session in direct.list_sessions()}
    assert [seconds for name, seconds in expiry.items() if name.startswith(chat.id)] == [3600, 3600]
    assert expiry[f"{text.id}.0"] == 3600
    assert expiry[response.id] == 30 * 86_400


def test_a_response_that_is_not_to_be_stored_is_deleted(cluster, client):
    response = client.responses.create(model="any", input="Name a river.", max_output_tokens=2, store=False)
    assert response.store is False
    *_, last = client.responses.create(model="any", input="Name one.", max_output_tokens=2, store=False, stream=True)
    until = time.monotonic() + 30
    for gone in (response.id, last.response.id):
        while True:
            try:
                client.responses.retrieve(gone)
            except openai.NotFoundError:
                break
            assert time.monotonic() < until, "a response that is not to be stored is still there"
            time.sleep(0.05)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="any", input="x", background=True, store=False)


@pytest.mark.slow  # half a minute of what a busy day does
def test_the_registry_does_not_grow_with_requests(cluster, new_gateway):
    base_url = new_gateway(cluster.address, "--keep-seconds", "1")
    with Client(cluster.address) as direct, openai.OpenAI(base_url=f"{base_url}/v1", api_key="unused") as client:
        before = direct.status().n_sessions
        counts = []
        for _ in range(60):
            client.chat.completions.create(model="any", messages=QUESTION, max_tokens=2, n=2)
            client.completions.create(model="any", prompt="One", max_tokens=2)
            time.sleep(0.3)
            counts.append(direct.status().n_sessions - before)
        assert max(counts) < 90, "180 sessions were begun, and most of them have to be gone"
        until = time.monotonic() + 20
        while direct.status().n_sessions > before:
            assert time.monotonic() < until
            time.sleep(0.2)
