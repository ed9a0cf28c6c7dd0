"""Models of a hub. No hub can be reached from here: its absence is real, its presence is a stand-in on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from kvferry.engine.errors import FetchFailed
from kvferry.engine.files.hub import download_snapshot

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 64,
    "pytorch_model.bin": b"pickled: must not be fetched",
}

FETCH = """
import sys
from kvferry.engine.files.fetch import fetch_model
from kvferry.engine.errors import EngineError
try:
    record = fetch_model("org/name", revision=sys.argv[1] or None, include=sys.argv[2] or None)
except EngineError as error:
    print(type(error).__name__, error)
else:
    print("fetched", record.path.name, record.revision, sorted(record.files))
"""


def run_fetch(endpoint: str, cache: Path, revision: str = "", include: str = "") -> str:
    """In a process of its own: the hub library reads its endpoint once, on import."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(cache / "home"),
        "KVFERRY_CACHE": str(cache),
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        [sys.executable, "-c", FETCH, revision, include],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class HubStandIn(BaseHTTPRequestHandler):
    """As much of a hub's HTTP interface as the library uses to download one commit."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            entries = [{"type": "file", "path": name, "size": len(body), "oid": "0"} for name, body in FILES.items()]
            self._send(json.dumps(entries).encode(), "application/json", with_body=with_body)
        elif path in (
            "/api/models/org/name",
            f"/api/models/org/name/revision/{COMMIT}",
            "/api/models/org/name/revision/main",
        ):
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
            self._send(body, "application/json", with_body=with_body)
        elif path.startswith("/org/name/resolve/") and path.rpartition("/")[2] in FILES:
            self._send(FILES[path.rpartition("/")[2]], "application/octet-stream", with_body=with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RevisionNotFound" if "/revision/" in path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: bytes, kind: str, *, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body, usedforsecurity=False).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Say nothing."""


@pytest.fixture
def hub_stand_in() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubStandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_without_a_hub_the_answer_says_what_to_do(tmp_path: Path) -> None:
    answer = run_fetch("http://127.0.0.1:9", tmp_path)
    assert answer.startswith("FetchFailed org/name could not be fetched, the hub cannot be reached"), answer
    assert "run the same command again when the network is back" in answer
    assert "copy the model's folder or GGUF file here and name its path" in answer


def test_from_a_stand_in_hub_the_model_files_come_and_pickled_weights_do_not(tmp_path: Path, hub_stand_in: str) -> None:
    answer = run_fetch(hub_stand_in, tmp_path)
    assert answer == f"fetched {COMMIT} {COMMIT} ['config.json', 'model.safetensors', 'tokenizer.json']"
    record = json.loads((tmp_path / "models" / "org--name" / "model.json").read_text())
    body = FILES["model.safetensors"]
    assert record["files"]["model.safetensors"] == {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}


def test_from_a_stand_in_hub_a_revision_can_be_pinned_and_an_unknown_one_is_refused(
    tmp_path: Path, hub_stand_in: str
) -> None:
    assert run_fetch(hub_stand_in, tmp_path, revision=COMMIT).startswith(f"fetched {COMMIT}")
    answer = run_fetch(hub_stand_in, tmp_path / "other", revision="no-such-branch")
    assert answer.startswith("ModelNotFound the hub knows no model org/name at revision 'no-such-branch'"), answer


def test_from_a_stand_in_hub_a_pattern_that_matches_no_weights_is_said_so(tmp_path: Path, hub_stand_in: str) -> None:
    answer = run_fetch(hub_stand_in, tmp_path, include="*Q4_1.gguf")
    assert answer == "FetchFailed org/name holds no safetensors or GGUF files that match '*Q4_1.gguf'"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_is_full_is_not_taken_for_a_hub_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    expected = r"could not be fetched: (the disk is full: )?the cache folder .* KVFERRY_CACHE to .* is kept"
    with pytest.raises(FetchFailed, match=expected):
        download_snapshot("org/name", None, None, tmp_path)
