"""Running and recently finished requests: where their time went, and the usage of each key."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine import SamplingParams
from server.metrics import SampleWatch
from server.observability.context import CURRENT, RequestContext
from server.owned_store import OwnedStore

MAX_ENDED = 1000  # finished requests that are remembered; of the owner who has most, the oldest are forgotten first
MAX_ENDED_SAMPLES = 4000  # samples of all of these together
ANONYMOUS = "anonymous"  # key name in the metrics of a server without keys


class RequestSpan(Protocol):
    """The trace of a request."""

    def begin(self, record: RequestRecord, sampling: SamplingParams) -> None: ...
    def end(self, record: RequestRecord) -> None: ...


@dataclass(slots=True)
class RequestRecord:
    """All data about a request except its texts."""

    id: str  # of the answer; unique per owner
    http_id: str  # the X-Request-Id
    owner: str  # name of the key; empty: the server requires no keys
    model: str
    created: float  # Unix time
    received: float  # monotonic seconds
    n: int  # samples per prompt
    samples: list[SampleWatch]
    span: RequestSpan | None = None  # if traces are exported
    ended: float = 0.0  # monotonic seconds; 0: running
    num_images: int = 0
    image_tokens: int = 0  # prompt tokens that stand for images

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of GET /requests/{id}."""
        return {
            "id": self.id,
            "x_request_id": self.http_id,
            "key": self.owner or None,
            "model": self.model,
            "created": round(self.created, 3),
            "status": "finished" if self.ended else "running",
            "seconds": round((self.ended or time.monotonic()) - self.received, 6),
            "num_images": self.num_images,
            "image_tokens": self.image_tokens,
            "choices": [self._choice(index, sample) for index, sample in enumerate(self.samples)],
        }

    def _choice(self, index: int, sample: SampleWatch) -> dict[str, Any]:
        times = sample.timings
        return {
            "index": index,
            "finish_reason": sample.finish_reason,
            "prompt_tokens": sample.num_prompt_tokens,
            "cached_tokens": sample.num_cached_tokens,
            "prefix_miss": times.prefix_miss or None if times is not None else None,
            "known_tokens": times.num_known_tokens if times is not None else 0,
            "completion_tokens": sample.num_tokens,
            "num_draft_tokens": times.num_drafted[1] if times is not None else 0,
            "num_accepted_draft_tokens": times.num_drafted[0] if times is not None else 0,
            "num_preemptions": times.num_preemptions if times is not None else 0,
            "seconds": {name: round(seconds, 6) for name, seconds in self.stages(sample).items()},
        }

    def prefix_note(self) -> str:
        """Describe what the prefix cache held of the first prompt, and why no more; empty: it has not begun."""
        sample = self.samples[0]
        if sample.timings is None or not sample.timings.scheduled_ts:
            return ""
        reason, known = sample.timings.prefix_miss or "none", sample.timings.num_known_tokens
        return f"prompt={sample.num_prompt_tokens}; cached={sample.num_cached_tokens}; known={known}; miss={reason}"

    def stages(self, sample: SampleWatch) -> dict[str, float]:
        """Return the seconds of each completed stage. Together they are the time from the request to the last token.

        preparation: parsing, chat template, tokenisation, check of a grammar; grammar: its compilation; queue; prefill;
        decode.
        """
        times = sample.timings
        if times is None or not times.scheduled_ts:
            return {}
        stages = {"preparation": times.arrival_time - self.received}
        queued = times.arrival_time
        if sample.guided:
            stages["grammar"] = times.queued_ts - queued
            queued = times.queued_ts
        stages["queue"] = times.scheduled_ts - queued
        if times.first_token_ts:
            stages["prefill"] = times.first_token_ts - times.scheduled_ts
            stages["decode"] = times.last_token_ts - times.first_token_ts
        return stages


def arrival() -> float:
    """Return when the current HTTP request was complete, in monotonic seconds; now, if there is none."""
    context = CURRENT.get()
    return (context.arrived if context is not None else 0.0) or time.monotonic()


def new_record(
    request_id: str, owner: str, model: str, n: int, samples: list[SampleWatch], sampling: SamplingParams
) -> RequestRecord:
    """Create the record of a new request in the current HTTP request. `sampling`: parameters of the first sample."""
    context, now = CURRENT.get(), time.monotonic()
    if context is None:
        context = RequestContext({}, "", now)
    created = time.time() - (now - context.received)
    record = RequestRecord(request_id, context.id, owner, model, created, context.received, n, samples, context.span)
    context.record = record
    if record.span is not None:
        record.span.begin(record, sampling)
    return record


@dataclass(slots=True)
class _Usage:
    """The usage of one key."""

    num_requests: int = 0
    num_running: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        self.num_requests += 1
        self.num_running += not record.ended
        for sample in record.samples:
            if sample.timings is not None:
                self.prompt_tokens += sample.num_prompt_tokens
                self.generation_tokens += sample.num_tokens


class RequestLog(Collector):
    """Running requests, recently finished ones, and the usage of each key. Metrics are computed on each scrape."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], RequestRecord] = {}  # owner and id → record
        self._ended = OwnedStore[RequestRecord](MAX_ENDED, MAX_ENDED_SAMPLES)  # a sample counts as a byte
        self._usage: dict[str, _Usage] = {}  # owner → usage by finished requests

    def begin(self, record: RequestRecord) -> None:
        """Add a running request."""
        self._running[record.owner, record.id] = record

    def end(self, record: RequestRecord) -> None:
        """Record that a request has finished."""
        record.ended = time.monotonic()
        if record.span is not None:
            record.span.end(record)
            record.span = None  # it has been exported
        del self._running[record.owner, record.id]
        self._usage.setdefault(record.owner, _Usage()).add(record)
        self._ended.put(record.owner, record.id, record, len(record.samples))

    def find(self, owner: str | None, request_id: str) -> RequestRecord | None:
        """Return the owner's latest request with this answer id, else X-Request-Id. `owner`: None: of any owner."""
        by_http_id = None
        for record in self._of(owner):
            if record.id == request_id:
                return record
            if by_http_id is None and record.http_id == request_id:
                by_http_id = record
        return by_http_id

    def newest(self, owner: str | None, most: int) -> list[RequestRecord]:
        """Return the owner's latest requests, newest first. `owner`: None: of all owners."""
        return list(itertools.islice(self._of(owner), most))

    def _of(self, owner: str | None) -> Iterator[RequestRecord]:
        """Yield the running requests, then those that ended; each the newest first."""
        yield from (each for each in reversed(self._running.values()) if owner in (None, each.owner))
        owners = self._ended.owners if owner is None else [owner]
        yield from heapq.merge(*map(self._ended.latest, owners), key=lambda record: -record.ended)

    def collect(self) -> Iterator[Metric]:
        waiting = [each.received for each in self._running.values() if each.samples[0].timings is None]
        oldest = time.monotonic() - min(waiting) if waiting else 0.0
        help = "How long the request has waited that waits longest for its first token"
        yield GaugeMetricFamily("quire:oldest_waiting_seconds", help, oldest)

    def usage(self, owner: str | None) -> KeyUsage:
        """Return the metrics of one key. `owner`: None: of all keys."""
        usage = {name: replace(each) for name, each in self._usage.items() if owner in (None, name)}
        for record in self._running.values():
            if owner in (None, record.owner):
                usage.setdefault(record.owner, _Usage()).add(record)
        return KeyUsage(usage)


class KeyUsage(Collector):
    """Metrics of keys, apart from the others: a key may see only its own."""

    def __init__(self, usage: dict[str, _Usage]) -> None:
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        rows: list[tuple[Any, str, str, str]] = [
            (CounterMetricFamily, "requests", "Requests that have begun", "num_requests"),
            (GaugeMetricFamily, "requests_running", "Requests being answered", "num_running"),
            (CounterMetricFamily, "prompt_tokens", "Prompt tokens of requests that have begun", "prompt_tokens"),
            (CounterMetricFamily, "generation_tokens", "Tokens generated", "generation_tokens"),
        ]
        for family, name, help, field in rows:
            metric = family(f"quire:key_{name}", f"{help}, by key", labels=("key",))
            for owner, each in self._usage.items():
                metric.add_metric((owner or ANONYMOUS,), getattr(each, field))
            yield metric
