"""Drives an OpenAI-compatible server and reports its speed, as `vllm bench serve` does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import math
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from tqdm import tqdm

from benchmarks import workloads
from benchmarks.serving import metrics, replicas, server_cpu
from benchmarks.serving.client import UNREACHABLE, Answer, Client, Failure
from benchmarks.serving.conversations import Conversations, token_ids_of
from benchmarks.serving.flags import DatasetFlags, ReportFlags, TargetFlags, TrafficFlags
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.rate_search import RateSearch, Run, finite
from benchmarks.workloads import Request
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, load

TEST_SEED, WARMUP_SEED = 2**40, 2**41  # far from the seeds of measured prompts; `random` ignores signs
EPILOG = """examples:
  quire bench serve                                    random prompts, all at once, at http://127.0.0.1:8000
  quire bench serve --port 9000 --num-prompts 200 --random-input-len 256 --random-output-len 256 --max-concurrency 64
  quire bench serve --request-rate 8 --goodput ttft:500 tpot:50 --metric-percentiles 50,90,99 --save-result
  quire bench serve --find-max-rate p99_ttft:500 p99_itl:30 --find-seconds 60 --dataset-name chat
  quire bench serve --dataset-name custom --dataset-path prompts.jsonl --endpoint /v1/chat/completions
  quire bench serve --dataset-name random-mm --endpoint /v1/chat/completions --num-prompts 200 --max-concurrency 64
  quire bench serve --dataset-name conversations --max-concurrency 64 --num-prompts 2000
  quire bench serve --replay trace.jsonl               what `quire serve --record-trace trace.jsonl` saw, at its times

Flags, labels and JSON keys are those of `vllm bench serve`; any OpenAI-compatible server will do. Random prompts are
sent as token ids, so no tokenizer is needed. --max-concurrency conversations are held at the same time. A custom
dataset is a text file with one prompt on each line, or .jsonl with {"prompt": "...", "output_len": 128} (or
{"messages": [...]} for chat). The exit code is 1 when any request failed."""


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
        lines = [metrics.table(result, benchmark.report.report), *lines]
        if cores := result.get("server_cpu"):
            lines.append(server_cpu.describe(cores, result["output_throughput"]))
        lines += about_clients(benchmark.clients)
    if path := benchmark.save(result):
        print(f"saved {path}")
    print("\n".join(lines))
    return 1 if result["failed"] or not result["completed"] else 0


class Benchmark:
    """One call of the command. `notes` are for the user: after the table, or alone when nothing was measured."""

    def __init__(self, target: TargetFlags, dataset: DatasetFlags, traffic: TrafficFlags, report: ReportFlags) -> None:
        self.target, self.dataset, self.traffic, self.report = target, dataset, traffic, report
        if dataset.replay is not None and (traffic.rate != math.inf or traffic.find_max_rate):
            raise ConfigError("replay has times of its own: leave request_rate and find_max_rate out")
        self._converses = dataset.dataset_name == "conversations"
        if self._converses:
            check_conversations(target, traffic)
        self._conversations: Conversations | None = None  # once the server has been asked
        self.notes: list[str] = []
        self.clients: list[dict[str, float]] = []  # how busy we were ourselves, in each pass
        self.server: dict[str, Any] = {"url": target.url}
        self._client = Client(
            target.url,
            headers=target.headers,
            timeout=target.request_timeout,
            insecure=target.insecure,
            keep_events=report.save_detailed or self._converses,
        )
        self._prompts = Prompts(target, dataset, self._client)

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
            await self._warm_up(self.traffic.num_warmups)
        print("Starting main benchmark run...")
        result = await (self._find_max_rate if self.traffic.find_max_rate else self._repeat)(requests)
        if not result["completed"]:
            self.notes.insert(0, f"Nothing was measured. All {result['failed']} requests failed.")
        return result

    async def _warm_up(self, count: int) -> None:
        """Send requests that do not count. Conversations go on afterwards."""
        if self._conversations is not None:
            await self._converse(self._conversations, count, "warming up")
        else:
            warmups = await self._prompts.encode(self._prompts.requests(seed=WARMUP_SEED, count=count))
            await self._pass(warmups, [0.0] * len(warmups), "warming up")

    async def _repeat(self, requests: list[tuple[bytes, int]]) -> dict[str, Any]:
        traffic = self.traffic
        arrivals = self._prompts.arrivals()
        if arrivals is not None:
            print(f"Replaying {len(arrivals)} requests of {arrivals[-1]:.1f} s, {traffic.replay_speed:g} times as fast")
        print(f"Traffic request rate: {traffic.request_rate}")
        kind = "Poisson process" if traffic.burstiness == 1 else "Gamma distribution"
        print(f"Burstiness factor: {traffic.burstiness} ({kind})")
        print(f"Maximum request concurrency: {traffic.max_concurrency}")
        results = []
        for number in range(traffic.repeat):
            title = f"run {number + 1}/{traffic.repeat}" if traffic.repeat > 1 else "requests"
            if self._conversations is not None:
                results.append(self._measure(await self._converse(self._conversations, len(self._prompts), title)))
                continue
            if number:
                requests = await self._prompts.encode(self._prompts.requests(self.dataset.seed + number))
            if arrivals is None:
                delays = arrival_times(len(requests), traffic.rate, traffic.burstiness, self.dataset.seed + number)
            else:
                delays = [seconds / traffic.replay_speed for seconds in arrivals]
            run = await self._pass(requests, delays, title)
            results.append(self._measure(run))
        return self._result(results)

    async def _find_max_rate(self, requests: list[tuple[bytes, int]]) -> dict[str, Any]:
        """Search for the highest rate that holds; the figures are those of that rate."""

        async def run_at(rate: float, number: int, count: int | None) -> tuple[Run, list[float]]:
            nonlocal requests
            seed = self.dataset.seed + number
            if number:
                requests = await self._prompts.encode(self._prompts.requests(seed, count))
            delays = arrival_times(len(requests), rate, self.traffic.burstiness, seed)
            return await self._pass(requests, delays, f"rate {rate:.4g}"), delays

        search = RateSearch(self.traffic, run_at, self._measure)
        best = await search.run()
        self.notes += search.notes(len(requests), best)
        return self._result([best]) | {"configured_rate": search.best_rate, "find_max_rate": search.found()}

    async def _first_requests(self) -> list[tuple[bytes, int]]:
        """The prompts of the first pass, when a single one like them has been answered."""
        print("Starting initial single prompt test run...")
        first: Failure | None = None
        while True:
            try:
                (like,) = self._prompts.requests(seed=TEST_SEED, count=1)
                if self.dataset.is_random:
                    assert isinstance(like.prompt, list)
                    like.prompt[-1] = self._prompts.vocab_size - 1  # the largest id that may come
                (test,) = await self._prompts.encode([like])
                answer = await self._client.stream(*test)
                if self._converses:
                    token_ids_of(answer)
                if answer.ok:
                    break
                raise Failure(answer.cause, answer.error.removeprefix(f"{answer.cause}: "))
            except Failure as error:
                first = first or error
                smaller = self._prompts.vocab_size // 2
                given = self.dataset.random_vocab_size is not None or not self.dataset.is_random
                if error.cause not in ("HTTP 400", "HTTP 422") or given or smaller < 64:
                    raise first from None
                self._prompts.vocab_size = smaller  # perhaps the model has fewer tokens
        if self._prompts.vocab_size < workloads.MAX_TOKEN_ID and self.dataset.random_vocab_size is None:
            print(f"The server refuses larger token ids: random ones are below {self._prompts.vocab_size:,}.")
        print("Initial test run completed.")
        if self._converses:
            shape = self._prompts.conversations(self.traffic.max_concurrency or 1, self.dataset.seed)
            self._conversations = Conversations(shape, self._ask)
            return []
        return await self._prompts.encode(self._prompts.requests(self.dataset.seed))

    # Traffic

    async def _look_at_server(self) -> None:
        """Find the model's name, and keep what the server says of itself. `Failure` when it cannot be reached."""
        deadline = time.monotonic() + self.target.ready_check_timeout_sec
        while True:
            try:
                models = await self._client.json("GET", "/v1/models")
                break
            except Failure as error:
                if time.monotonic() < deadline:
                    await asyncio.sleep(0.5)
                elif self._prompts.model and error.cause not in UNREACHABLE:
                    return  # it does not list its models; perhaps it serves this one
                else:
                    raise
        self.server["models"] = models.get("data") if isinstance(models, dict) else None
        with contextlib.suppress(Failure):
            self.server["version"] = await self._client.json("GET", "/version")
        if found := re.search(r"^\w+:cache_config_info\{(.*)\}", await self._client.metrics(), re.MULTILINE):
            self.server["cache_config"] = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
        if not self._prompts.model:
            try:
                self._prompts.model = self.server["models"][0]["id"]
            except (LookupError, TypeError):
                raise Failure("no model", "the server lists none: give --model") from None

    async def _pass(self, requests: list[tuple[bytes, int]], delays: Sequence[float], title: str) -> Run:
        """Send all requests so many seconds after the start and wait for the answers."""
        limit = asyncio.Semaphore(self.traffic.max_concurrency or len(requests))
        late: list[float] = []

        async def one(request: bytes, prompt_len: int, answered: Callable[[], object]) -> Answer:
            arrived = time.perf_counter()
            async with limit:
                answer = await self._client.stream(request, prompt_len)
            answer.queue_time = answer.start - arrived
            answered()
            return answer

        async def send(answered: Callable[[], object]) -> list[Answer]:
            start, tasks = time.perf_counter(), []
            for request, delay in zip(requests, delays, strict=True):
                if (wait := start + delay - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                late.append(time.perf_counter() - start - delay)
                tasks.append(asyncio.create_task(one(*request, answered)))
            return await asyncio.gather(*tasks)

        run = await self._timed(send, len(requests), title)
        if any(delays):
            run.client["send_lateness_p99_ms"] = float(np.percentile(late, 99)) * 1e3
        return run

    async def _converse(self, conversations: Conversations, count: int, title: str) -> Run:
        """Go on with the conversations for so many requests."""
        return await self._timed(lambda answered: conversations.run(count, answered), count, title)

    async def _ask(self, request: Request) -> Answer:
        ((body, prompt_len),) = await self._prompts.encode([request])
        return await self._client.stream(body, prompt_len)

    async def _timed(
        self, send: Callable[[Callable[[], object]], Awaitable[list[Answer]]], count: int, title: str
    ) -> Run:
        """Measure the time of `send`, which calls its argument for each of `count` answers and returns them."""
        bar = tqdm(total=count, desc=title, unit="req", disable=self.report.disable_tqdm, mininterval=0.5)
        before = await self._client.metrics()
        with bar:
            async with watched() as client:
                start = time.perf_counter()
                answers = await send(bar.update)
                duration = time.perf_counter() - start
        after = await self._client.metrics()
        num_events = sum(len(answer.times) for answer in answers)
        client["events_per_second"] = num_events / duration
        client["max_events_per_second"] = num_events / max(client.pop("cpu_seconds"), 1e-9)
        engines = replicas.between(before, after)
        if cores := server_cpu.between(before, after, duration):
            engines["server_cpu"] = cores
        return Run(answers, duration, client, engines)

    def _measure(self, run: Run) -> dict[str, Any]:
        """The figures of one pass, and what is odd about it."""
        report = self.report.report
        result = metrics.measure(run.answers, run.duration, report) | run.engines | {"client": run.client}
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
            "model_id": target.model or self._prompts.model,
            "tokenizer_id": target.tokenizer,
            "num_prompts": len(self._prompts),
            **metadata,
            "request_rate": finite(rate),
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
        from engine.setup.machine import environment

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


def check_conversations(target: TargetFlags, traffic: TrafficFlags) -> None:
    """Raise `ConfigError` if conversations cannot be held so."""
    if traffic.max_concurrency is None:
        raise ConfigError("conversations need --max-concurrency, their number at the same time")
    if traffic.rate != math.inf or traffic.find_max_rate:
        raise ConfigError("a turn follows the answer before it: leave request_rate and find_max_rate out")
    if target.chat:
        raise ConfigError("conversations are token ids: they need --endpoint /v1/completions")


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are sent: gamma-distributed gaps, stretched to end at count / rate."""
    if rate == math.inf:
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    return list(times * (count / rate / times[-1]))


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[dict[str, float]]:
    """Measure this process in the block: share of a core, delay of the event loop. No garbage collection."""
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
    """Load of this client in its busiest pass; warnings if it was measured rather than the server."""
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


def _raise_file_limit() -> None:
    """Each request at a time needs a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
