"""The dashboard: small, whole, from nowhere else, without anybody's words; and what a person sees and does in a real
browser, with a pointer, a keyboard, or a phone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser_kit import ANSWER_MS, PHONE, WHY_NOT, browser_is_there, browsing

from kvferry.client import Client, Message
from kvferry.drills.cluster import LocalCluster
from kvferry.gateway.dashboard.api import PAGES

MAX_BYTES = 300_000


in_a_browser = pytest.mark.skipif(not browser_is_there(), reason=WHY_NOT)

TABS = ("cluster", "chat", "sessions", "store", "drills")

HOSTILE = "<img src=x onerror=\"document.title='broken into'\">"


@pytest.fixture(scope="module")
def http(local: LocalCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{local.http_address}", timeout=30) as client:
        yield client


def test_the_page_comes_whole_from_the_gateway_and_is_small(http):
    page = http.get("/")
    files = {name: http.get(f"/assets/{name}") for name in PAGES}
    assert {file.status_code for file in files.values()} == {200}
    assert sum(len(file.content) for file in files.values()) <= MAX_BYTES
    everything = "".join(file.text for file in files.values()).replace("http://www.w3.org/", "")
    assert "http://" not in everything, "nothing is fetched from elsewhere"
    assert "https://" not in everything
    wanted = set(re.findall(r"/assets/([\w.]+)", everything))
    assert wanted <= set(files), "every file that one of them names is there"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_markup_is_never_made_of_text(http):
    markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(")
    assert not any(markup.search(http.get(f"/assets/{name}").text) for name in PAGES)


def test_files_beside_the_page_are_not_served(http):
    for name in ("..%2fapi.py", "api.py", "%2e%2e/app.py"):
        assert http.get(f"/assets/{name}").status_code == 404


def test_a_gateway_that_may_not_kill_does_not(cluster, base_url):
    response = httpx.post(f"{base_url}/dashboard/nodes/node-1/kill", timeout=30)
    assert response.status_code == 403
    assert "kvferry up" in response.json()["error"]["message"]
    assert all(process.is_running for process in cluster.nodes.values())


def test_only_nodes_of_this_cluster_are_killed_and_only_by_its_own_page(local, http):
    assert http.post("/dashboard/nodes/nobody/kill").status_code == 404
    cross_site = {"sec-fetch-site": "cross-site"}
    assert http.post("/dashboard/nodes/node-1/kill", headers=cross_site).status_code == 403
    assert http.post("/dashboard/chat", headers=cross_site, json={"text": "Hello."}).status_code == 403
    assert all(process.is_running for process in local.nodes.values())


def test_it_tells_where_everything_lies_and_nothing_of_what_was_said(local, http):
    word = "Zanzibar"
    with Client(local.address) as client:
        session = client.create_session(tenant="acme")
        messages = [Message("user", f"Tell me about {word}, the island, and its ferries. " * 8)]
        session.generate(messages, max_tokens=8).collect()
    about = http.get(f"/dashboard/sessions/{session.id}").json()
    assert about["places"]["n_tokens"] == about["session"]["n_tokens"] > 16
    assert about["places"]["resident"][0][0] in local.nodes
    tree = until_stored(http, session.id)
    (lying,) = [one for one in tree["sessions"] if one["session_id"] == session.id]
    (prefix,) = [prefix for prefix in tree["prefixes"] if lying["file"] in {file["name"] for file in prefix["files"]}]
    assert (prefix["namespace"], prefix["n_snapshots"]) == ("acme", 1)
    assert prefix["files"][0]["n_bytes"] > 0
    paths = ("/dashboard/cluster?history=1", "/dashboard/sessions", "/dashboard/store")
    assert not any(word in text for text in (*(http.get(path).text for path in paths), str(about)))


def until_stored(http: httpx.Client, session_id: str) -> dict:
    """The store's tree, once the node has saved the session and the coordinator has heard of it."""
    for _ in range(200):
        tree = http.get("/dashboard/store").json()
        if any(one["session_id"] == session_id for one in tree["sessions"]):
            return tree
        time.sleep(0.1)
    raise AssertionError("the session was not saved")


@in_a_browser
def test_a_person_kills_the_node_in_mid_answer_and_sees_the_answer_go_on(local: LocalCluster) -> None:
    from playwright.sync_api import expect

    with browsing() as page:
        page.goto(f"http://{local.http_address}/#chat")
        page.fill("#words", "Write a long story about a ferry and its captain, with many details.")
        page.keyboard.press("Enter")
        kill = page.locator("#kill:not(:disabled)")
        kill.wait_for(timeout=ANSWER_MS)
        killed = kill.inner_text().split()[1]
        answer = page.locator(".assistant")
        expect(answer).to_have_text(re.compile(".{120}", re.DOTALL), timeout=ANSWER_MS)
        kill.click()
        mark = answer.locator(".mark", has_text=f"{killed} died")
        expect(mark).to_contain_text("goes on from token", timeout=ANSWER_MS)
        before = answer.locator(".by").first.inner_text()
        expect(answer.locator(".by").last).to_have_text(re.compile(".{80}", re.DOTALL), timeout=ANSWER_MS)
        assert len(before) > 100, "what the dead node wrote stays"
        page.locator(".steps .pause").wait_for(timeout=10_000)
        page.locator(".news", has_text="nothing lost").wait_for(timeout=ANSWER_MS)
        assert not local.nodes[killed].is_running

        page.click("#tab-cluster")
        page.locator("#timeline rect.pause").first.wait_for(state="attached", timeout=10_000)
        page.locator(".card .state.dead").wait_for(timeout=10_000)
        turn = page.locator("#timeline button").first
        expect(turn).to_have_attribute("aria-label", re.compile(rf"paused .* {killed} was lost"))
        turn.click()
        page.locator("#decision tr.chosen").first.wait_for()
        expect(page.locator("#decision h3")).to_have_count(2)
        expect(page.locator("#decision")).to_contain_text(f"Why {killed}")
    local.ensure_all_live()


@in_a_browser
def test_all_of_it_can_be_reached_by_keyboard_and_the_focus_is_seen(local: LocalCluster) -> None:
    from playwright.sync_api import expect

    with browsing() as page:
        page.goto(f"http://{local.http_address}/")
        page.locator(".card").first.wait_for()
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Tab")
        for tab in TABS:
            expect(page.locator(f"#tab-{tab}")).to_be_focused()
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            assert page.locator(f"#{tab}").is_visible()
            page.keyboard.press("ArrowRight")
        page.click("#tab-store")
        first = page.locator(".block").first
        first.wait_for()
        first.focus()
        page.keyboard.press("Enter")
        expect(page.locator("#prefix-detail h2")).to_contain_text("Tokens 0 to")
        page.keyboard.press("Escape")
        expect(page.locator("#crumbs")).to_have_text("whole store")
        page.click("#tab-drills")
        page.locator("#drill-list button").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#drill-detail")).to_contain_text("process by SIGKILL")


@in_a_browser
def test_light_or_dark_is_the_systems_choice_until_a_person_makes_one(local: LocalCluster) -> None:
    def paper() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    with browsing(color_scheme="dark") as page:
        page.goto(f"http://{local.http_address}/")
        dark = paper()
        page.emulate_media(color_scheme="light")
        light = paper()
        assert dark != light
        page.click("#theme")
        assert paper() == dark
        page.reload()
        assert paper() == dark, "it is remembered"


@in_a_browser
def test_every_text_stands_out_and_a_phone_does_not_scroll_sideways(local: LocalCluster) -> None:
    with browsing(viewport=PHONE) as page:
        page.goto(f"http://{local.http_address}/")
        page.locator(".card").first.wait_for()
        for tab in TABS:
            page.click(f"#tab-{tab}")
            page.wait_for_timeout(300)
            if page.locator(f"#{tab} td button").count():
                page.locator(f"#{tab} td button").first.click()
                page.locator(f"#{tab} section.panel").wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], tab
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert page.evaluate(TOO_FAINT) == [], f"{tab}, {scheme}"


TOO_FAINT = """() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const ink = canvas.getContext("2d", {willReadFrequently: true});
  const layered = (colours) => {  // from the back to the front
    ink.clearRect(0, 0, 1, 1);
    for (const colour of colours) { ink.fillStyle = colour; ink.fillRect(0, 0, 1, 1); }
    return [...ink.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => rgb.map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const faint = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || element.closest("svg, :disabled, .unseen")) continue;
    if (!element.checkVisibility({checkOpacity: true})) continue;
    const behind = [];
    for (let at = element; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const back = luminance(layered(["white", ...behind]));
    const front = luminance(layered(["white", ...behind, getComputedStyle(element).color]));
    const ratio = (Math.max(back, front) + .05) / (Math.min(back, front) + .05);
    if (ratio < 4.5) faint.push([element.tagName, element.className, ratio, element.textContent.slice(0, 30)]);
  }
  return faint;
}"""


@in_a_browser
def test_names_that_others_choose_stay_text(local: LocalCluster) -> None:
    """Model, node, session, tenant, file and drill names, each as markup that would run."""

    def spoilt(value: Any) -> Any:
        """Every text of it hostile, but for words that the page knows."""
        if isinstance(value, dict):
            return {name: spoilt(one) for name, one in value.items()}
        if isinstance(value, list):
            return [spoilt(one) for one in value]
        return f"{HOSTILE}{value}" if isinstance(value, str) and value not in {"live", ""} else value

    def spoil(route: Any) -> None:
        if "text/event-stream" in route.request.headers.get("accept", ""):
            trace = {
                "session_id": HOSTILE, "turn_id": "t", "began_ms": 1e15, "n_prompt": 1, "n_history": 0, "ended_ms": 0,
                "reason": HOSTILE, "n_tokens": 1, "longest_pause_ms": 0, "stays": [],
            }  # fmt: skip
            route.fulfill(body=f"data: {json.dumps(trace)}\n\n", content_type="text/event-stream")
            return
        body = spoilt(route.fetch().json())
        if isinstance(body, dict) and "history" in body:
            body["history"] = {}
        route.fulfill(body=json.dumps(body), content_type="application/json")

    with browsing() as page:
        page.route("**/dashboard/**", spoil)
        page.goto(f"http://{local.http_address}/")
        page.locator(".card .name", has_text="onerror").first.wait_for()
        page.locator("#timeline button").first.click()
        for tab in TABS:
            page.click(f"#tab-{tab}")
            page.wait_for_function("tab => document.getElementById(tab).innerHTML.includes('onerror')", arg=tab)
            assert page.locator("img").count() == 0
        assert page.title() == "kvferry"
