"""The dashboard in a real browser: what a person sees while a node dies."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.model import DEFAULT_MODEL, ensure_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

ANSWER_MS = 60_000

MAX_BYTES = 300 << 10


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Iterator[LocalCluster]:
    """What `kvferry up` starts: two nodes and a gateway that may kill them."""
    ensure_model(DEFAULT_MODEL)
    options = ClusterOptions(
        model=DEFAULT_MODEL, directory=tmp_path_factory.mktemp("up"), n_nodes=2, kv_memory="256MiB", http_port=0
    )
    with LocalCluster(options) as running:
        yield running


def test_the_page_comes_whole_from_the_gateway_and_is_small(local):
    with httpx.Client(base_url=f"http://{local.http_address}") as client:
        page = client.get("/")
        names = ["app.js", "timeline.js", "chat.js", "style.css"]
        files = [client.get(f"/assets/{name}") for name in names]
    assert [file.status_code for file in (page, *files)] == [200] * 5
    assert sum(len(file.content) for file in (page, *files)) <= MAX_BYTES
    everything = "".join(file.text for file in (page, *files)).replace("http://www.w3.org/", "")
    assert "http://" not in everything, "nothing is fetched from elsewhere"
    assert "https://" not in everything
    assert "default-src 'self'" in page.headers["content-security-policy"]


def test_files_beside_the_page_are_not_served(local):
    for name in ("..%2fapi.py", "api.py", "%2e%2e/app.py"):
        assert httpx.get(f"http://{local.http_address}/assets/{name}").status_code == 404


def test_a_gateway_that_may_not_kill_does_not(cluster, base_url):
    response = httpx.post(f"{base_url}/dashboard/nodes/node-1/kill")
    assert response.status_code == 403
    assert "kvferry up" in response.json()["error"]["message"]
    assert all(process.is_running for process in cluster.nodes.values())


def test_only_nodes_of_this_cluster_are_killed_and_only_by_its_own_page(local):
    url = f"http://{local.http_address}/dashboard/nodes"
    assert httpx.post(f"{url}/nobody/kill").status_code == 404
    assert httpx.post(f"{url}/node-1/kill", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert all(process.is_running for process in local.nodes.values())


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed here")
def test_a_person_kills_the_node_in_mid_answer_and_sees_the_answer_go_on(local, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    pictures = Path(os.environ.get("KVFERRY_PICTURES", tmp_path))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 850}, color_scheme="light")
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(f"http://{local.http_address}/#chat")
        page.fill("#words", "Write a long story about a ferry and its captain, with many details.")
        page.keyboard.press("Enter")
        kill = page.locator("#kill:not(:disabled)")
        kill.wait_for(timeout=ANSWER_MS)
        killed = kill.inner_text().split()[1]
        sync_api.expect(page.locator(".assistant").first).to_have_text(
            re.compile(".{120}", re.DOTALL), timeout=ANSWER_MS
        )
        kill.click()
        page.locator(".news.bad", has_text="is gone").wait_for(timeout=ANSWER_MS)
        page.locator(".news", has_text="goes on from token").wait_for(timeout=ANSWER_MS)
        sync_api.expect(page.locator(".assistant").last).to_have_text(
            re.compile(".{200}", re.DOTALL), timeout=ANSWER_MS
        )
        take(page, pictures, "chat")
        page.locator(".news", has_text="nothing lost").wait_for(timeout=ANSWER_MS)
        assert not local.nodes[killed].is_running
        page.click("#tab-cluster")
        page.locator("#timeline rect.pause").first.wait_for(state="attached", timeout=10_000)
        page.locator("#timeline g").first.click()
        page.locator("#decision tr.chosen").first.wait_for()
        page.locator(".state.dead").wait_for(timeout=10_000)
        take(page, pictures, "cluster")
        page.keyboard.press("Tab")
        page.focus("#tab-cluster")
        page.keyboard.press("ArrowRight")
        page.locator("#session-rows tr").first.click()
        page.locator("#session-detail table").wait_for()
        take(page, pictures, "sessions")
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "a phone does not scroll sideways"
        browser.close()
    assert problems == []
    local.ensure_all_live()


def take(page, folder: Path, name: str) -> None:
    """A picture in light and in dark."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=folder / f"dashboard-{name}-{scheme}.png")
