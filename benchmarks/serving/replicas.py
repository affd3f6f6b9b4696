"""Prefix cache and engines of a server with vLLM's metrics: differences of two readings."""

from __future__ import annotations

import re
from typing import Any

_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_GENERATED = "vllm:generation_tokens_total"


def between(before: str, after: str) -> dict[str, Any]:
    """Compare two readings of /metrics. Empty without vLLM's metrics, or if no prompt was looked up in the cache.

    `prefix_cache_hit_rate`: the fraction of prompt tokens found in a cache of the engines. `engine_tokens`: tokens
    that each engine computed: of prompts, if not cached, and of answers. `busiest_engine`: the most of them over their
    mean.
    """
    queries, hits, generated = (_grown(before, after, name) for name in (_QUERIES, _HITS, _GENERATED))
    looked_up = sum(queries.values())
    if not looked_up:
        return {}
    work = {engine: queries[engine] - hits.get(engine, 0) + generated.get(engine, 0) for engine in sorted(queries)}
    found: dict[str, Any] = {
        "prefix_cache_queries": looked_up,
        "prefix_cache_hits": sum(hits.values()),
        "prefix_cache_hit_rate": sum(hits.values()) / looked_up,
        "engine_tokens": work,
    }
    if len(work) > 1:
        found["busiest_engine"] = max(work.values()) * len(work) / sum(work.values())
    return found


def _grown(before: str, after: str, name: str) -> dict[str, float]:
    """By how much a counter of each engine has grown."""
    former = _by_engine(before, name)
    return {engine: value - former.get(engine, 0.0) for engine, value in _by_engine(after, name).items()}


def _by_engine(text: str, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
        engine = re.search(r'\bengine="([^"]*)"', labels)
        key = engine[1] if engine else ""
        found[key] = found.get(key, 0.0) + float(value)
    return found
