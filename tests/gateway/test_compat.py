"""Programs that speak the OpenAI API move here by changing one URL: every feature with every client, from a run."""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import platformdirs
import pytest

from kvferry.client import Client
from kvferry.drills.cluster import ClusterOptions, LocalCluster

sys.path.insert(0, str(Path(__file__).parent))

import compat_pydantic_ai
import compat_python
from compat_table import FEATURES, NOT_THERE, PAGE, REFUSED, WORKS, rendered

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # nodes are killed in mid-answer, some with each client

NODE_OPENAI = "7.59.0"

NPM_SECONDS = 120

CELL_SECONDS = 60


@pytest.fixture(scope="module")
def killer(cluster) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which the node of the next answer is killed once some of it has come; it fails when none was."""

    @contextlib.contextmanager
    def failover() -> Iterator[None]:
        with Client(cluster.address) as direct:
            before = {session.session_id for session in direct.list_sessions(limit=50)}
        killed: list[str] = []
        thread = threading.Thread(target=_kill_next, args=(cluster, before, killed))
        thread.start()
        try:
            yield
        finally:
            thread.join()
            cluster.ensure_all_live()
        assert killed, "no node was killed in mid-answer"
        with Client(cluster.address) as direct:
            placements = direct.session(killed[0]).details().turns[-1].placements
        assert len(placements) > 1, "the answer was not moved"

    return failover


def _kill_next(cluster: LocalCluster, before: set[str], killed: list[str]) -> None:
    until = time.monotonic() + CELL_SECONDS / 2
    with Client(cluster.address) as direct:
        while time.monotonic() < until:
            for session in direct.list_sessions(limit=5):
                if session.session_id in before or not session.open_turn_id:
                    continue
                placements = direct.session(session.session_id).details().turns[-1].placements
                if placements:
                    time.sleep(0.25)  # some tokens
                    cluster.kill_node(placements[-1].node_id)
                    killed.append(session.session_id)
                    return
            time.sleep(0.01)


@pytest.fixture(scope="module")
def seeing_url(chat_model, tmp_path_factory, new_gateway) -> Iterator[str]:
    """A gateway before a small model that sees."""
    options = ClusterOptions(
        model=str(chat_model("qwen3vlmoe_bf16")), directory=tmp_path_factory.mktemp("seeing"), n_nodes=1,
        kv_memory="64MiB",
    )  # fmt: skip
    with LocalCluster(options) as running:
        yield f"{new_gateway(running.address)}/v1"


@pytest.fixture(scope="module")
def picture_url(golden: Path) -> str:
    """A photograph as a data URL."""
    picture = golden / "vl_preprocess" / "f_resized.png"
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


@pytest.fixture(scope="module")
def case(base_url, seeing_url, picture_url, killer) -> Iterator[compat_python.Case]:
    with (
        openai.OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0, timeout=CELL_SECONDS) as client,
        openai.OpenAI(base_url=seeing_url, api_key="unused", max_retries=0, timeout=CELL_SECONDS) as seeing,
    ):
        yield compat_python.Case(client, seeing, picture_url, killer)


@pytest.fixture(scope="module")
def node_folder() -> Path:
    """Where OpenAI's Node client is installed, once for all runs."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm, which are not installed here")
    folder = platformdirs.user_cache_path("kvferry") / "tests" / f"node-openai-{NODE_OPENAI}"
    if not (folder / "node_modules" / "openai").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"openai@{NODE_OPENAI}"]
        done = subprocess.run(install, capture_output=True, text=True, timeout=NPM_SECONDS, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot install openai here: {done.stderr.strip().splitlines()[-1:]}")
    return folder


class NodeChecks:
    """The program with the Node client: one check at a time."""

    def __init__(self, process: subprocess.Popen[str], failover: Callable[[], object]) -> None:
        self._process, self._failover = process, failover

    def run(self, feature: str) -> str | None:
        """What was wrong."""
        self._tell(feature)
        line = self._read()
        if line != "kill":
            return json.loads(line)["error"]
        with self._failover():
            self._tell("go")
            return json.loads(self._read())["error"]

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program with the Node client ended"
        return line.strip()


@pytest.fixture(scope="module")
def node(node_folder, base_url, seeing_url, picture_url, killer) -> Iterator[NodeChecks]:
    program = Path(__file__).with_name("compat_node.mjs")
    command = ["node", str(program), str(node_folder), f"{base_url}/v1", seeing_url, picture_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield NodeChecks(process, killer)
        process.kill()


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], str]:
    """Filled by the tests of single features."""
    return {}


ALL = [feature for features in FEATURES.values() for feature in features]


def right(feature: str) -> str:
    return REFUSED if feature.startswith("no_") else WORKS


@pytest.mark.parametrize("feature", ALL)
def test_the_python_client(feature, case, outcomes):
    outcomes[feature, "python"] = "fails"
    compat_python.CHECKS[feature](case)
    outcomes[feature, "python"] = right(feature)


@pytest.mark.parametrize("feature", ALL)
def test_the_node_client(feature, node, outcomes):
    outcomes[feature, "node"] = "fails"
    assert node.run(feature) is None
    outcomes[feature, "node"] = right(feature)


@pytest.mark.parametrize("feature", ALL)
def test_an_agent_framework(feature, case, outcomes):
    check = compat_pydantic_ai.CHECKS.get(feature)
    outcomes[feature, "pydantic_ai"] = NOT_THERE if check is None else "fails"
    if check is not None:
        compat_pydantic_ai.run(check, case)
        outcomes[feature, "pydantic_ai"] = right(feature)


def test_the_page_says_what_the_run_said(outcomes):
    if not outcomes:
        pytest.skip("no feature was run")
    versions = {
        "python": importlib.metadata.version("openai"),
        "node": NODE_OPENAI,
        "pydantic_ai": importlib.metadata.version("pydantic-ai-slim"),
    }
    page = rendered(outcomes, versions)
    if os.environ.get("KVFERRY_WRITE_COMPAT"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page
