"""Token counts and timings, named as in OpenAI's completions and vLLM's metrics."""

from __future__ import annotations

from typing import Any

from engine import RequestMetrics
from server.generation.usage import Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    details: dict[str, int] = {}
    if usage.reasoning_tokens is not None:
        details["reasoning_tokens"] = usage.reasoning_tokens
    if usage.predicted_tokens is not None:
        accepted, rejected = usage.predicted_tokens
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    if details:
        found["completion_tokens_details"] = details
    return found


def metrics_object(times: RequestMetrics | None) -> dict[str, float]:
    """Return the timings of an answer; empty before its first token."""
    if times is None or not times.first_token_ts:
        return {}
    first, num_more = times.first_token_ts, times.num_generation_tokens - 1
    decoding = times.last_token_ts - first
    values = {
        "queue_time_ms": 1000 * (times.scheduled_ts - times.queued_ts),
        "prefill_time_ms": 1000 * (first - times.scheduled_ts),
        "time_to_first_token_ms": 1000 * (first - times.arrival_time),
        "generation_time_ms": 1000 * decoding,
        "mean_itl_ms": 1000 * decoding / num_more if num_more > 0 else 0.0,
        "tokens_per_second": num_more / decoding if num_more > 0 and decoding > 0 else 0.0,
    }
    if times.num_drafted[1]:
        values |= {"accepted_draft_tokens": times.num_drafted[0], "draft_tokens": times.num_drafted[1]}
    return {name: round(value, 3) for name, value in values.items()}
