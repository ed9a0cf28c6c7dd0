"""Who may look at the dashboard: at first only this machine, and never a page of another site."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from kvferry.gateway.dashboard.audience import Audience
from kvferry.gateway.dashboard.guard import guarded
from kvferry.gateway.errors import ApiError


async def shown(request: Request) -> Response:
    del request
    return PlainTextResponse("the cluster")


def refused(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    return PlainTextResponse(str(error), error.status)


def asked(audience: Audience, who: str, url: str, method: str = "GET", **headers: str) -> Response:
    routes = [Route("/", guarded(shown), methods=["GET", "POST"])]
    app = Starlette(routes=routes, exception_handlers={ApiError: refused})
    app.state.context = SimpleNamespace(dashboard=SimpleNamespace(audience=audience))
    return TestClient(app, base_url=url, client=(who, 50_000)).request(method, "/", headers=headers)


@pytest.mark.parametrize("who", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://localhost:8080", "http://[::1]:8080"])
def test_this_machine_may_look(who, url):
    assert asked(Audience.LOOPBACK, who, url).status_code == 200


def test_another_machine_may_not_and_is_told_how_it_could():
    answer = asked(Audience.LOOPBACK, "192.0.2.7", "http://192.0.2.1:8080")
    assert answer.status_code == 403
    assert "--dashboard all" in answer.text
    assert asked(Audience.ALL, "192.0.2.7", "http://192.0.2.1:8080").status_code == 200


def test_a_name_of_another_site_that_leads_here_is_refused():
    assert asked(Audience.LOOPBACK, "127.0.0.1", "http://rebound.example:8080").status_code == 403


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip"])
def test_a_proxy_here_is_not_whom_it_asks_for(header):
    answer = asked(Audience.LOOPBACK, "127.0.0.1", "http://127.0.0.1:8080", **{header: "192.0.2.7"})
    assert answer.status_code == 403


@pytest.mark.parametrize("site", ["same-origin", "none", "cross-site", "same-site"])
def test_another_sites_page_may_not_act(site):
    answer = asked(Audience.ALL, "127.0.0.1", "http://127.0.0.1:8080", "POST", **{"sec-fetch-site": site})
    assert answer.status_code == (200 if site in {"same-origin", "none"} else 403)


def test_a_dashboard_that_is_off_is_not_there():
    assert asked(Audience.OFF, "127.0.0.1", "http://127.0.0.1:8080").status_code == 404
