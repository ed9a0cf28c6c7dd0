"""A real browser in front of a real cluster, and pictures of what it shows."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

WHY_NOT = "needs chromium and playwright: apt-get install chromium, pip install -e '.[browser]'"

DESKTOP = {"width": 1200, "height": 850}
PHONE = {"width": 390, "height": 800}

ANSWER_MS = 60_000

OFFICE = "You are the assistant of a harbour office. You answer shortly, and you know the timetables by heart. " * 3
GUIDE = "You are a guide on a ferry. You tell travellers about the islands that they pass, and what grows there. " * 2

DEMO_CONVERSATIONS = (
    ("", OFFICE, ("When does the first ferry go?", "And at night?", "Is there a train?")),
    ("", OFFICE, ("How long is the crossing?", "And back?")),
    ("", OFFICE, ("Which pier?",)),
    ("", GUIDE, ("What is the island to the left?", "Who lives there?")),
    ("acme", OFFICE, ("May I bring a bicycle?", "And a dog?")),
    ("acme", OFFICE, ("Where do I buy a ticket?",)),
)
"""Tenant, what is said at the beginning, and the questions."""


def browser_is_there() -> bool:
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return False
    return CHROMIUM is not None


@contextlib.contextmanager
def browsing(expected: str = "", **settings: Any) -> Iterator[Any]:
    """A page; at the end nothing was wrong on it but what is ``expected``, and it asked nobody but its own server."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(**{"viewport": DESKTOP, "color_scheme": "light", **settings})
        problems: list[str] = []
        hosts: set[str] = set()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        try:
            yield page
            assert [problem for problem in problems if not expected or expected not in problem] == []
            assert len(hosts - {""}) <= 1, "nothing is fetched from elsewhere"
        finally:
            browser.close()


def take(page: Any, folder: Path, name: str, max_bytes: int = 150_000) -> None:
    """A picture in light and in dark, with few colours: a page of text needs no more."""
    from PIL import Image

    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        with Image.open(io.BytesIO(page.screenshot())) as picture:
            small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        path = folder / f"dashboard-{name}-{scheme}.png"
        small.save(path, optimize=True)
        assert path.stat().st_size <= max_bytes, f"{path.name} has {path.stat().st_size} bytes"
    page.emulate_media(color_scheme="light")


def write_drill_report(folder: Path, name: str = "kill-node", **changed: Any) -> None:
    """As `kvferry drill run` does (docs/drills.md)."""
    report = {
        "schema": 1, "name": name, "target": "local", "started": "2026-03-02T10:15:00+00:00", "seconds": 21.4,
        "verdict": "held", "reason": "", "hypothesis": "No token is lost when a node is killed in mid-answer.",
        "nodes": 3, "conversations": 6, "ways": {}, "findings": [], "left_behind": [],
        "limits": [
            {"name": "longest pause", "limit": 5.0, "unit": "s", "measured": 0.41, "held": True},
            {"name": "lost", "limit": 0, "unit": "tokens", "measured": 0, "held": True},
        ],
        "figures": {"tokens_compared": 1152, "tokens_lost": 0, "tokens_duplicated": 0, "longest_pause_s": 0.41},
        "timeline": [
            {"at_s": 0.0, "kind": "asked", "part": "conversation 1", "text": "question 1"},
            {"at_s": 4.2, "kind": "strike", "part": "node-1", "text": "process by SIGKILL"},
            {"at_s": 4.3, "kind": "lost", "part": "conversation 1", "text": "answer 1: node-1 lost after 71 tokens"},
            {"at_s": 4.6, "kind": "placed", "part": "conversation 1", "text": "answer 1: node-2 has it from token 71"},
            {"at_s": 9.8, "kind": "heal", "part": "node-1", "text": "process undone"},
            {"at_s": 21.4, "kind": "finished", "part": "conversation 1", "text": "answer 1: 192 tokens (length)"},
        ],
        **changed,
    }  # fmt: skip
    place = folder / f"20260302T101500Z-{name}-local"
    place.mkdir(parents=True)
    (place / "report.json").write_text(json.dumps(report))
