"""Pictures of every page, in light and in dark, for docs/pictures; and how soon the first view is there.

KVFERRY_PICTURES=docs/pictures pytest -m slow tests/gateway/test_dashboard_pictures.py -s
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from browser_kit import (
    ANSWER_MS,
    DEMO_CONVERSATIONS,
    PHONE,
    WHY_NOT,
    browser_is_there,
    browsing,
    take,
    write_drill_report,
)

from kvferry.client import Client, Message
from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.model import DEFAULT_MODEL, ensure_model

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.skipif(not browser_is_there(), reason=WHY_NOT)]

FIRST_VIEW_MS = 1000


def test_every_page_in_light_and_dark_and_the_first_view_within_a_second(tmp_path: Path) -> None:
    pictures = Path(os.environ.get("KVFERRY_PICTURES", tmp_path))
    ensure_model(DEFAULT_MODEL)
    write_drill_report(tmp_path / "drills")
    options = ClusterOptions(
        model=DEFAULT_MODEL, directory=tmp_path, n_nodes=3, kv_memory="256MiB", http_port=0,
        drill_reports=tmp_path / "drills",
    )  # fmt: skip
    with LocalCluster(options) as cluster, browsing() as page:
        talk(cluster.address)
        page.goto(f"http://{cluster.http_address}/")
        page.locator(".card").nth(2).wait_for()
        first_view_ms = page.evaluate("performance.now()")
        print(f"\nfirst view after {first_view_ms:.0f} ms")
        page.wait_for_timeout(2500)
        take(page, pictures, "invitation")
        page.click("#show-me")
        page.locator(".mark:not(.lost)").wait_for(timeout=ANSWER_MS)
        page.locator(".steps .pause").wait_for()
        page.wait_for_timeout(2500)
        take(page, pictures, "chat")
        page.set_viewport_size(PHONE)
        take(page, pictures, "phone")
        page.set_viewport_size({"width": 1200, "height": 1000})
        page.locator(".news", has_text="nothing lost").wait_for(timeout=ANSWER_MS)
        page.click("#tab-cluster")
        page.wait_for_timeout(500)
        page.locator("#timeline button").first.click()
        take(page, pictures, "cluster")
        page.evaluate("document.getElementById('decision').scrollIntoView()")
        take(page, pictures, "decision")
        page.click("#tab-sessions")
        page.locator("#session-rows button").first.click()
        page.locator(".places").wait_for()
        page.mouse.move(0, 0)
        take(page, pictures, "sessions")
        page.click("#tab-store")
        page.locator(".block").first.focus()
        page.keyboard.press("ArrowRight")
        page.locator("#prefix-detail table").wait_for()
        page.mouse.move(0, 0)
        take(page, pictures, "store")
        page.click("#tab-drills")
        page.locator("#drill-list button").click()
        page.locator("#drill-detail table").first.wait_for()
        take(page, pictures, "drills")
    assert first_view_ms <= FIRST_VIEW_MS


def talk(address: str) -> None:
    """Conversations that share what stands at their beginning, some of a tenant's."""
    with Client(address) as client:
        for tenant, opening, questions in DEMO_CONVERSATIONS:
            session = client.create_session(tenant=tenant)
            messages = [Message("system", opening), Message("user", questions[0])]
            session.generate(messages, max_tokens=24).collect()
            for question in questions[1:]:
                session.generate(question, max_tokens=24).collect()
