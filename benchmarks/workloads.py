"""Workloads of benchmarks: prompts and lengths of their answers.

All of it is the same for the same seed on every machine, so that engines can be compared on equal token ids.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.flags import nearest

MAX_TOKEN_ID = 10000  # of random prompts: every model has these tokens
BEGUN = 16  # tokens of a passage that its second copy has in the prompt of `editing`


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt (a text, token ids, or the messages of a conversation), and the number of tokens to be made; 0: its
    embedding is.
    """

    prompt: str | list[Any]
    output_len: int
    images: tuple[str, ...] = ()  # URLs of images before the prompt, for chat


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are given all at once."""

    name: str
    requests: list[Request]
    prefix_caching: bool = False  # the engine is to have its prefix cache on
    greedy: bool = False  # answers are greedy, else they are sampled
    counts: bool = False  # for weights whose text counts, see `benchmarks.counting`
    adapters: int = 0  # LoRA adapters that the requests use alternately; 0: none

    @property
    def embeds(self) -> bool:
        """Return whether the work is embeddings instead of answers."""
        return not any(request.output_len for request in self.requests)

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


def texts(count: int, top: int) -> list[Request]:
    """Texts of 20 to 300 tokens to embed."""
    ids = random.Random(5)
    return [Request([ids.randint(0, top) for _ in range(ids.randint(20, 300))], 0) for _ in range(count)]


def shared_prefix(count: int, prefix_len: int, suffix_len: int, output_len: int, top: int) -> list[Request]:
    """One beginning for all."""
    ids = random.Random(2)
    prefix = [ids.randint(0, top) for _ in range(prefix_len)]
    return [Request(prefix + [ids.randint(0, top) for _ in range(suffix_len)], output_len) for _ in range(count)]


def copying(count: int, part_len: int, output_len: int, top: int) -> list[Request]:
    """A passage that has begun for the fourth time: trained models go on with it, untrained ones repeat themselves."""
    ids, requests = random.Random(3), list[Request]()
    for _ in range(count):
        passage = [ids.randint(0, top) for _ in range(part_len)]
        requests.append(Request(3 * passage + passage[: part_len // 4], output_len))
    return requests


def editing(count: int, output_len: int, top: int, other: float = 0.05) -> list[Request]:
    """A passage that counts, some of whose tokens are other ones, and its beginning. The answer counts on, so it is the
    passage with these tokens put right. `other`: how many of them are.
    """
    ids, requests = random.Random(4), list[Request]()
    for _ in range(count):
        first = ids.randrange(top - output_len - BEGUN)
        begun = list(range(first, first + BEGUN))
        rest = range(first + BEGUN, first + BEGUN + output_len)
        passage = [ids.randint(0, top) if ids.random() < other else token for token in rest]
        requests.append(Request(begun + passage + begun, output_len))
    return requests


NAMED: dict[str, tuple[str, Callable[[int], list[Request]]]] = {
    "latency1": ("1 request, 32 in, 128 out", lambda top: fixed(1, 32, 128, top)),
    "latency8": ("8 requests, 32 in, 128 out", lambda top: fixed(8, 32, 128, top)),
    "nano": ("256 requests, 100–1024 in, 100–1024 out", nano),
    "decode": ("256 requests, 128 in, 512 out", lambda top: fixed(256, 128, 512, top)),
    "prefill": ("128 requests, 2048 in, 1 out", lambda top: fixed(128, 2048, 1, top)),
    "rag": ("512 requests, 1024 in, 128 out", lambda top: fixed(512, 1024, 128, top)),
    "longctx": ("8 requests, 16384 in, 128 out", lambda top: fixed(8, 16384, 128, top)),
    "copy1": ("1 request, greedy, 416 in that repeat 128, 256 out", lambda top: copying(1, 128, 256, top)),
    "copy": ("8 requests, greedy, 416 in that repeat 128, 256 out", lambda top: copying(8, 128, 256, top)),
    "copy64": ("64 requests, greedy, 416 in that repeat 128, 256 out", lambda top: copying(64, 128, 256, top)),
    "edit1": ("1 request, greedy, 288 in, 256 out: 95 % of them again", lambda top: editing(1, 256, top)),
    "edit8": ("8 requests, greedy, 288 in, 256 out: 95 % of them again", lambda top: editing(8, 256, top)),
    "edit64": ("64 requests, greedy, 288 in, 256 out: 95 % of them again", lambda top: editing(64, 256, top)),
    "prefix": ("256 requests, 2048 shared + 128 in, 64 out", lambda top: shared_prefix(256, 2048, 128, 64, top)),
}

OFFLINE = NAMED | dict[str, tuple[str, Callable[[int], list[Request]]]](  # not for servers
    embed=("4096 texts of 20–300 tokens, embedded", lambda top: texts(4096, top))
)


def named(name: str, vocab_size: int) -> Workload:
    """A workload of the table above, or 'COUNTxINPUTxOUTPUT' such as 16x128x64; with '+N' behind it, with N LoRA
    adapters. `ConfigError` when it is neither.
    """
    top = min(MAX_TOKEN_ID, vocab_size - 1)
    if match := re.fullmatch(r"(.+)\+([1-9]\d{0,2})", name):
        return replace(named(match[1], vocab_size), name=name, adapters=int(match[2]))
    if name in OFFLINE:
        counts = name.startswith("edit")
        return Workload(name, OFFLINE[name][1](top), name == "prefix", counts or name.startswith("copy"), counts)
    if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name):
        count, input_len, output_len = map(int, match.groups())
        return Workload(name, fixed(count, input_len, output_len, top))
    raise ConfigError(
        f"workload {name!r} is neither COUNTxINPUTxOUTPUT (such as 16x128x64) nor one of {', '.join(OFFLINE)}"
        f"{nearest(name, OFFLINE)}"
    )


def describe(name: str) -> str:
    """Short description of the workload."""
    name, _, adapters = name.partition("+")
    more = f", {adapters} LoRA adapters" if adapters else ""
    if name in OFFLINE:
        return OFFLINE[name][0] + more
    count, input_len, output_len = name.split("x")
    return f"{count} requests, {input_len} in, {output_len} out{more}"


def num_tokens(requests: Iterable[Request]) -> tuple[int, int]:
    """Number of tokens of all prompts (which are token ids) and of all answers."""
    requests = list(requests)
    return sum(len(request.prompt) for request in requests), sum(request.output_len for request in requests)


# Prompts for a server


def random_requests(
    count: int, *, input_len: int, output_len: int, range_ratio: float, prefix_len: int, vocab_size: int, seed: int
) -> list[Request]:
    """Random token ids; lengths are uniform within `range_ratio` of those given; all share `prefix_len` more ids."""
    ids = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, ids.randint(math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))))

    prefix = ids.choices(range(vocab_size), k=prefix_len)
    return [
        Request(prefix + ids.choices(range(vocab_size), k=length(input_len)), length(output_len)) for _ in range(count)
    ]


def prefix_repetition(
    count: int, *, num_prefixes: int, prefix_len: int, suffix_len: int, output_len: int, vocab_size: int, seed: int
) -> list[Request]:
    """`num_prefixes` random beginnings, each with equally many random ends; in random order."""
    ids = random.Random(seed)
    requests = []
    for _ in range(num_prefixes):
        prefix = ids.choices(range(vocab_size), k=prefix_len)
        for _ in range(count // num_prefixes):
            requests.append(Request(prefix + ids.choices(range(vocab_size), k=suffix_len), output_len))
    ids.shuffle(requests)
    return requests


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"dataset_path {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"dataset_path {path}: is not UTF-8 text") from None


def read_prompts(path: Path, output_len: int) -> list[Request]:
    """The prompts of a file: one on each line, or .jsonl with {"prompt": …, "output_len": …} (or "messages").

    `output_len`: of those that do not say. `ConfigError` names the line that is wrong.
    """
    requests = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            request = _read_json_line(line, output_len) if path.suffix == ".jsonl" else Request(line, output_len)
            if request is None:
                raise ConfigError(
                    f'{path}, line {number}: must be {{"prompt": "…", "output_len": 128}}, got {line[:80]}'
                )
            requests.append(request)
    if not requests:
        raise ConfigError(f"dataset_path {path}: holds no prompt")
    return requests


def _read_json_line(line: str, output_len: int) -> Request | None:
    """None when it is no request."""
    try:
        entry = json.loads(line)
        prompt, output_len = entry.get("prompt", entry.get("messages")), entry.get("output_len", output_len)
    except (ValueError, AttributeError):
        return None
    if type(output_len) is not int or output_len < 1 or not prompt:
        return None
    if isinstance(prompt, str) or (
        isinstance(prompt, list)
        and (all(type(item) is int for item in prompt) or all(isinstance(item, dict) for item in prompt))
    ):
        return Request(prompt, output_len)
    return None


def read_sharegpt(path: Path, output_len: int | None, count_tokens: Callable[[str], int]) -> list[Request]:
    """First questions of ShareGPT conversations with their answers' lengths, without very short and long ones."""
    try:
        entries = json.loads(read_text(path))
        turns = [[turn["value"] for turn in entry.get("conversations") or []] for entry in entries]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"dataset_path {path}: is not ShareGPT's JSON") from None
    requests = []
    for question, answer in (texts[:2] for texts in turns if len(texts) >= 2):
        input_len, length = count_tokens(question), output_len or count_tokens(answer)
        if min(input_len, length) >= 4 and input_len <= 1024 and input_len + length <= 2048:
            requests.append(Request(question, length))
    if not requests:
        raise ConfigError(f"dataset_path {path}: holds no conversation of fitting length")
    return requests


def repeated(requests: list[Request], count: int | None) -> list[Request]:
    """`count` of them, from the beginning again when there are too few; None: all, once."""
    return [requests[i % len(requests)] for i in range(count or len(requests))]
