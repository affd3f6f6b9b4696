"""Prometheus metrics with vLLM's names, and the statistics line of the log.

The engine's counters are read on each scrape, so they cost nothing in between.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine import RequestMetrics, RequestUpdate, SamplingParams
from engine.core.batch import SchedulerStats
from engine.core.params.pooling import UNSAMPLED
from engine.stats import EXPERT_BOUNDS, STEP_BOUNDS, ExpertTokens, StepTokens

_log = logging.getLogger(__name__)

# fmt: off
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                640, 2560)
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
_PREFIX_MISSES = ("not_seen", "other_tokens", "evicted", "no_state", "other_salt", "not_read", "disabled")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level
_SAMPLES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)
# fmt: on
_LABELS = ("model_name", "engine")
_ALL = "0"  # value of the label `engine` for metrics of all replicas together

Stats = Callable[[], SchedulerStats | None]


class ReplicaClient(Protocol):
    """The part of `engine.replicas.replica.Replica` that is used here."""

    stats: SchedulerStats | None  # the latest; None until the replica is ready
    step_tokens: StepTokens
    expert_tokens: ExpertTokens

    sleep_level: int  # 0: awake

    @property
    def pid(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...


class HTTPMetrics:
    """Metrics of HTTP requests, by route."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "status", "handler")
        self._requests = Counter("http_requests", "HTTP requests", labels, registry=registry)
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time of an HTTP request, streams to their end",
            ("method", "handler"),
            buckets=(0.1, 0.5, 1),
            registry=registry,
        )

    def observe(self, method: str, status: int, handler: str, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._seconds.labels(method, handler).observe(seconds)


class Metrics:
    """All metrics of the served model."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        replicas: Sequence[ReplicaClient],
        *,
        max_model_len: int,
        block_size: int,
        cache_dtype: str = "auto",
    ) -> None:
        """`replicas`: engine metrics are labelled with the replica's index; request metrics cover all replicas
        together.
        """
        self.registry = registry
        self._labels = (model_name, _ALL)
        self.registry.register(_EngineCollector(replicas, model_name, str(block_size), cache_dtype))

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have begun")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache")
        by_source = self._counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source")
        self._computed = by_source.labels(*self._labels, "local_compute")
        self._local_hits = by_source.labels(*self._labels, "local_cache_hit")
        help = "Requests for whose prompt the prefix cache held no more, by why"
        self._misses = Counter("quire:prefix_misses", help, (*_LABELS, "reason"), registry=self.registry)
        for reason in _PREFIX_MISSES:  # so that a rate sees the 0 before the first 1
            self._misses.labels(*self._labels, reason)
        help = "Prompt tokens that the prefix cache held once and no longer"
        evicted = Counter("quire:prefix_evicted_tokens", help, _LABELS, registry=self.registry)
        self._evicted_tokens = evicted.labels(*self._labels)
        self._finished = self._counter("request_success", "Requests that ended, by reason", "finished_reason")
        for reason in _FINISH_REASONS:
            self._finished.labels(*self._labels, reason)
        self._rejected = Counter(
            "vllm:admission_rejections",
            "Requests refused at the door",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._rejected.labels(model_name, "queue_full")
        self._add_histograms(_one_two_five(max_model_len))

    def _add_histograms(self, tokens: Sequence[float]) -> None:
        """Add the histograms. `tokens`: buckets for numbers of tokens."""
        seconds = self._histogram
        self._first_token = seconds("time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN)
        self.between = seconds("inter_token_latency_seconds", "Between two tokens", _BETWEEN_TOKENS)
        self._per_token = seconds(
            "request_time_per_output_token_seconds", "Mean of a request, without its first token", _BETWEEN_TOKENS
        )
        self._e2e = seconds("e2e_request_latency_seconds", "From arrival to the last token", _LATENCY)
        self._queue = seconds("request_queue_time_seconds", "Waiting for the first step", _LATENCY)
        self._inference = seconds("request_inference_time_seconds", "From the first step to the last token", _LATENCY)
        self._prefill = seconds("request_prefill_time_seconds", "From the first step to the first token", _LATENCY)
        self._decode = seconds("request_decode_time_seconds", "From the first token to the last", _LATENCY)
        counts = self._histogram
        self._request_prompt = counts("request_prompt_tokens", "Prompt tokens of a request", tokens)
        self._request_generated = counts("request_generation_tokens", "Tokens generated for a request", tokens)
        self._request_computed = counts(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached", tokens
        )
        self._request_max_tokens = counts("request_params_max_tokens", "max_tokens of a request", tokens)
        self._request_preemptions = counts("request_num_preemptions", "How often a request was preempted", _PREEMPTIONS)
        self._most_generated = counts(
            "request_max_num_generation_tokens", "Most tokens among the samples of a request", tokens
        )
        self._request_n = counts("request_params_n", "n of a request", _SAMPLES)

    def _counter(self, name: str, help: str, *extra: str) -> Counter:
        counter = Counter(f"vllm:{name}", help, (*_LABELS, *extra), registry=self.registry)
        return counter if extra else counter.labels(*self._labels)

    def _histogram(self, name: str, help: str, bounds: Sequence[float]) -> RequestHistogram:
        metric = RequestHistogram(f"vllm:{name}", help, self._labels, bounds)
        self.registry.register(metric)
        return metric

    def watch(self, num_prompt_tokens: int, sampling: SamplingParams) -> SampleWatch:
        """Return the watch of one sample of a request, which must see each of its updates. `UNSAMPLED`: an "
        "embedding."""
        guided = sampling.structured_outputs is not None
        return SampleWatch(self, num_prompt_tokens, sampling.max_tokens, sampling is not UNSAMPLED, guided)

    def request_ended(self, n: int, most_generated: int) -> None:
        """Count a prompt whose `n` samples have all finished."""
        self._request_n.observe(n)
        self._most_generated.observe(most_generated)

    def count_end(self, reason: str) -> None:
        self._finished.labels(*self._labels, reason).inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(self._labels[0], reason).inc()


@dataclass(slots=True)
class SampleWatch:
    """Counts the updates of one sample, and keeps the totals."""

    metrics: Metrics
    num_prompt_tokens: int
    max_tokens: int | None
    generates: bool  # False: an embedding
    guided: bool  # has a grammar
    num_tokens: int = 0  # generated
    num_cached_tokens: int = 0  # of the prompt
    timings: RequestMetrics | None = None  # still changing; None: no update so far
    finish_reason: str | None = None
    last_token: float = 0.0

    def observe(self, update: RequestUpdate) -> None:
        metrics, times, num_new = self.metrics, update.timings, len(update.token_ids)
        if num_new and not self.num_tokens:
            metrics._first_token.observe(times.first_token_ts - times.arrival_time)
            self._started(update)
            self.last_token = times.first_token_ts
            num_new -= 1
        elif update.embedding is not None:
            self._started(update)
        if num_new and self.last_token:
            seconds = (times.last_token_ts - self.last_token) / num_new
            metrics.between.observe(seconds, num_new)
        self.num_tokens += len(update.token_ids)
        self.last_token = times.last_token_ts
        if update.finish_reason is not None:
            self._ended(times, update.finish_reason)

    def abandoned(self) -> None:
        """Count a sample that ends unfinished because the client disconnected or the engine was lost."""
        self.finish_reason = "abort"
        self.metrics.count_end("abort")

    def _started(self, update: RequestUpdate) -> None:
        metrics, num_cached = self.metrics, update.num_cached_tokens
        self.timings, self.num_cached_tokens = update.timings, num_cached
        metrics._prompt_tokens.inc(self.num_prompt_tokens)
        metrics._cached_tokens.inc(num_cached)
        metrics._local_hits.inc(num_cached)
        metrics._computed.inc(self.num_prompt_tokens - num_cached)
        metrics._request_computed.observe(self.num_prompt_tokens - num_cached)
        if update.timings.prefix_miss:
            metrics._misses.labels(*metrics._labels, update.timings.prefix_miss).inc()
            metrics._evicted_tokens.inc(max(update.timings.num_known_tokens - num_cached, 0))

    def _ended(self, times: RequestMetrics, reason: str) -> None:
        metrics = self.metrics
        self.timings, self.finish_reason = times, reason
        metrics.count_end(reason)
        metrics._request_prompt.observe(self.num_prompt_tokens)
        metrics._request_preemptions.observe(times.num_preemptions)
        if self.generates:
            metrics._request_generated.observe(self.num_tokens)
            if self.max_tokens is not None:
                metrics._request_max_tokens.observe(self.max_tokens)
        if not (times.scheduled_ts and times.first_token_ts):
            return
        metrics._e2e.observe(times.last_token_ts - times.arrival_time)
        metrics._queue.observe(times.scheduled_ts - times.queued_ts)
        metrics._prefill.observe(times.first_token_ts - times.scheduled_ts)
        metrics._inference.observe(times.last_token_ts - times.scheduled_ts)
        if self.generates:
            decode = times.last_token_ts - times.first_token_ts
            metrics._decode.observe(decode)
            if self.num_tokens > 1:
                metrics._per_token.observe(decode / (self.num_tokens - 1))


class AdapterCollector(Collector):
    """Collects the names of the LoRA adapters in use on each scrape."""

    def __init__(self, max_loras: int, in_use: Callable[[], tuple[set[str], set[str]]]) -> None:
        """`max_loras`: that run at a time. `in_use`: names with requests that have begun, and with others."""
        self._max_loras, self._in_use = max_loras, in_use

    def collect(self) -> Iterator[Metric]:
        running, waiting = self._in_use()
        help = "LoRA adapters of running and waiting requests; the value is the time of this look"
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        info = GaugeMetricFamily("vllm:lora_requests_info", help, labels=labels)
        names = ",".join(sorted(waiting)), ",".join(sorted(running))
        info.add_metric((str(self._max_loras), *names), time.time())
        yield info


class ImageCollector(Collector):
    """Collects what became of the images of requests. An API process serves all replicas."""

    def __init__(self, model_name: str, counts: Callable[[], tuple[int, int]]) -> None:
        """`counts`: images of requests, and those among them that had been decoded for another one."""
        self._model_name, self._counts = model_name, counts

    def collect(self) -> Iterator[Metric]:
        helps = "Images of requests", "Images that had been decoded for another request"
        names = "vllm:mm_cache_queries", "vllm:mm_cache_hits"
        for name, help, count in zip(names, helps, self._counts(), strict=True):
            metric = CounterMetricFamily(name, help, labels=_LABELS)
            metric.add_metric((self._model_name, "0"), count)
            yield metric


class RequestHistogram(Collector):
    """A histogram for events of each request or token, several times as fast as the library's. Not thread-safe."""

    def __init__(self, name: str, help: str, labels: tuple[str, str], bounds: Sequence[float]) -> None:
        self._name, self._help, self._labels, self._bounds = name, help, labels, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        yield _histogram(self._name, self._help, self._labels, self._bounds, self._counts, self._sum)


class _EngineCollector(Collector):
    """Collects the replicas' own metrics on each scrape."""

    def __init__(self, replicas: Sequence[ReplicaClient], model_name: str, block_size: str, cache_dtype: str) -> None:
        self._replicas, self._model_name = replicas, model_name
        self._block_size, self._cache_dtype = block_size, cache_dtype

    def collect(self) -> Iterator[Metric]:
        names = ("engine", "block_size", "num_gpu_blocks", "cache_dtype")
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings", labels=names)
        help = "1 for the state of the engine's sleep"
        sleep = GaugeMetricFamily("vllm:engine_sleep_state", help, labels=(*_LABELS, "sleep_state"))
        help = "Tokens that a step computes: prompt tokens and generated ones"
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", help, labels=_LABELS)
        for engine, replica in enumerate(self._replicas):
            info.add_metric((str(engine), self._block_size, str(replica.num_blocks), self._cache_dtype), 1)
            for level, state in enumerate(_SLEEP_STATES):
                sleep.add_metric((self._model_name, str(engine), state), replica.sleep_level == level)
            seen = replica.step_tokens
            steps.add_metric((self._model_name, str(engine)), _buckets(STEP_BOUNDS, seen.counts), seen.total)
        yield from (info, sleep, steps, self._of_experts())
        yield from self._of_stats()

    def _of_experts(self) -> Metric:
        help = "Tokens that an expert of a layer got in a step that was watched"
        experts = HistogramMetricFamily("quire:expert_tokens", help, labels=(*_LABELS, "layer"))
        for engine, replica in enumerate(self._replicas):
            for layer, (*counts, total) in sorted(replica.expert_tokens.layers.items()):
                labels = (self._model_name, str(engine), str(layer))
                experts.add_metric(labels, _buckets(EXPERT_BOUNDS, counts), total)
        return experts

    def _of_stats(self) -> Iterator[Metric]:
        """Yield the metrics from the latest statistics of the replicas that are ready."""
        known = [(str(i), stats) for i, each in enumerate(self._replicas) if (stats := each.stats) is not None]
        if not known:
            return
        help = "Requests that wait, for blocks (capacity) or for their grammars (deferred)"
        reasons = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", help, labels=(*_LABELS, "reason"))
        for engine, stats in known:
            reasons.add_metric((self._model_name, engine, "capacity"), stats.num_waiting)
            reasons.add_metric((self._model_name, engine, "deferred"), stats.num_deferred)
        yield reasons
        for family, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, help, value in rows:
                metric = family(name if ":" in name else f"vllm:{name}", help, labels=_LABELS)
                for engine, stats in known:
                    metric.add_metric((self._model_name, engine), value(stats))
                yield metric
        help = "Draft tokens accepted, by position in the draft"
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", help, labels=(*_LABELS, "position")
        )
        for engine, stats in known:
            for position, number in enumerate(stats.accepted_at):
                accepted.add_metric((self._model_name, engine, str(position)), number)
        yield accepted


_Row = tuple[str, str, Callable[[SchedulerStats], float]]
_GAUGES: Sequence[_Row] = [
    ("num_requests_running", "Requests in the engine's batch", lambda stats: stats.num_running),
    ("num_requests_waiting", "Requests that wait for the engine", lambda stats: stats.num_waiting + stats.num_deferred),
    ("kv_cache_usage_perc", "Fraction of the KV cache in use, from 0 to 1", lambda stats: stats.kv_cache_usage),
    ("host_cache_usage_perc", "Fraction of the host memory for evicted blocks in use", lambda stats: stats.host_usage),
    ("prefix_cache_file_blocks", "Blocks in the prefix cache's file", lambda stats: stats.num_file_blocks),
    ("state_usage_perc", "Fraction of recurrent layers' states in use, from 0 to 1", lambda stats: stats.state_usage),
]
_COUNTERS: Sequence[_Row] = [
    ("num_preemptions", "Preemptions", lambda stats: stats.num_preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda stats: stats.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda stats: stats.prefix_hits),
    (
        "external_prefix_cache_queries",
        "Prompt tokens looked up in host memory and file, as they were not in the KV cache",
        lambda stats: stats.external_queries,
    ),
    ("external_prefix_cache_hits", "Prompt tokens found in host memory or file", lambda stats: stats.external_hits),
    (
        "prefix_cache_damaged_blocks",
        "Blocks that the prefix cache's file had lost or damaged",
        lambda stats: stats.num_damaged_blocks,
    ),
    ("generation_tokens", "Tokens generated", lambda stats: stats.generation_tokens),
    ("spec_decode_num_drafts", "Times that a request had drafts in a step", lambda stats: stats.num_drafts),
    ("spec_decode_num_draft_tokens", "Draft tokens verified", lambda stats: stats.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted", lambda stats: stats.num_accepted_tokens),
    (
        "quire:encoder_cache_queries",
        "Images that requests began to compute, without those in the prefix cache",
        lambda stats: stats.encoder_queries,
    ),
    ("quire:encoder_cache_hits", "Of these, images that were encoded already", lambda stats: stats.encoder_hits),
    ("quire:encoded_images", "Images that were encoded", lambda stats: stats.num_encoded),
    ("quire:encoder_seconds", "Seconds that images took to encode", lambda stats: stats.encoder_seconds),
    ("corrupted_requests", "Requests ended by NaN or infinity in their logits", lambda stats: stats.num_corrupted),
]


def _histogram(
    name: str, help: str, labels: tuple[str, str], bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramMetricFamily:
    """Create a histogram. `counts`: see `_buckets`."""
    metric = HistogramMetricFamily(name, help, labels=_LABELS)
    metric.add_metric(labels, _buckets(bounds, counts), total)
    return metric


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative buckets. `counts`: of the values in each interval of `bounds`, and above the last bound."""
    names = [floatToGoString(bound) for bound in (*bounds, math.inf)]
    return list(zip(names, itertools.accumulate(counts), strict=True))


def _one_two_five(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 … up to `most`."""
    return [step * 10**power for power in range(len(str(most))) for step in (1, 2, 5) if step * 10**power <= most]


async def log_statistics(stats: Stats, interval: float) -> None:
    """Log a line after every `interval` seconds with activity, until cancelled."""
    before, at = stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now, after = time.monotonic(), stats()
        if after is not None and (after != before or after.num_running or after.num_waiting or after.num_deferred):
            _log.info(statistics_line(before, after, now - at))
        before, at = after, now


def statistics_line(before: SchedulerStats | None, after: SchedulerStats, seconds: float) -> str:
    """Describe what happened between two statistics."""
    if before is not None and after.generation_tokens < before.generation_tokens:
        before = None  # a new engine process, whose counters start at 0
    prompt = after.prompt_tokens - (before.prompt_tokens if before else 0)
    generated = after.generation_tokens - (before.generation_tokens if before else 0)
    hit_rate = after.prefix_hits / after.prefix_queries if after.prefix_queries else 0.0
    drafts = ""
    if tried := after.num_draft_tokens - (before.num_draft_tokens if before else 0):
        num_drafts = after.num_drafts - (before.num_drafts if before else 0)
        accepted = after.num_accepted_tokens - (before.num_accepted_tokens if before else 0)
        drafts = (
            f", Drafts: {accepted} of {tried} accepted, {1 + accepted / num_drafts:.1f} tokens per step with drafts"
        )
    images = ""
    if encoded := after.num_encoded - (before.num_encoded if before else 0):
        busy = after.encoder_seconds - (before.encoder_seconds if before else 0)
        images = f", Images: {encoded} encoded in {busy:.2f} s"
    return (
        f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
        f"Running: {after.num_running} reqs, Waiting: {after.num_waiting + after.num_deferred} reqs, "
        f"GPU KV cache usage: {after.kv_cache_usage:.1%}, Prefix cache hit rate: {hit_rate:.1%}{drafts}{images}"
    )
