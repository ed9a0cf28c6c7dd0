"""Traces: off they cost nothing and need nothing; on they have the conventions' names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.proto.v1 import common_pb2
from kvferry.telemetry import gen_ai


def run(script: str) -> str:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def test_while_nobody_asks_for_traces_nothing_of_opentelemetry_is_loaded() -> None:
    script = (
        "import os, sys; [os.environ.pop(n) for n in list(os.environ) if n.startswith('OTEL_')]\n"
        "from kvferry.client import AsyncClient; from kvferry.telemetry import tracing\n"
        "tracing.start_tracing('gateway'); span = tracing.begin('chat', 'client', {'a': 1}); span.enter()\n"
        "span.event('x'); span.fail('y'); span.end(); tracing.follow([('traceparent', 'z')])\n"
        "print(span is tracing.NOTHING, tracing.carried(), [m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    assert run(script) == "True () []"


def test_asking_for_traces_without_the_packages_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from kvferry.telemetry import tracing\n"
        "try: tracing.start_tracing('node', 'http://127.0.0.1:4317')\n"
        "except tracing.TracingMissing as error: print(error)"
    )
    assert "pip install 'kvferry[tracing]'" in run(script)


def test_attributes_have_the_names_of_the_conventions() -> None:
    names = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for name, value in vars(names).items() if name.startswith("GEN_AI_") and isinstance(value, str)}
    sampling = common_pb2.SamplingSettings(temperature=0.5, top_k=3, top_p=0.9, seed=7)
    used = {*gen_ai.of_request("s", "t", sampling, 9, "m"), *gen_ai.of_answer(3, 4, ["end"], 0.1), gen_ai.CACHED_TOKENS}
    assert {name for name in used if name.startswith("gen_ai.")} <= known
    assert {name for name in used if not name.startswith("gen_ai.")} == {"kvferry.turn.id"}
    assert gen_ai.of_request("s", "t", sampling, 9, "m")["gen_ai.request.seed"] == 7
    assert "gen_ai.request.seed" not in gen_ai.of_request("s", "t", common_pb2.SamplingSettings(), 9)
