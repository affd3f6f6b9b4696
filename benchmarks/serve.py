"""Drives an OpenAI-compatible server and reports its speed, as `vllm bench serve` does. Knows flags, traffic and files.

The client is `openai_client`, the arithmetic `serve_metrics`, the prompts `workloads`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from tqdm import tqdm

from benchmarks import serve_metrics as metrics
from benchmarks import workloads
from benchmarks.openai_client import UNREACHABLE, Answer, Client, Failure
from benchmarks.serve_metrics import METRICS, Report
from benchmarks.workloads import Request
from engine.config import Parser, add_flags, check, flag, load
from engine.errors import ConfigError

RANDOM = ("random", "prefix_repetition")
FILES = ("custom", "sharegpt")
TEST_SEED, WARMUP_SEED = 2**40, 2**41  # far from the seeds of measured prompts; `random` ignores signs
EPILOG = """examples:
  quire bench serve                                    random prompts, all at once, at http://127.0.0.1:8000
  quire bench serve --port 9000 --num-prompts 200 --random-input-len 256 --random-output-len 256 --max-concurrency 64
  quire bench serve --request-rate 8 --goodput ttft:500 tpot:50 --metric-percentiles 50,90,99 --save-result
  quire bench serve --find-max-rate p99_ttft:500 p99_tpot:50 --num-prompts 300
  quire bench serve --dataset-name custom --dataset-path prompts.jsonl --endpoint /v1/chat/completions

Flags, labels and JSON keys are those of `vllm bench serve`; any OpenAI-compatible server will do. Random prompts are sent
as token ids, so no tokenizer is needed. A custom dataset is a text file with one prompt on each line, or .jsonl with
{"prompt": "...", "output_len": 128} (or {"messages": [...]} for chat). The exit code is 1 when any request failed.
"""


@dataclass(frozen=True)
class TargetFlags:
    """Server."""

    base_url: str | None = flag(None, "where it is, instead of --host and --port", metavar="URL")
    host: str = flag("127.0.0.1", "its address")
    port: int = flag(8000, "its port", at_least=1, at_most=65535)
    endpoint: str = flag("/v1/completions", "/v1/completions or /v1/chat/completions", metavar="PATH")
    backend: str = flag(
        "openai", "kind of API; all mean what --endpoint says", choices=("openai", "vllm", "quire", "openai-chat")
    )
    model: str | None = flag(None, "name of the model (else the first that the server lists)", metavar="NAME")
    served_model_name: str | None = flag(None, "name in the API, when --model is a path", metavar="NAME")
    tokenizer: str | None = flag(
        None,
        "folder or Hugging Face id, to make texts of random prompts or to count a dataset's tokens",
        metavar="MODEL",
    )
    header: tuple[str, ...] = flag((), "more headers for each request", metavar="KEY=VALUE")
    api_key: str | None = flag(None, "key of the server (also OPENAI_API_KEY)", metavar="KEY")
    insecure: bool = flag(False, "accept any TLS certificate")
    request_timeout: float = flag(21600.0, "seconds that one request may take", above=0)
    ready_check_timeout_sec: int = flag(0, "seconds to wait for a server that is not up yet", at_least=0)
    temperature: float | None = flag(None, "of sampling (else the server's default)", at_least=0)
    top_p: float | None = flag(None, "of sampling", above=0, at_most=1)
    top_k: int | None = flag(None, "of sampling", at_least=-1)
    min_p: float | None = flag(None, "of sampling", at_least=0, at_most=1)
    ignore_eos: bool | None = flag(None, "answers of full length, whatever is in them (else for random prompts only)")
    extra_body: dict[str, Any] | None = flag(None, "more fields for each request")  # noqa: RUF009

    def __post_init__(self) -> None:
        check(self)
        if self.base_url is not None and (self.host, self.port) != ("127.0.0.1", 8000):
            raise ConfigError("base_url says where the server is, and so do host and port: give one of them")
        if not self.endpoint.endswith("/completions") or not self.endpoint.startswith("/"):
            raise ConfigError(f"endpoint must be a path that ends in /completions, got {self.endpoint!r}")
        if self.backend == "openai-chat" and not self.chat:
            raise ConfigError(f"backend openai-chat needs --endpoint /v1/chat/completions, got {self.endpoint}")
        for item in self.header:
            if not re.fullmatch(r"[\w-]+=[^\r\n]*", item):
                raise ConfigError(f"header must be KEY=VALUE, got {item!r}")
        for name in ("stream", "stream_options", "prompt", "messages", "n"):
            if name in (self.extra_body or {}):
                raise ConfigError(f"extra_body must not hold {name!r}, which the benchmark needs for itself")

    @property
    def chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url or f"http://{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        given = dict(item.split("=", 1) for item in self.header)
        return ({"Authorization": f"Bearer {key}"} if key else {}) | given

    @property
    def secrets(self) -> list[str]:
        """What must not be saved."""
        given = [self.api_key or "", *(item.split("=", 1)[1] for item in self.header)]
        return [secret for secret in given if len(secret) > 3]


@dataclass(frozen=True)
class DatasetFlags:
    """Prompts."""

    dataset_name: str = flag(
        "random",
        f"random, prefix_repetition, custom or sharegpt (files), or one of {', '.join(workloads.NAMED)}",
        choices=(*RANDOM, *FILES, *workloads.NAMED),
        metavar="NAME",
    )
    dataset_path: str | None = flag(None, "file of a custom or sharegpt dataset", metavar="FILE")
    num_prompts: int | None = flag(None, "how many (else 1000, or all of a file)", at_least=1)
    seed: int = flag(0, "of random prompts, order and arrival times", at_least=0)
    input_len: int | None = flag(None, "short for --random-input-len", at_least=1)
    output_len: int | None = flag(None, "tokens of each answer, whatever the dataset", at_least=1)
    random_input_len: int = flag(1024, "prompt tokens of random", at_least=1)
    random_output_len: int = flag(128, "answer tokens of random", at_least=1)
    random_range_ratio: float = flag(0.0, "lengths of random vary by this share, from 0 to below 1", at_least=0)
    random_prefix_len: int = flag(0, "more tokens before each prompt of random, the same in all", at_least=0)
    random_vocab_size: int | None = flag(
        None, "random token ids are below this (else 10000, or less if the server takes no more)", at_least=1
    )
    prefix_repetition_prefix_len: int = flag(256, "tokens that prompts of prefix_repetition share", at_least=1)
    prefix_repetition_suffix_len: int = flag(256, "tokens of each that are its own", at_least=1)
    prefix_repetition_num_prefixes: int = flag(10, "how many different prefixes", at_least=1)
    prefix_repetition_output_len: int = flag(128, "answer tokens", at_least=1)
    custom_output_len: int = flag(256, "answer tokens of custom prompts that do not say", at_least=1)
    sharegpt_output_len: int | None = flag(None, "answer tokens (else as many as the dataset's answer)", at_least=1)
    disable_shuffle: bool = flag(False, "keep the order of a file")

    def __post_init__(self) -> None:
        check(self)
        if self.dataset_name in FILES and self.dataset_path is None:
            raise ConfigError(f"dataset_name {self.dataset_name} needs --dataset-path")
        if self.dataset_name not in FILES and self.dataset_path is not None:
            raise ConfigError(f"dataset_path is for custom and sharegpt, but dataset_name is {self.dataset_name}")
        if self.random_range_ratio >= 1:
            raise ConfigError(f"random_range_ratio must be below 1, got {self.random_range_ratio:g}")
        if self.input_len is not None and self.dataset_name != "random":
            raise ConfigError(f"input_len is for random prompts, but dataset_name is {self.dataset_name}")
        if self.output_len is not None and self.dataset_name in workloads.NAMED:
            raise ConfigError(f"dataset_name {self.dataset_name} has answer lengths of its own: leave output_len out")
        count, prefixes = self.num_prompts or 1000, self.prefix_repetition_num_prefixes
        if self.dataset_name == "prefix_repetition" and count < prefixes:
            raise ConfigError(f"num_prompts must be at least prefix_repetition_num_prefixes ({prefixes}), got {count}")

    @property
    def is_random(self) -> bool:
        return self.dataset_name not in FILES


@dataclass(frozen=True)
class TrafficFlags:
    """Traffic."""

    request_rate: str = flag("inf", "requests a second; inf: all at once", metavar="X")
    burstiness: float = flag(
        1.0, "1: Poisson arrivals; below: in bursts; above: more regular (needs --request-rate)", above=0
    )
    max_concurrency: int | None = flag(None, "most requests at the same time", at_least=1)
    num_warmups: int = flag(0, "requests before the clock runs", at_least=0)
    repeat: int = flag(
        1, "how often to measure, with other prompts; more than 1 gives confidence intervals", at_least=1
    )
    find_max_rate: tuple[str, ...] = flag(
        (), "find the highest rate at which these milliseconds hold, such as p99_ttft:500 p99_tpot:50", metavar="TARGET"
    )

    def __post_init__(self) -> None:
        check(self)
        try:
            rate = float(self.request_rate)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            raise ConfigError(f"request_rate must be inf or a number above 0, got {self.request_rate!r}")
        if self.burstiness != 1 and rate == math.inf and not self.find_max_rate:
            raise ConfigError("burstiness has no effect on requests that are sent all at once: give a --request-rate")
        if self.find_max_rate and rate != math.inf:
            raise ConfigError("find_max_rate chooses the rates itself: leave request_rate out")
        if self.find_max_rate and self.repeat > 1:
            raise ConfigError("find_max_rate and repeat cannot be combined")
        for text in self.find_max_rate:
            Target.parse(text)

    @property
    def rate(self) -> float:
        return float(self.request_rate)


@dataclass(frozen=True)
class ReportFlags:
    """Report."""

    goodput: tuple[str, ...] = flag(
        (), "limits of a good request in ms, such as ttft:500 tpot:50 e2el:9000", metavar="LIMIT"
    )
    percentile_metrics: str = flag("ttft,tpot,itl", f"what to report, of {','.join(METRICS)}", metavar="LIST")
    metric_percentiles: str = flag("99", "percentiles to report, such as 50,90,99", metavar="LIST")
    disable_tqdm: bool = flag(False, "no progress bar")
    save_result: bool = flag(False, "save the result as JSON")
    append_result: bool = flag(False, "add the result to the file, as a line of its own")
    save_detailed: bool = flag(False, "save times and texts of each request, too")
    result_dir: str | None = flag(None, "where to save it (else here)", metavar="FOLDER")
    result_filename: str | None = flag(None, "name of the file", metavar="NAME")
    label: str | None = flag(None, "first part of the file's name (else the backend)", metavar="TEXT")
    metadata: tuple[str, ...] = flag((), "what to save with the result", metavar="KEY=VALUE")

    def __post_init__(self) -> None:
        check(self)
        names = tuple(filter(None, self.percentile_metrics.split(",")))
        for name in names:
            if name not in METRICS:
                raise ConfigError(f"percentile_metrics must be of {','.join(METRICS)}, got {name!r}")
        for text in self.metric_percentiles.split(","):
            try:
                inside = 0 <= float(text) <= 100
            except ValueError:
                inside = False
            if not inside:
                raise ConfigError(f"metric_percentiles must be numbers from 0 to 100, got {text!r}")
        for item in self.metadata:
            if "=" not in item:
                raise ConfigError(f"metadata must be KEY=VALUE, got {item!r}")
        saving = self.save_result or self.append_result
        for name in ("save_detailed", "result_dir", "result_filename"):
            if getattr(self, name) and not saving:
                raise ConfigError(f"{name} needs --save-result")
        _ = self.report

    @functools.cached_property
    def report(self) -> Report:
        limits = {}
        for item in self.goodput:
            name, _, limit = item.partition(":")
            if name not in ("ttft", "tpot", "e2el") or not re.fullmatch(r"\d+(\.\d+)?", limit):
                raise ConfigError(f"goodput must be like ttft:500, tpot:50 or e2el:9000 (milliseconds), got {item!r}")
            limits[name] = float(limit)
        return Report(
            tuple(filter(None, self.percentile_metrics.split(","))),
            tuple(float(text) for text in self.metric_percentiles.split(",")),
            limits or None,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A percentile of a metric that is to stay within a limit."""

    metric: str
    percentile: float
    limit_ms: float

    @classmethod
    def parse(cls, text: str) -> Target:
        match = re.fullmatch(r"(?:p(\d+(?:\.\d+)?)_)?(\w+):(\d+(?:\.\d+)?)", text)
        if not match or match[2] not in METRICS or float(match[1] or 99) > 100:
            raise ConfigError(f"find_max_rate must be like p99_ttft:500 (of {', '.join(METRICS)}), got {text!r}")
        return cls(match[2], float(match[1] or 99), float(match[3]))

    @property
    def name(self) -> str:
        return f"p{self.percentile:g}_{self.metric}_ms"

    def measured(self, answers: Sequence[Answer]) -> float:
        """Milliseconds."""
        values = metrics.samples_of(answers)[self.metric]
        return metrics.summarize(self.metric, values, [self.percentile])[self.name]


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="quire bench serve", description="Measure the speed of an OpenAI-compatible server.", epilog=EPILOG
    )
    groups = (TargetFlags, DatasetFlags, TrafficFlags, ReportFlags)
    add_flags(parser, *groups)
    benchmark = Benchmark(*load(parser.parse_args(argv), *groups))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(benchmark.run())
    lines = benchmark.notes
    if result["completed"]:
        lines = [metrics.table(result, benchmark.report.report), *lines, *about_clients(benchmark.clients)]
    print("\n".join(lines))
    if path := benchmark.save(result):
        print(f"saved {path}")
    return 1 if result["failed"] or not result["completed"] else 0


@dataclass
class Run:
    """One pass over the prompts."""

    answers: list[Answer]
    duration: float
    client: dict[str, float]  # how busy we were ourselves


class Benchmark:
    """One call of the command. `notes` are for the user: after the table, or alone when nothing was measured."""

    def __init__(self, target: TargetFlags, dataset: DatasetFlags, traffic: TrafficFlags, report: ReportFlags) -> None:
        self.target, self.dataset, self.traffic, self.report = target, dataset, traffic, report
        self.notes: list[str] = []
        self.clients: list[dict[str, float]] = []  # how busy we were ourselves, in each pass
        self.server: dict[str, Any] = {"url": target.url}
        self.model = target.served_model_name or target.model or ""
        self._vocab_size = dataset.random_vocab_size or workloads.MAX_TOKEN_ID
        self._file = self._read_file()
        self._client = Client(
            target.url,
            headers=target.headers,
            timeout=target.request_timeout,
            insecure=target.insecure,
            keep_events=report.save_detailed,
        )

    async def run(self) -> dict[str, Any]:
        """The result; nothing is sent to a server that does not answer the first request."""
        _raise_file_limit()
        try:
            return await self._run()
        finally:
            await self._client.close()

    async def _run(self) -> dict[str, Any]:
        try:
            await self._look_at_server()
            requests = await self._first_requests()
        except Failure as error:
            failed = Answer(0, error=str(error), cause=error.cause)
            self.notes.append(f"Nothing was measured. The first request failed: {error}")
            return self._result([metrics.measure([failed], 1.0, self.report.report)]) | {"duration": 0.0}
        if self.traffic.num_warmups:
            print(f"Warming up with {self.traffic.num_warmups} requests...")
            warmups = await self._encode(self._requests(seed=WARMUP_SEED, count=self.traffic.num_warmups))
            await self._pass(warmups, math.inf, seed=0, title="warming up")
        print("Starting main benchmark run...")
        result = await (self._find_max_rate if self.traffic.find_max_rate else self._repeat)(requests)
        if not result["completed"]:
            self.notes.insert(0, f"Nothing was measured. All {result['failed']} requests failed.")
        return result

    async def _repeat(self, requests: list[tuple[bytes, int]]) -> dict[str, Any]:
        traffic = self.traffic
        print(f"Traffic request rate: {traffic.request_rate}")
        kind = "Poisson process" if traffic.burstiness == 1 else "Gamma distribution"
        print(f"Burstiness factor: {traffic.burstiness} ({kind})")
        print(f"Maximum request concurrency: {traffic.max_concurrency}")
        results = []
        for number in range(traffic.repeat):
            if number:
                requests = await self._encode(self._requests(self.dataset.seed + number))
            title = f"run {number + 1}/{traffic.repeat}" if traffic.repeat > 1 else "requests"
            run = await self._pass(requests, traffic.rate, self.dataset.seed + number, title)
            results.append(self._measure(run))
        return self._result(results)

    async def _find_max_rate(self, requests: list[tuple[bytes, int]]) -> dict[str, Any]:
        """Between no rate and what the server does at most, by halves; the figures are those of the highest that holds."""
        targets = [Target.parse(text) for text in self.traffic.find_max_rate]
        probes: list[dict[str, Any]] = []

        async def probe(rate: float) -> tuple[bool, dict[str, Any]]:
            nonlocal requests
            if probes:
                requests = await self._encode(self._requests(self.dataset.seed + len(probes)))
            run = await self._pass(requests, rate, self.dataset.seed + len(probes), f"rate {rate:.4g}")
            found = {target.name: target.measured(run.answers) for target in targets}
            holds = all(a.ok for a in run.answers) and all(found[t.name] <= t.limit_ms for t in targets)
            shown = ", ".join(f"{t.name} {found[t.name]:.1f} of {t.limit_ms:g}" for t in targets)
            measured = self._measure(run)
            if measured["completed"]:
                print(f"rate {rate:<8.4g} {'holds' if holds else 'fails'}   {shown}", flush=True)
            throughput = measured["request_throughput"]
            probes.append({"rate": _finite(rate), "holds": holds, "request_throughput": throughput, **found})
            return holds, measured

        holds, best = await probe(math.inf)
        low, high = (math.inf, math.inf) if holds else (0.0, best["request_throughput"])
        lowest = high / 64
        while high > lowest and high > low * 1.05 and best["completed"]:
            rate = (low + high) / 2
            holds, measured = await probe(rate)
            if holds:
                low, best = rate, measured
            else:
                high = rate
        found = {"targets": list(self.traffic.find_max_rate), "max_rate": _finite(low), "probes": probes}
        if low == math.inf:
            self.notes.append(
                f"The targets hold even with all {len(requests)} requests at once: try more --num-prompts."
            )
        elif low:
            self.notes.append(f"Highest request rate that holds (RPS): {low:.4g} (fails at {high:.4g})")
        elif best["completed"]:
            self.notes.append(f"No rate holds: the targets fail even at {high:.3g} requests a second.")
        return self._result([best]) | {"configured_rate": low if 0 < low < math.inf else None, "find_max_rate": found}

    # Prompts

    def _read_file(self) -> list[Request] | None:
        """The prompts of the dataset's file."""
        dataset = self.dataset
        if dataset.dataset_path is None:
            return None
        path = Path(dataset.dataset_path)
        if dataset.dataset_name == "sharegpt":
            encode = self._tokenizer("a sharegpt dataset").encode
            length = dataset.output_len or dataset.sharegpt_output_len
            requests = workloads.read_sharegpt(path, length, lambda text: len(encode(text)))
        else:
            requests = workloads.read_prompts(path, dataset.output_len or dataset.custom_output_len)
            if dataset.output_len is not None:
                requests = [Request(request.prompt, dataset.output_len) for request in requests]
        for request in requests:
            kind = "messages" if isinstance(request.prompt, list) and isinstance(request.prompt[0], dict) else "prompt"
            if kind == "messages" and not self.target.chat:
                raise ConfigError(f"{path} has messages: they need --endpoint /v1/chat/completions")
            if isinstance(request.prompt, list) and kind == "prompt" and self.target.chat:
                raise ConfigError(f"{path} has token ids: they need --endpoint /v1/completions")
        return requests

    def _tokenizer(self, purpose: str) -> Any:
        from engine.models.hub import resolve_model
        from engine.text.tokenizer import Tokenizer

        if self.target.tokenizer is None:
            raise ConfigError(f"{purpose} needs --tokenizer")
        return Tokenizer.from_folder(resolve_model(self.target.tokenizer, weights=False))

    def _requests(self, seed: int, count: int | None = None) -> list[Request]:
        """The prompts of one pass; others for another seed, but for those of files and named workloads."""
        data = self.dataset
        count = count or data.num_prompts
        if self._file is not None:
            order = list(self._file)
            if not data.disable_shuffle:
                workloads.random.Random(data.seed).shuffle(order)
            return workloads.repeated(order, count)
        if data.dataset_name == "random":
            return workloads.random_requests(
                count or 1000,
                input_len=data.input_len or data.random_input_len,
                output_len=data.output_len or data.random_output_len,
                range_ratio=data.random_range_ratio,
                prefix_len=data.random_prefix_len,
                vocab_size=self._vocab_size,
                seed=seed,
            )
        if data.dataset_name == "prefix_repetition":
            prefixes = min(data.prefix_repetition_num_prefixes, count or 1000)
            return workloads.prefix_repetition(
                count or 1000,
                num_prefixes=prefixes,
                prefix_len=data.prefix_repetition_prefix_len,
                suffix_len=data.prefix_repetition_suffix_len,
                output_len=data.output_len or data.prefix_repetition_output_len,
                vocab_size=self._vocab_size,
                seed=seed,
            )
        return workloads.repeated(workloads.named(data.dataset_name, self._vocab_size).requests, count)

    async def _first_requests(self) -> list[tuple[bytes, int]]:
        """The prompts of the first pass, when a single one like them has been answered."""
        print("Starting initial single prompt test run...")
        first: Failure | None = None
        while True:
            try:
                (like,) = self._requests(seed=TEST_SEED, count=1)
                if self.dataset.is_random:
                    assert isinstance(like.prompt, list)
                    like.prompt[-1] = self._vocab_size - 1  # the largest id that may come
                (test,) = await self._encode([like])
                answer = await self._client.stream(*test)
                if answer.ok:
                    break
                raise Failure(answer.cause, answer.error.removeprefix(f"{answer.cause}: "))
            except Failure as error:
                first = first or error
                smaller = self._vocab_size // 2
                given = self.dataset.random_vocab_size is not None or not self.dataset.is_random
                if error.cause not in ("HTTP 400", "HTTP 422") or given or smaller < 64:
                    raise first from None
                self._vocab_size = smaller  # perhaps the model has fewer tokens
        if self._vocab_size < workloads.MAX_TOKEN_ID and self.dataset.random_vocab_size is None:
            print(f"The server refuses larger token ids: random ones are below {self._vocab_size:,}.")
        print("Initial test run completed.")
        return await self._encode(self._requests(self.dataset.seed))

    async def _encode(self, requests: list[Request]) -> list[tuple[bytes, int]]:
        """(bytes to send, prompt length) of each."""
        common: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if getattr(self.target, name) is not None:
                common[name] = getattr(self.target, name)
        ignore_eos = self.target.ignore_eos
        if ignore_eos or (ignore_eos is None and self.dataset.is_random):
            common["ignore_eos"] = True
        common |= self.target.extra_body or {}
        if self.target.chat and self.dataset.is_random:
            requests = await self._as_texts(requests)
        encoded = []
        for request in requests:
            prompt = request.prompt
            if self.target.chat:
                messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                body = {**common, "messages": messages, "max_completion_tokens": request.output_len}
            else:
                body = {**common, "prompt": prompt, "max_tokens": request.output_len}
            num_tokens = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else 0
            encoded.append((self._client.request("POST", self.target.endpoint, body), num_tokens))
        return encoded

    async def _as_texts(self, requests: list[Request]) -> list[Request]:
        """Random token ids as texts, for chat; their lengths are then near to those wanted, and the server counts them."""
        if self.target.tokenizer is not None:
            tokenizer = self._tokenizer("chat")
            return [Request(tokenizer.decode(request.prompt), request.output_len) for request in requests]
        texts = []
        try:
            for request in requests:
                body = {"model": self.model, "tokens": request.prompt}
                texts.append((await self._client.json("POST", "/detokenize", body))["prompt"])
        except Failure as error:
            details = f"/detokenize, {error}; give --tokenizer, to make random texts here"
            raise Failure(error.cause, details) from None
        return [Request(text, request.output_len) for text, request in zip(texts, requests, strict=True)]

    # Traffic

    async def _look_at_server(self) -> None:
        """Find the model's name, and keep what the server says of itself. `Failure` when nobody is there."""
        deadline = time.monotonic() + self.target.ready_check_timeout_sec
        while True:
            try:
                models = await self._client.json("GET", "/v1/models")
                break
            except Failure as error:
                if time.monotonic() < deadline:
                    await asyncio.sleep(0.5)
                elif self.model and error.cause not in UNREACHABLE:
                    return  # it does not list its models; perhaps it serves this one
                else:
                    raise
        self.server["models"] = models.get("data") if isinstance(models, dict) else None
        with contextlib.suppress(Failure):
            self.server["version"] = await self._client.json("GET", "/version")
        with contextlib.suppress(Failure):
            text = (await self._client.fetch("GET", "/metrics")).decode(errors="replace")
            if found := re.search(r"^\w+:cache_config_info\{(.*)\}", text, re.MULTILINE):
                self.server["cache_config"] = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
        if not self.model:
            try:
                self.model = self.server["models"][0]["id"]
            except (LookupError, TypeError):
                raise Failure("no model", "the server lists none: give --model") from None

    async def _pass(self, requests: list[tuple[bytes, int]], rate: float, seed: int, title: str) -> Run:
        """Send all requests at their times and wait for the answers."""
        delays = arrival_times(len(requests), rate, self.traffic.burstiness, seed)
        limit = asyncio.Semaphore(self.traffic.max_concurrency or len(requests))
        bar = tqdm(total=len(requests), desc=title, unit="req", disable=self.report.disable_tqdm, mininterval=0.5)
        late: list[float] = []

        async def one(request: bytes, prompt_len: int) -> Answer:
            arrived = time.perf_counter()
            async with limit:
                answer = await self._client.stream(request, prompt_len)
            answer.queue_time = answer.start - arrived
            bar.update()
            return answer

        with bar:
            async with watched() as client:
                start, tasks = time.perf_counter(), []
                for request, delay in zip(requests, delays, strict=True):
                    if (wait := start + delay - time.perf_counter()) > 0:
                        await asyncio.sleep(wait)
                    late.append(time.perf_counter() - start - delay)
                    tasks.append(asyncio.create_task(one(*request)))
                answers = await asyncio.gather(*tasks)
                duration = time.perf_counter() - start
        num_events = sum(len(answer.times) for answer in answers)
        client["events_per_second"] = num_events / duration
        client["max_events_per_second"] = num_events / max(client.pop("cpu_seconds"), 1e-9)
        if rate != math.inf:
            client["send_lateness_p99_ms"] = float(np.percentile(late, 99)) * 1e3
        return Run(answers, duration, client)

    def _measure(self, run: Run) -> dict[str, Any]:
        """The figures of one pass, and what is odd about it."""
        report = self.report.report
        result = metrics.measure(run.answers, run.duration, report) | {"client": run.client}
        if self.report.save_detailed:
            result |= metrics.details(run.answers)
        self.clients.append(run.client)
        errors = Counter(answer.error for answer in run.answers if not answer.ok).most_common(10)
        self.notes += [f"Failed: {error}" + (f" ({count} times)" if count > 1 else "") for error, count in errors]
        return result

    # Results

    def _result(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """The result file: vLLM's keys, then ours."""
        rate, target = self.traffic.rate, self.target
        metadata = dict(item.split("=", 1) for item in self.report.metadata)
        settings: dict[str, Any] = {}
        for group in (target, self.dataset, self.traffic, self.report):
            settings |= dataclasses.asdict(group)
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": target.backend,
            "backend": target.backend,
            "label": self.report.label,
            "model_id": target.model or self.model,
            "tokenizer_id": target.tokenizer,
            "num_prompts": self.dataset.num_prompts or (len(self._file) if self._file else 1000),
            **metadata,
            "request_rate": _finite(rate),
            "burstiness": self.traffic.burstiness,
            "max_concurrency": self.traffic.max_concurrency,
            "configured_rate": None if rate == math.inf else rate,
            **metrics.merge(results),
            "benchmark": "serve",
            "server": self.server,
            "settings": settings,
        }

    def save(self, result: dict[str, Any]) -> Path | None:
        """Write the result where the flags say; None: nowhere."""
        report = self.report
        if not (report.save_result or report.append_result):
            return None
        from benchmarks.environment import environment

        concurrency = f"-concurrency{self.traffic.max_concurrency}" if self.traffic.max_concurrency else ""
        name = (
            f"{report.label or self.target.backend}-{self.traffic.rate}qps{concurrency}"
            f"-{result['model_id'].rstrip('/').split('/')[-1]}-{result['date']}.json"
        )
        path = Path(report.result_dir or ".") / (report.result_filename or name)
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {key: value for key, value in result.items() if key != "configured_rate"}
        text = json.dumps({**result, "environment": environment()})
        for secret in self.target.secrets:
            text = text.replace(json.dumps(secret)[1:-1], "(not saved)")
        if report.append_result and path.exists() and (before := path.read_text(encoding="utf-8")):
            text = before.rstrip("\n") + "\n" + text
        path.write_text(text + "\n", encoding="utf-8")
        return path


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are sent: gamma-distributed gaps, stretched to end at count / rate."""
    if rate == math.inf:
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    return list(times * (count / rate / times[-1]))


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[dict[str, float]]:
    """Measures this process in the block: its share of a core, and how late its event loop is. No garbage collection."""
    found: dict[str, float] = {}
    lags: list[float] = []

    async def tick() -> None:
        while True:
            wanted = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - wanted)

    ticking = asyncio.create_task(tick())
    gc.collect()
    gc.disable()
    start, cpu = time.perf_counter(), time.process_time()
    try:
        yield found
    finally:
        found["cpu_seconds"] = time.process_time() - cpu
        found["cpu_share"] = found["cpu_seconds"] / (time.perf_counter() - start)
        gc.enable()
        ticking.cancel()
        found["loop_lag_p99_ms"] = float(np.percentile(lags or [0.0], 99)) * 1e3
        found["loop_lag_max_ms"] = max(lags, default=0.0) * 1e3


def about_clients(clients: list[dict[str, float]]) -> list[str]:
    """How busy this client was in its busiest pass; warnings when it was measured rather than the server."""
    if not clients:
        return []
    client = {key: max(other.get(key, 0.0) for other in clients) for key in set().union(*clients)}
    limit = min(other["max_events_per_second"] for other in clients)
    busy = (
        f"{client['cpu_share']:.0%} of a core for {client['events_per_second']:,.0f} events/s; "
        f"its own limit is about {limit:,.0f}."
    )
    if client["cpu_share"] > 0.8:
        return [f"WARNING: this client took {busy} The server may be faster than it looks."]
    found = [f"Client: {busy}"]
    if client["loop_lag_p99_ms"] > 10:
        found.append(
            f"WARNING: this client noticed events up to {client['loop_lag_p99_ms']:.0f} ms late (99th percentile): "
            "other processes take its core, so times look longer than they are."
        )
    if client.get("send_lateness_p99_ms", 0.0) > 50:
        found.append(
            f"WARNING: requests were sent up to {client['send_lateness_p99_ms']:.0f} ms late (99th percentile): "
            "this client cannot keep the request rate."
        )
    return found


def _finite(rate: float) -> float | str:
    """JSON knows no infinity."""
    return "inf" if rate == math.inf else rate


def _raise_file_limit() -> None:
    """Each request at a time needs a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
