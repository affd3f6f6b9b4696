"""OpenTelemetry traces: a span for each POST request, with vLLM's names, and a child span for each stage.

Needs the extra `otel`. The SDK exports in a separate thread; its environment variables (`OTEL_…`) apply.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import SamplingParams
from engine.core.params.pooling import UNSAMPLED
from server.observability.context import CURRENT
from server.observability.requests import RequestRecord

FLUSH_SECONDS = 3.0  # time limit for exporting the last spans at shutdown
_propagator = TraceContextTextMapPropagator()


class Traces:
    """Exports spans to a collector by OTLP over HTTP."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the collector's URL; the path is optional."""
        if not urlsplit(endpoint).path.strip("/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {SERVICE_NAME: "quire"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def middleware(self, app: ASGIApp) -> TracingMiddleware:
        return TracingMiddleware(app, self._provider.get_tracer("quire"))

    async def close(self) -> None:
        """Export the remaining spans. An unresponsive collector delays the shutdown by at most `FLUSH_SECONDS`."""
        thread = threading.Thread(target=self._provider.shutdown, name="trace export", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, FLUSH_SECONDS)


class RequestSpan:
    """The span of a request, for the code that handles it."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self.span = tracer, span

    def begin(self, record: RequestRecord, sampling: SamplingParams) -> None:
        """Record that the request goes to the engine."""
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": record.id,
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.usage.prompt_tokens": sum(sample.num_prompt_tokens for sample in record.samples),
            "gen_ai.usage.num_sequences": len(record.samples),
        }
        if sampling is not UNSAMPLED:
            attributes |= {
                "gen_ai.request.n": record.n,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.max_tokens": sampling.max_tokens or 0,
            }
        self.span.set_attributes(attributes)

    def end(self, record: RequestRecord) -> None:
        """End the span after all samples have finished. Times are those of the first sample."""
        span, first = self.span, record.samples[0]
        if not span.is_recording():
            return
        span.set_attribute("gen_ai.usage.completion_tokens", sum(sample.num_tokens for sample in record.samples))
        span.set_attribute("gen_ai.response.finish_reasons", [each.finish_reason or "" for each in record.samples])
        span.set_attribute("gen_ai.latency.e2e", record.ended - record.received)
        times, stages = first.timings, record.stages(first)
        if times is None or "decode" not in stages:
            return
        prefill, decode = stages["prefill"], stages["decode"]
        span.set_attributes(
            {
                "gen_ai.latency.time_in_queue": stages["queue"],
                "gen_ai.latency.time_to_first_token": times.first_token_ts - times.arrival_time,
                "gen_ai.latency.time_in_model_prefill": prefill,
                "gen_ai.latency.time_in_model_decode": decode,
                "gen_ai.latency.time_in_model_inference": prefill + decode,
                "quire.cached_tokens": first.num_cached_tokens,
                "quire.prefix_miss": times.prefix_miss,
                "quire.num_preemptions": times.num_preemptions,
                "quire.num_draft_tokens": times.num_drafted[1],
                "quire.num_accepted_draft_tokens": times.num_drafted[0],
            }
        )
        at = time.time_ns() - int((time.monotonic() - record.received) * 1e9)
        parent = trace.set_span_in_context(span)
        for name, seconds in stages.items():
            stage = self._tracer.start_span(name, parent, start_time=at)
            at += int(max(seconds, 0.0) * 1e9)
            stage.end(at)


class TracingMiddleware:
    """Opens a span for each POST request, as a child of the client's `traceparent` if there is one; returns
    `traceresponse`.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = CURRENT.get()
        if scope["type"] != "http" or scope["method"] != "POST" or context is None:
            await self._app(scope, receive, send)
            return
        parent, status = _propagator.extract(Headers(scope=scope)), 500
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER)
        ids = span.get_span_context()
        context.span, context.trace_id = RequestSpan(self._tracer, span), f"{ids.trace_id:032x}"
        header = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}".encode()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"traceresponse", header)]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            span.set_attribute("http.request.method", "POST")
            span.set_attribute("http.route", getattr(scope.get("route"), "path", ""))
            span.set_attribute("http.response.status_code", status)
            if context.key:
                span.set_attribute("quire.key", context.key)
            if status >= 500:
                span.set_status(StatusCode.ERROR)
            span.end()
