#!/usr/bin/python3
"""Compiles the kernels before anybody waits for them: starts a node that knows nobody, and drains it when it serves.

usage: warm_up.py RELEASE_FOLDER MODEL DONE_FILE; DONE_FILE is written when all went well, as JSON: how many seconds it
took, and the fingerprint under which the release saves rows. A node is ready only after its golden bits were right and
it has run its kernels, so its cache is then complete, made by the same program, user, processor and sandbox as later.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PATIENCE_SECONDS = 60


def ask(kvferry: Path, address: str) -> "subprocess.CompletedProcess[bytes]":
    """The node is there, but the board may be busy with the release that runs."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        status = subprocess.run([kvferry, "node", "status", address, "--json"], stdout=subprocess.PIPE, check=False)
        if status.returncode == 0 or time.monotonic() > until:
            return status
        time.sleep(1)


def main(release: Path, model: str, done: Path) -> None:
    started = time.monotonic()
    kvferry = release / "bin/kvferry"
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        node = subprocess.Popen(
            [kvferry, "node", "run", "--model", model, "--node-id", "warm-up",
             "--listen", "127.0.0.1:0", "--kv-memory", "64MiB", "--context", "256", "--ready-file", ready],
            env={name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_NODE_")},
        )  # fmt: skip
        while not ready.exists():
            if node.poll() is not None:
                sys.exit(f"the node ended with exit code {node.returncode} before it was ready; its reasons are above")
            time.sleep(0.1)
        address = json.loads(ready.read_text())["address"]
        status = ask(kvferry, address)
        node.send_signal(signal.SIGTERM)
        if node.wait():
            sys.exit(f"the node ended with exit code {node.returncode} when it was told to")
        if status.returncode:
            sys.exit("the node could not be asked how it is; the reason is above")
    found = {"seconds": round(time.monotonic() - started, 1), "fingerprint": json.loads(status.stdout)["fingerprint"]}
    done.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
