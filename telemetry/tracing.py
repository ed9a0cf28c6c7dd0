"""Spans by OpenTelemetry, across processes by W3C traceparent. Off, and nothing of it is imported, until
``start_tracing`` finds that somebody wants them.

While it is off, every call here returns at once and every span is NOTHING. Spans hold ids, counts and settings, never
text of a conversation. Names are those of the semantic conventions where there are any (``gen_ai.py``), else kvferry.*.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, ClassVar, Final, Literal

Attributes = Mapping[str, str | int | float | bool | list[str]]
Metadata = tuple[tuple[str, str], ...]
Kind = Literal["server", "client", "internal"]

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own ways to say where spans go."""

EXPORT_SECONDS: Final = 5
"""For a collector that does not answer: what it does not take is dropped, nothing here waits for it."""

HERE: Final = object()
"""As a parent: the span of this task, or what its caller's traceparent named."""

_tracer: Any = None


class TracingMissing(Exception):
    """Traces are asked for and the packages for them are not installed."""

    code: ClassVar[str] = "tracing_missing"
    exit_code: ClassVar[int] = 1


class Span:
    """A piece of work. All methods may be called by any thread; after ``end`` they have no effect."""

    __slots__ = ("_span",)

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def set(self, attributes: Attributes) -> None:
        """More of them."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        """Its name was not known at the beginning."""
        if self._span is not None:
            self._span.update_name(name)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something happened at this moment."""
        if self._span is not None:
            self._span.add_event(name, attributes)

    def fail(self, kind: str) -> None:
        """It came to nothing; ``kind``: a code of ours, never a sentence that may quote somebody."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", kind)
            self._span.set_status(StatusCode.ERROR, kind)

    def end(self) -> None:
        """It is over."""
        span, self._span = self._span, None
        if span is not None:
            span.end()

    def enter(self) -> None:
        """From now on it is HERE for this task."""
        if self._span is not None:
            from opentelemetry import context, trace

            context.attach(trace.set_span_in_context(self._span))

    @property
    def as_parent(self) -> object:
        """For spans of other threads."""
        if self._span is None:
            return None
        from opentelemetry import trace

        return trace.set_span_in_context(self._span)


NOTHING: Final = Span()


def start_tracing(role: str, endpoint: str | None = None, instance: str = "") -> None:
    """Send spans to an OTLP collector's gRPC port, http://HOST:4317, where ``endpoint`` or the environment names one.

    OTEL_… sets the rest: sampling, batches, headers, certificates, OTEL_SDK_DISABLED. Raises TracingMissing.
    """
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingMissing(
            f"traces are asked for and {error.name} is not installed: pip install 'kvferry[tracing]'"
        ) from error
    about = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or f"kvferry-{role}"}
    about |= {"service.version": version("kvferry")} | ({"service.instance.id": instance} if instance else {})
    provider = TracerProvider(resource=Resource.create(about))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)))
    use_provider(provider)


def use_provider(provider: Any) -> None:
    """Spans of the client library go where a program's own TracerProvider sends them. None: no spans from now on."""
    global _tracer  # noqa: PLW0603 - one process, one place to send to
    _tracer = None if provider is None else provider.get_tracer("kvferry", version("kvferry"))


def is_on() -> bool:
    """Whether anybody gets spans."""
    return _tracer is not None


def begin(
    name: str,
    kind: Kind = "internal",
    attributes: Attributes | None = None,
    parent: object = HERE,
    seconds_ago: float = 0.0,
) -> Span:
    """A span that began now, or some seconds ago. ``parent``: HERE, or some span's ``as_parent``; None: it has none."""
    if _tracer is None:
        return NOTHING
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

    context: Any = None if parent is HERE else parent or Context()
    began_ns = time.time_ns() - int(seconds_ago * 1e9)
    return Span(
        _tracer.start_span(
            name, context=context, kind=SpanKind[kind.upper()], attributes=attributes, start_time=began_ns
        )
    )


def carried(span: Span | None = None) -> Metadata:
    """What tells the other end of a call of ``span``, or of what is HERE: a traceparent, as gRPC metadata."""
    if _tracer is None:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    found: dict[str, str] = {}
    context: Any = None if span is None else span.as_parent
    TraceContextTextMapPropagator().inject(found, context=context)
    return tuple(found.items())


def follow(headers: Iterable[tuple[str, str | bytes]] | None) -> None:
    """HERE is what a caller's headers or metadata say, for the rest of this task; nothing, if they do not."""
    if _tracer is None:
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {k: v for k, v in headers or () if k in {"traceparent", "tracestate"} and isinstance(v, str)}
    context.attach(TraceContextTextMapPropagator().extract(carrier, context=context.Context()))
