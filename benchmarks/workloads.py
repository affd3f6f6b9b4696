"""What is asked of an engine in a benchmark: prompts and how long each answer is to be. Knows token ids and files; no engine.

All of it is the same for the same seed on every machine, so that engines can be compared on equal token ids.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.config import nearest
from engine.errors import ConfigError

MAX_TOKEN_ID = 10000  # of random prompts: every model has these tokens


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, as text or token ids, and the number of tokens to be made."""

    prompt: str | list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are given all at once."""

    name: str
    requests: list[Request]
    prefix_caching: bool = False  # the engine is to have its prefix cache on

    @property
    def longest(self) -> int:
        return max(len(request.prompt) + request.output_len for request in self.requests)


def nano(top: int) -> list[Request]:
    """nano-vllm's published benchmark: mixed lengths."""
    ids = random.Random(0)
    prompts = [[ids.randint(0, top) for _ in range(ids.randint(100, 1024))] for _ in range(256)]
    return [Request(prompt, ids.randint(100, 1024)) for prompt in prompts]


def fixed(count: int, input_len: int, output_len: int, top: int, seed: int = 1) -> list[Request]:
    """Equal lengths."""
    ids = random.Random(seed)
    return [Request([ids.randint(0, top) for _ in range(input_len)], output_len) for _ in range(count)]


def shared_prefix(count: int, prefix_len: int, suffix_len: int, output_len: int, top: int) -> list[Request]:
    """One beginning for all."""
    ids = random.Random(2)
    prefix = [ids.randint(0, top) for _ in range(prefix_len)]
    return [Request(prefix + [ids.randint(0, top) for _ in range(suffix_len)], output_len) for _ in range(count)]


NAMED: dict[str, tuple[str, Callable[[int], list[Request]]]] = {
    "latency1": ("1 request, 32 in, 128 out", lambda top: fixed(1, 32, 128, top)),
    "latency8": ("8 requests, 32 in, 128 out", lambda top: fixed(8, 32, 128, top)),
    "nano": ("256 requests, 100–1024 in, 100–1024 out", nano),
    "decode": ("256 requests, 128 in, 512 out", lambda top: fixed(256, 128, 512, top)),
    "prefill": ("128 requests, 2048 in, 1 out", lambda top: fixed(128, 2048, 1, top)),
    "rag": ("512 requests, 1024 in, 128 out", lambda top: fixed(512, 1024, 128, top)),
    "longctx": ("8 requests, 16384 in, 128 out", lambda top: fixed(8, 16384, 128, top)),
    "prefix": ("256 requests, 2048 shared + 128 in, 64 out", lambda top: shared_prefix(256, 2048, 128, 64, top)),
}


def named(name: str, vocab_size: int) -> Workload:
    """A workload of the table above, or 'COUNTxINPUTxOUTPUT' such as 16x128x64. `ConfigError` when it is neither."""
    top = min(MAX_TOKEN_ID, vocab_size - 1)
    if name in NAMED:
        return Workload(name, NAMED[name][1](top), prefix_caching=name == "prefix")
    if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name):
        count, input_len, output_len = map(int, match.groups())
        return Workload(name, fixed(count, input_len, output_len, top))
    raise ConfigError(
        f"workload {name!r} is neither COUNTxINPUTxOUTPUT (such as 16x128x64) nor one of {', '.join(NAMED)}"
        f"{nearest(name, NAMED)}"
    )


def describe(name: str) -> str:
    """What the workload is, in a few words."""
    if name in NAMED:
        return NAMED[name][0]
    count, input_len, output_len = name.split("x")
    return f"{count} requests, {input_len} in, {output_len} out"


def num_tokens(requests: Iterable[Request]) -> tuple[int, int]:
    """Of all prompts (which are token ids), and of all answers."""
    requests = list(requests)
    return sum(len(request.prompt) for request in requests), sum(request.output_len for request in requests)
