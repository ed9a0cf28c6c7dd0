"""What a node's service manager hears: a real process, a real socket, an engine whose step does not return."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from listening_manager import ListeningManager

from .running_node import SABOTAGED, Answer, RunningNode, running_node

pytestmark = pytest.mark.alone  # it is about seconds in which a thread has to come around

WATCHDOG_SECONDS = 2.4  # half of it counts as hanging; an idle engine comes around once a second
Prompts = dict[str, list[int]]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(node: RunningNode) -> int:
    return health_pb2_grpc.HealthStub(node.channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status


def test_a_node_is_fed_by_its_engine(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts, own: Callable[[list[int]], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with ListeningManager(tmp_path, WATCHDOG_SECONDS) as manager:
        for name, value in manager.environment.items():
            monkeypatch.setenv(name, value)
        with running_node(tmp_path / "n", smollm2_path, "--threads", "1", program=SABOTAGED) as node:
            # Ready comes last, after the self-test and the kernels' first run.
            manager.wait_for(lambda said: "READY" in said, 5)
            steps = [said["STATUS"] for said in manager.heard if "EXTEND_TIMEOUT_USEC" in said]
            assert "golden bits" in steps[-1]
            assert next(said for said in manager.heard if "WATCHDOG" in said or "READY" in said)["READY"] == "1"

            # A step that takes long is one: nobody knows yet how long a prompt's takes here.
            node.orders.write_text("hang")
            turn = node.start_turn(own(next(iter(prompts.values()))), max_tokens=100, end_token_ids=[])
            manager.is_fed_during(WATCHDOG_SECONDS / 2)
            assert manager.is_fed_during(WATCHDOG_SECONDS / 2)
            node.orders.write_text("")

            # In the middle of an answer it is known how long steps take.
            answer = Answer()
            for response in turn:
                answer.take(response)
                if len(answer.tokens) >= 20:
                    break
            node.orders.write_text("hang")
            manager.wait_for(lambda said: "the engine has not come around" in said.get("STATUS", ""), 30)
            assert not manager.is_fed_during(WATCHDOG_SECONDS / 2)
            assert health_of(node) == NOT_SERVING
            assert "no sign of life" in node.log
            node.orders.write_text("")
            answer.take_all(turn)
            assert answer.indexes == list(range(100))

            # Idle, it comes around as well.
            manager.is_fed_during(WATCHDOG_SECONDS / 2)
            assert manager.is_fed_during(WATCHDOG_SECONDS / 2)
            assert health_of(node) == SERVING
            assert node.stop() == 0
        stopping = next(said for said in manager.heard + manager.listen() if "STOPPING" in said)
        assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 30e6  # the drain's time
