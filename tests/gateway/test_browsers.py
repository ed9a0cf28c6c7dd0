"""A page of another site may have a browser send requests here: none of them is answered."""

from __future__ import annotations

import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from kvferry.gateway.bearer import TokensHandedOn
from kvferry.gateway.browsers import from_own_site
from kvferry.gateway.errors import ApiError

HERE = "http://127.0.0.1:8080"


async def served(request: Request) -> Response:
    del request
    return PlainTextResponse("an answer")


def refused(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    return PlainTextResponse(str(error), error.status)


def status_of(headers: dict[str, str], url: str = HERE, who: str = "127.0.0.1", method: str = "POST") -> int:
    routes = [Route("/", from_own_site(served), methods=["GET", "POST"])]
    app = Starlette(routes=routes, middleware=[Middleware(TokensHandedOn)], exception_handlers={ApiError: refused})
    return TestClient(app, base_url=url, client=(who, 50_000)).request(method, "/", headers=headers).status_code


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site", "origin": HERE},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://[evil"},
    ],
)
def test_a_page_of_another_site_is_refused(headers):
    assert status_of(headers) == 403
    assert status_of(headers, "http://192.0.2.1:8080", "192.0.2.7") == 403


@pytest.mark.parametrize("token", [{}, {"authorization": "Bearer x"}])
def test_a_page_whose_name_was_made_to_lead_here_is_refused(token):
    url = "http://rebound.example:8080"
    assert status_of({"origin": url} | token, url) == 403
    assert status_of({"sec-fetch-site": "same-origin"} | token, url) == 403


def test_programs_are_served_by_whatever_name_they_ask():
    for url in (HERE, "http://host.docker.internal:8080", "http://192.0.2.1:8080"):
        assert status_of({}, url) == 200


def test_a_page_of_this_site_is_served():
    assert status_of({"sec-fetch-site": "same-origin", "origin": HERE}) == 200
    assert status_of({"origin": "http://gateway.example"}, "http://gateway.example", "192.0.2.7") == 200
    forwarded = {"sec-fetch-site": "same-origin", "x-forwarded-for": "192.0.2.7"}
    assert status_of(forwarded, "http://gateway.example") == 200
    assert status_of({"sec-fetch-site": "none"}) == 200, "an address that the user typed"
    assert status_of({"sec-fetch-site": "cross-site"}, method="GET") == 200, "a link"


def test_a_page_with_a_token_had_to_be_allowed_to_send_it():
    assert status_of({"sec-fetch-site": "cross-site", "authorization": "Bearer sk-x"}) == 200


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "responses/resp_x/cancel"])
def test_no_turn_is_started_for_a_page_of_another_site(base_url, path):
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    headers = {"content-type": "text/plain", "sec-fetch-site": "cross-site", "host": "evil.example"}
    answer = httpx.post(f"{base_url}/v1/{path}", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")
    preflight = httpx.options(f"{base_url}/v1/{path}", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in preflight.headers, "a browser sends no token without it"
