"""The documentation site is built without a network, has no dead link, and asks no other server for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="the site needs the extra `docs`")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_builds_strictly_and_is_complete_by_itself(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}
    for name, text in pages.items():
        fetched = re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert not fetched, f"{name} fetches {fetched}"
    for page in (ROOT / "docs").glob("*.md"):
        assert f"{page.stem}.html" in pages, f"{page.name} is not in the site"
        assert f": {page.name}\n" in (ROOT / "mkdocs.yml").read_text(), f"{page.name} has no place in the menu"
    assert "create_session" in pages["reference/python.html"]
    assert "CreateSessionRequest" in pages["reference/grpc.html"]
