"""Traces, as a collector gets them over OTLP."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from server.conftest import TIDEWHEEL, RunningServer, StartProcess, StartServer
from server.raw_http import post_raw
from server.waiting import eventually

from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.install_hint import install_command
from tidewheel.server.http.limits import AdmissionLimits
from tidewheel.server.telemetry.tracing import Tracer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A collector of OTLP over HTTP; `spans` are those that came, `services` their services' names."""

    def __init__(self) -> None:
        collector = self
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.paths: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    named = {a.key: a.value.string_value for a in resource.resource.attributes}
                    collector.services.add(named["service.name"])
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                collector.paths.add(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def span(self, generation_id: str) -> Span:
        """The one span of a request, once it has come."""
        found: list[Span] = []

        def has_come() -> bool:
            found[:] = [span for span in self.spans if attributes(span)["gen_ai.response.id"] == generation_id]
            return bool(found)

        eventually(has_come, f"there is no span of {generation_id}")
        (span,) = found
        return span

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    values = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        values[attribute.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def start_traced(start_server: StartServer, collector: Collector) -> Callable[..., RunningServer]:
    def start(**options: Any) -> RunningServer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
            options = {"engine": {"step_s": 0.002}, "served_model_names": ("m",), **options}
            return start_server(otlp_traces_endpoint=collector.url, **options)

    return start


@pytest.fixture(scope="module")
def traced(start_traced: Callable[..., RunningServer]) -> RunningServer:
    return start_traced()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_is_one_span_of_its_callers_trace(
    traced: RunningServer, collector: Collector, streamed: bool
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1", "x-request-id": "mine"}
    body = {"prompt": "SAY(hello)YAS", "n": 2, "temperature": 0.25, "max_tokens": 50, "stream": streamed}
    response = traced.post(COMPLETIONS, body, headers=headers)
    answer_id = response.text.partition('"id":"')[2].partition('"')[0]
    span = collector.span(answer_id)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE_ID, PARENT_ID, "vendor=1")
    assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    assert span.status.code == Status.STATUS_CODE_UNSET
    found = attributes(span)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.25,
        "gen_ai.usage.completion_tokens": 12,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.prompt_tokens": len("SAY(hello)YAS") + 1,
        "gen_ai.response.finish_reasons": ["stop", "stop"],
        "http.request.header.x-request-id": ["mine"],
    }
    assert found.items() >= expected.items()
    latency = {name.removeprefix("gen_ai.latency."): value for name, value in found.items() if "latency" in name}
    assert 0 <= latency["time_in_queue"] <= latency["e2e"]
    assert 0 < latency["time_to_first_token"] <= latency["e2e"]
    assert (
        abs(latency["time_in_model_prefill"] + latency["time_in_model_decode"] - latency["time_in_model_inference"])
        < 1e-6
    )
    assert abs((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 - latency["e2e"]) < 1e-3
    assert not any("hello" in str(value) for value in found.values())
    assert collector.services == {"tidewheel"}
    assert collector.paths == {"/v1/traces"}


def test_a_request_without_a_trace_begins_one(traced: RunningServer, collector: Collector) -> None:
    traces = set()
    for headers in ({}, {"traceparent": "nonsense"}):
        body = {"messages": [{"role": "user", "content": "SAY(hi)YAS"}]}
        span = collector.span(traced.post(CHAT, body, headers=headers).json()["id"])
        assert not span.parent_span_id
        assert attributes(span)["gen_ai.operation.name"] == "chat"
        traces.add(span.trace_id)
    assert len(traces) == 2


def test_requests_on_one_connection_keep_their_traces_apart(traced: RunningServer, collector: Collector) -> None:
    first = traced.post(COMPLETIONS, {"prompt": "a"}, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"})
    second = traced.post(COMPLETIONS, {"prompt": "a"})
    assert collector.span(first.json()["id"]).trace_id.hex() == TRACE_ID
    assert collector.span(second.json()["id"]).trace_id.hex() != TRACE_ID


def test_failures_are_errors_and_clients_that_leave_are_not(
    traced: RunningServer, start_traced: Callable[..., RunningServer], collector: Collector
) -> None:
    def ended(server: RunningServer, prompt: str) -> Span:
        before = len(collector.spans)
        connection = post_raw(server, {"prompt": prompt, "max_tokens": 8000, "stream": True})
        connection.recv(100)
        if "stay" not in prompt:
            connection.close()
        eventually(lambda: len(collector.spans) > before, f"there is no span of {prompt}")
        connection.close()
        return collector.spans[-1]

    short_of_time = start_traced(admission=AdmissionLimits(request_timeout_s=0.3))
    for server, prompt, error in (
        (traced, "stay BREAK(", "generation_failed"),
        (short_of_time, "stay LOOP(", "timeout"),
    ):
        span = ended(server, prompt)
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert attributes(span)["error.type"] == error
    gone = ended(traced, "LOOP(")
    assert gone.status.code == Status.STATUS_CODE_UNSET
    assert "error.type" not in attributes(gone)


def test_spans_are_sent_before_the_end(start_process: StartProcess, collector: Collector) -> None:
    server = start_process("--otlp-traces-endpoint", f"{collector.url}/v1/traces")
    answer = server.client.post(COMPLETIONS, json={"prompt": "SAY(hi)YAS"}).json()
    server.process.terminate()
    assert server.wait() == 0
    collector.span(answer["id"])


def test_a_collector_that_is_not_there_costs_nothing_but_its_spans(
    start_process: StartProcess, unused_port: int
) -> None:
    short = {"OTEL_EXPORTER_OTLP_TIMEOUT": "0.3"}
    server = start_process("--otlp-traces-endpoint", f"http://127.0.0.1:{unused_port}", environment=short)
    assert server.client.post(COMPLETIONS, json={"prompt": "SAY(hi)YAS"}).status_code == 200
    server.process.terminate()
    assert server.wait() == 0


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4318", "http://"])
def test_endpoints_that_cannot_be_used(endpoint: str) -> None:
    with pytest.raises(TidewheelError, match="4318"):
        Tracer(endpoint)


def test_protocols_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(TidewheelError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        Tracer("http://localhost:4318")


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('it is not installed')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    command = [*TIDEWHEEL, "serve", "--otlp-traces-endpoint", "http://localhost:4318"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = "--otlp-traces-endpoint needs OpenTelemetry: " + install_command("otel")
    assert (done.returncode, done.stderr.startswith("tidewheel serve: "), said in done.stderr) == (1, True, True)
