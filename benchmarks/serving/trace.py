"""Recorded traffic: when requests came, how long they were and which prompts began alike, without their texts.

A trace is JSON lines in Mooncake's published form: `timestamp` (milliseconds), `input_length`, `output_length` and
`hash_ids`, a number for each block of the prompt's tokens, equal where prompts are equal up to there. A block has
`block_size` tokens, in Mooncake's traces, which do not say so, 512. Other members are ignored.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import Request
from engine.errors import ConfigError

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line."""

    seconds: float  # after the first request
    input_len: int
    output_len: int
    block_size: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests in the order of their arrival. `ConfigError` names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"replay {path}: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_read_line(json.loads(line)))
            except (ValueError, TypeError, LookupError, RecursionError):
                example = '{"timestamp": 0, "input_length": 100, "output_length": 20, "hash_ids": [1, 2]}'
                raise ConfigError(f"replay {path}, line {number}: must be like {example}, got {line[:80]}") from None
    if not found:
        raise ConfigError(f"replay {path}: holds no request")
    found.sort(key=lambda pair: pair[0])
    first = found[0][0]
    return [TracedRequest((milliseconds - first) / 1e3, *rest) for milliseconds, rest in found]


def _read_line(entry: dict[str, Any]) -> tuple[float, tuple[int, int, int, tuple[int, ...]]]:
    """Milliseconds, and the other fields of a `TracedRequest`. An error of any kind when it is no request."""
    input_len, output_len, size = entry["input_length"], entry["output_length"], entry.get("block_size", MOONCAKE_BLOCK)
    hash_ids = tuple(entry.get("hash_ids", ()))
    numbers = (input_len, output_len, size, *hash_ids)
    if not all(type(number) is int for number in numbers) or min(input_len, size) < 1 or output_len < 0:
        raise ValueError
    return float(entry["timestamp"]), (input_len, max(output_len, 1), size, hash_ids)


def synthesize(trace: list[TracedRequest], vocab_size: int, seed: int) -> list[Request]:
    """Random token ids of the same lengths, which begin alike where the trace's prompts do."""

    @functools.cache
    def block(hash_id: int, size: int) -> list[int]:
        return random.Random(f"{seed} {hash_id}").choices(range(vocab_size), k=size)

    own = random.Random(seed)
    requests = []
    for traced in trace:
        prompt: list[int] = []
        for hash_id in traced.hash_ids:
            prompt += block(hash_id, traced.block_size)
        prompt += own.choices(range(vocab_size), k=max(traced.input_len - len(prompt), 0))
        requests.append(Request(prompt[: traced.input_len], traced.output_len))
    return requests
