"""Traces as an OpenTelemetry collector gets them."""

import contextlib
import gzip
import itertools
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from engine.errors import ConfigError
from server.observability.logs import RequestFields
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, run_server

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans, by their names."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans: list[Any] = []
        self.spans = spans
        self.paths: list[str] = []
        paths = self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                paths.append(self.path)
                request = ExportTraceServiceRequest.FromString(body)
                spans.extend(span for r in request.resource_spans for s in r.scope_spans for span in s.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    yield collector
    collector.server.shutdown()
    thread.join(60)
    collector.server.server_close()


@contextlib.contextmanager
def traced(collector: Collector) -> Iterator[Live]:
    """When it ends, all spans have been sent."""
    with run_server(FakeEngine(), ServerConfig(otlp_traces_endpoint=collector.url)) as live:
        yield live


def attributes(span: Any) -> dict[str, Any]:
    def value(given: Any) -> Any:
        kind = given.WhichOneof("value")
        if kind == "array_value":
            return [value(each) for each in given.array_value.values]
        return getattr(given, kind)

    return {each.key: value(each.value) for each in span.attributes}


def test_a_request_is_a_span_with_its_stages_below(collector: Collector) -> None:
    with traced(collector) as live:
        body = {"prompt": "Hi", "max_tokens": 5, "temperature": 0.5, "n": 2}
        answer = live.http.post("/v1/completions", json=body)
    (span,) = collector.named("llm_request")
    assert collector.paths == ["/v1/traces"]
    found = attributes(span)
    expected = {
        "gen_ai.request.id": answer.json()["id"],
        "gen_ai.request.model": "toy",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": 4,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert {key: found[key] for key in expected} == expected
    for name in ("e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode"):
        assert found[f"gen_ai.latency.{name}"] >= 0
    stages = [collector.named(name)[0] for name in ("preparation", "queue", "prefill", "decode")]
    assert all(stage.parent_span_id == span.span_id for stage in stages)
    for stage, following in itertools.pairwise(stages):
        assert stage.end_time_unix_nano == following.start_time_unix_nano
    assert "Hi" not in str(found.values())


def test_a_trace_is_continued_and_told_of(collector: Collector) -> None:
    with traced(collector) as live:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        answer = live.http.post("/v1/chat/completions", json=body, headers=headers)
        unsampled = live.http.post("/v1/completions", json={}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        refused = live.complete("x" * 600)
        live.http.get("/health")
    continued, failed = sorted(collector.named("llm_request"), key=lambda span: span.start_time_unix_nano)
    assert continued.trace_id.hex() == TRACE
    assert continued.parent_span_id.hex() == PARENT
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{continued.span_id.hex()}-01"
    assert unsampled.headers["traceresponse"].endswith("-00")
    assert attributes(failed)["http.response.status_code"] == refused.status_code == 400


def test_log_lines_name_the_trace(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("uvicorn.access")
    fields = RequestFields()
    access.addFilter(fields)
    try:
        with caplog.at_level(logging.INFO, "uvicorn.access"), traced(collector) as live:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            live.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    finally:
        access.removeFilter(fields)
    (record,) = [record for record in caplog.records if record.name == "uvicorn.access"]
    assert record.__dict__["fields"]["trace_id"] == TRACE


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint must be a URL"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")
