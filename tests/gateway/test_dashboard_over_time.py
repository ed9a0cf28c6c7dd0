"""A page that stays open while the cluster changes: a real browser, the page's own files, and answers that are made up
here, with a clock that a test moves on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser_kit import WHY_NOT, browser_is_there, browsing

from kvferry.client import NodeInfo
from kvferry.gateway.dashboard.api import PAGES, STATIC

pytestmark = pytest.mark.skipif(not browser_is_there(), reason=WHY_NOT)

STATUS = {
    "nodes": [], "can_kill": False, "has_drills": False, "history": {}, "n_open_turns": 0, "n_sessions": 0,
    "n_snapshots": 0, "snapshot_bytes": 0, "n_failovers": 0, "models": ["m"],
}  # fmt: skip
SESSION = {
    "session_id": "s", "model": "m", "tenant": "", "n_tokens": 4, "n_turns": 1, "open_turn_id": "",
    "last_node_id": "a", "updated_at_ms": 0,
}  # fmt: skip


class Gateway:
    """Answers by path; None: it cannot be reached."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.answers: dict[str, Any] = {
            "/dashboard/cluster": STATUS, "/dashboard/sessions": [], "/dashboard/turns": None,
        }  # fmt: skip
        self.asked: list[str] = []
        self.held: list[Any] = []
        page.route("**/*", self._answer)

    def _answer(self, route: Any) -> None:
        path = route.request.url.split("/", 3)[3]
        name = path.removeprefix("assets/") or "index.html"
        if name.split("#")[0] in PAGES:
            route.fulfill(body=(STATIC / name).read_bytes(), content_type=PAGES[name])
            return
        self.asked.append(f"/{path}")
        if path == "dashboard/chat":
            self.held.append(route)
        elif (answer := self.answers.get(f"/{path}") or self.answers.get(f"/{path}".split("?")[0])) is None:
            route.fulfill(status=503, body=json.dumps({"error": {"message": "It is away."}}))
        else:
            route.fulfill(body=json.dumps(answer), content_type="application/json")

    def pass_time(self, path: str) -> None:
        """Until it is asked again."""
        with self.page.expect_response(lambda response: path in response.url):
            self.page.clock.run_for(2000)


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with browsing(expected="Failed to load resource") as page:
        page.clock.install()
        yield page


@pytest.fixture
def gateway(page: Any) -> Iterator[Gateway]:
    yield Gateway(page)
    page.goto("about:blank")
    page.unroute_all(behavior="wait")


def node(name: str) -> dict[str, Any]:
    return {field.name: 0 for field in dataclasses.fields(NodeInfo)} | {
        "node_id": name, "state": "live", "kernel_path": "x", "store_ok": True, "temperature_celsius": None,
        "store": None, "other_store": False, "other_key": False,
    }  # fmt: skip


def tree(*prefixes: tuple[str, str]) -> dict[str, Any]:
    """Of (id, parent's id); each has one branch more than is told."""
    told = [
        {"id": name, "parent_id": parent, "fingerprint": "f", "namespace": "", "start": 4 * bool(parent),
         "end": 4 + 4 * bool(parent), "n_snapshots": 1, "n_children": 1,
         "files": [{"name": f"{name}.kv", "start": 0, "end": 4, "n_bytes": 64, "used_at_ms": 0}]}
        for name, parent in prefixes
    ]  # fmt: skip
    return {"prefixes": told, "n_snapshots": 1, "n_bytes": 64, "sessions": []}


def rate(page: Any) -> str:
    return page.locator("#numbers div", has_text="tokens a second").locator("dd").inner_text()


def test_the_last_minutes_are_asked_for_until_they_came(gateway):
    gateway.answers["/dashboard/cluster"] = None
    gateway.page.goto("http://gateway/")
    gateway.page.wait_for_function("document.getElementById('connection').textContent")
    gateway.answers["/dashboard/cluster"] = STATUS
    gateway.pass_time("/dashboard/cluster")
    gateway.page.wait_for_selector("#numbers div")
    gateway.pass_time("/dashboard/cluster")
    asked = [path for path in gateway.asked if "cluster" in path]
    assert asked[:2] == ["/dashboard/cluster?history=1"] * 2
    assert asked[-1] == "/dashboard/cluster"


def test_a_node_that_left_the_fleet_draws_no_more_tokens(gateway):
    samples = {"a": [[1, 5.0, 0.1, None]], "b": [[1, 7.0, 0.1, None]]}
    gateway.answers["/dashboard/cluster"] = STATUS | {"nodes": [node("a"), node("b")], "history": samples}
    gateway.page.goto("http://gateway/")
    gateway.page.wait_for_selector("#numbers div")
    assert rate(gateway.page) == "12"
    gateway.answers["/dashboard/cluster"] = STATUS | {"nodes": [node("a")], "history": {"a": samples["a"]}}
    gateway.pass_time("/dashboard/cluster")
    gateway.page.wait_for_function("document.querySelector('#numbers dd').textContent === '1 of 1'")
    assert rate(gateway.page) == "5"


def test_a_session_that_is_gone_leaves_no_row_behind(gateway):
    gateway.answers["/dashboard/sessions"] = [SESSION]
    gateway.page.goto("http://gateway/#sessions")
    gateway.page.wait_for_selector("#session-rows button")
    gateway.page.evaluate("document.querySelector('#session-rows tr').dataset.old = 'yes'")
    for sessions, shown in (([], ".empty"), ([SESSION], "button")):
        gateway.answers["/dashboard/sessions"] = sessions
        gateway.pass_time("/dashboard/sessions")
        gateway.page.wait_for_selector(f"#session-rows {shown}")
    assert gateway.page.locator("#session-rows tr[data-old]").count() == 0


def ask(page):
    page.goto("http://gateway/#chat")
    page.fill("#words", "A river?")
    page.press("#words", "Enter")


def test_another_conversation_begins_when_the_answer_to_this_one_has_ended(gateway):
    page = gateway.page
    ask(page)
    page.wait_for_selector(".assistant")
    assert page.locator("#afresh").is_disabled()
    (route,) = gateway.held
    route.fulfill(body="", content_type="text/event-stream")
    page.wait_for_selector("#afresh:not([disabled])")


def test_an_answer_that_never_came_is_not_awaited(gateway):
    page = gateway.page
    ask(page)
    page.wait_for_selector(".assistant[aria-busy=true]")
    (route,) = gateway.held
    route.abort()
    page.wait_for_selector("#talk .bad")
    assert page.locator("#talk .bad").inner_text() == "The gateway does not answer."
    assert page.locator("[aria-busy=true]").count() == 0


def test_what_was_fetched_below_a_block_goes_with_it(gateway):
    gateway.answers["/dashboard/store"] = tree(("old", ""))
    gateway.answers["/dashboard/store?below=old"] = tree(("below", "old"))
    page = gateway.page
    page.goto("http://gateway/#store")
    page.click("[data-id=old] rect")
    page.click("text=Fetch 1 branch more")
    page.wait_for_selector("[data-id=below]")
    gateway.answers["/dashboard/store"] = tree(("new", ""))
    with page.expect_response(lambda response: response.url.endswith("/store")):
        page.clock.run_for(5000)
    page.wait_for_selector("[data-id=new]")
    assert page.locator("#tree [data-id]").count() == 1
