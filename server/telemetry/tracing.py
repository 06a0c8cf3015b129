"""OpenTelemetry traces: one span for each request that reaches the engine, sent to a collector over OTLP.

OpenTelemetry is optional and slow to import, so it is imported only if traces are on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.install_hint import install_command

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NS = 1_000_000_000
_LONGEST_FLUSH_S = 2.0

_trace_headers: ContextVar[Mapping[str, str]] = ContextVar("trace_headers")


class TraceContext:
    """Keeps each request's W3C trace context for `Tracer.record`, which makes a span of it in the same task."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            _trace_headers.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        await self.app(scope, receive, send)


class Tracer:
    """Sends spans to the collector at `endpoint`, in batches, from its own thread.

    Raises TidewheelError if OpenTelemetry is not installed, or if it cannot send to the endpoint.
    """

    def __init__(self, endpoint: str) -> None:
        url = _checked(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            hint = install_command("otel")
            raise TidewheelError(f"--otlp-traces-endpoint needs OpenTelemetry: {hint} ({error})") from error
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {"service.name": "tidewheel"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("tidewheel")
        self._propagator = TraceContextTextMapPropagator()

    @staticmethod
    def context() -> Mapping[str, str]:
        """The trace context that the request of the current task came with."""
        return _trace_headers.get({})

    def record(
        self,
        context: Mapping[str, str],
        attributes: Mapping[str, str | int | float | list[str] | None],
        *,
        elapsed_s: float,
        error: str | None,
    ) -> None:
        """Make the span of a request that has just ended. `error` is what went wrong, if anything."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        ended = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(context)),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=ended - round(elapsed_s * _NS),
        )
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(ended)

    def close(self) -> None:
        """Send the remaining spans, without waiting long for a collector that does not answer."""
        give_up = threading.Timer(_LONGEST_FLUSH_S, self._exporter.shutdown)
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()


def _checked(endpoint: str) -> str:
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise TidewheelError(
            "--otlp-traces-endpoint takes a URL such as http://localhost:4318/v1/traces: spans are sent as OTLP over "
            "HTTP, which collectors take at port 4318"
        )
    for variable in _PROTOCOLS:
        if os.environ.get(variable, "http/protobuf") != "http/protobuf":
            raise TidewheelError(f"--otlp-traces-endpoint sends http/protobuf only, but ${variable} says otherwise")
    return url._replace(path="/v1/traces").geturl() if url.path in ("", "/") else endpoint
