"""An OpenTelemetry collector in this process: real gRPC on a real socket, and what came is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvferry[tracing]'")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2


@dataclass(frozen=True)
class Seen:
    """One span as it came."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    failed: bool
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens while it is entered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Seen] = []
        self._raw: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *of_what: object) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        with self._lock:
            self._raw.append(request.SerializeToString())
            for resource in request.resource_spans:
                about = values_of(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._spans += [seen(span, about) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Seen]:
        with self._lock:
            return list(self._spans)

    @property
    def raw(self) -> bytes:
        """All that was ever sent."""
        with self._lock:
            return b"".join(self._raw)

    def wait_for(self, condition: Callable[[list[Seen]], bool], seconds: float = 20.0) -> list[Seen]:
        """Spans come in batches, some time after they end."""
        until = time.monotonic() + seconds
        while not condition(self.spans):
            assert time.monotonic() < until, (
                f"these spans came only: {sorted({(s.service, s.name) for s in self.spans})}"
            )
            time.sleep(0.05)
        return self.spans


def seen(span: Any, about: dict[str, Any]) -> Seen:
    return Seen(
        service=about["service.name"],
        instance=about.get("service.instance.id", ""),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes=values_of(span.attributes),
        events=[(event.name, values_of(event.attributes)) for event in span.events],
    )


def values_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(one) for one in found.values] if kind == "array_value" else found
