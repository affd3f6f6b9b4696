"""Features in pairs over HTTP, with kills and restarts: is every finished answer the request's own, in time?

    python -m tests.attack.pairs                      2,000 requests to five servers, some fifteen minutes
    python -m tests.attack.pairs --requests 100 tensor --json pairs.json

Each server has other settings. Its requests draw from all features of requests, run beside each other, and meet a
fault every 40 requests: an engine process is killed, a rank is killed, all replicas are restarted (SIGHUP), a step
raises an exception. A request may fail then, but not change: a finished answer equals the one that the same request
gets alone, from a server with the same arithmetic and nothing else. No answer comes later than its `timeout_ms` and
half a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.result_files import save
from engine.setup.machine import environment
from tests.attack.clients import SCHEMA, STORY, TOOL
from tests.attack.faults import FOLDER, arm
from tests.attack.soak import what_is_left
from tests.attack.target import Target, serving

ROOM_SECONDS = 0.5  # after a request's deadline
PATIENCE_SECONDS = 180.0  # for an answer without a deadline, over all restarts
NUM_DISTINCT = 3  # how often each request is asked, on average

# Name → settings, and those of them that change the arithmetic, which the server of requests alone has too.
SERVERS: dict[str, tuple[list[str], list[str]]] = {
    "prefix cache file, chunks, preemption": (
        ["--prefix-cache-file", "{folder}/cache", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", "8m"],
        [],
    ),
    "fp8 KV cache, int8 weights, few requests": (
        ["--max-num-seqs", "6"],
        ["--kv-cache-dtype", "fp8", "--quantization", "int8"],
    ),
    "data parallel": (["--data-parallel-size", "2"], []),
    "tensor parallel": (["--max-num-batched-tokens", "128"], ["--tensor-parallel-size", "2"]),
    "pipeline parallel": (["--max-num-batched-tokens", "128"], ["--pipeline-parallel-size", "2"]),
}
COMMON = ["--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "1024"]


def draw_request(draw: random.Random) -> dict[str, Any]:
    """Return a request with random features: path, body, and whether the client hangs up."""
    api = draw.choice(("completions", "completions", "chat/completions", "chat/completions", "responses", "messages"))
    text = (
        draw.choice(("Once", "The cat", "A dog and a cat", STORY[: draw.randrange(20, 600)])) + f" {draw.randrange(9)}"
    )
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    body: dict[str, Any] = {"model": "demo", limit: draw.randrange(1, 70), "stream": draw.random() < 0.5}
    if api == "completions":
        body["prompt"] = text
    else:
        body["input" if api == "responses" else "messages"] = [{"role": "user", "content": text}]
    body.update(_sampling(draw, api))
    body.update(_constraint(draw, api))
    if draw.random() < 0.15:
        body["timeout_ms"] = draw.randrange(20, 1500)
    return {"path": f"/v1/{api}", "body": body, "hangs_up": draw.random() < 0.07}


def _sampling(draw: random.Random, api: str) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": 0}
    if api == "messages":  # has no seed
        return found
    if draw.random() < 0.5:
        found = {"temperature": draw.choice((0.7, 1.0, 1.4)), "seed": draw.randrange(5)}
        found |= draw.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}))
    if draw.random() < 0.3:
        found |= draw.choice(({"repetition_penalty": 1.2}, {"presence_penalty": 0.5, "frequency_penalty": 0.3}))
    if api == "responses":
        return found
    if draw.random() < 0.3:
        found["n"] = draw.randrange(2, 4)
    if draw.random() < 0.3:
        found |= {"logprobs": 2} if api == "completions" else {"logprobs": True, "top_logprobs": 2}
    if draw.random() < 0.2:
        found |= {"logit_bias": {"20": -4, "30": 2}}
    if draw.random() < 0.2:
        found |= {"stop": [".", " the"], "include_stop_str_in_output": draw.random() < 0.5}
    if draw.random() < 0.2:
        found["ignore_eos"] = True
    return found


def _constraint(draw: random.Random, api: str) -> dict[str, Any]:
    if api == "messages" or draw.random() < 0.65:
        return {}
    if api == "responses":
        return {"text": {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}}
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "[a-f]{24}"}},
        {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
        {"structured_outputs": {"json": SCHEMA}},
    ]
    if api == "chat/completions":
        kinds.append({"tools": [TOOL], "tool_choice": "required"})
    return draw.choice(kinds)


@dataclass
class Answer:
    """An answer as its client sees it. `how`: finished, timeout, or why not. `content`: must equal the one alone."""

    how: str
    content: Any = None


async def ask(http: httpx.AsyncClient, request: dict[str, Any]) -> Answer:
    """Send a request and read its answer."""
    try:
        async with http.stream("POST", request["path"], json=request["body"]) as response:
            if response.status_code != 200:
                await response.aread()
                return Answer(str(response.status_code), response.text[:300])
            if not request["body"]["stream"]:
                await response.aread()
                return _finished(_whole(response.json()))
            events = []
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    if request["hangs_up"] and len(events) > 4:
                        return Answer("hung up")
            if failed := next(
                (event for event in events if event.get("error") or event.get("type") == "response.failed"), None
            ):
                return Answer("error event", str(failed)[:300])
            return _finished(_joined(events))
    except httpx.TransportError as error:
        return Answer(type(error).__name__, str(error))


def _finished(parts: list[tuple[str | None, Any]]) -> Answer:
    ends = {end for end, _ in parts}
    return Answer("timeout" if "timeout" in ends else "unfinished" if None in ends or not parts else "finished", parts)


def _whole(answer: dict[str, Any]) -> list[tuple[str | None, Any]]:
    """Return (end, texts) of each part of a whole answer."""
    if "choices" in answer:
        return [(_end(each), _texts(each.get("message") or each)) for each in answer["choices"]]
    if answer.get("object") == "response":
        parts = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
        reason = (answer.get("incomplete_details") or {}).get("reason")
        return [(reason or answer["status"], ("".join(parts), ""))]
    return [(answer.get("stop_reason"), ("".join(part.get("text", "") for part in answer["content"]), ""))]


def _end(choice: dict[str, Any]) -> str | None:
    return "timeout" if choice.get("stop_reason") == "timeout" else choice.get("finish_reason")


def _texts(message: dict[str, Any]) -> tuple[str, str]:
    """Return text and arguments of the calls."""
    calls = "".join(call["function"].get("arguments") or "" for call in message.get("tool_calls") or ())
    text = message.get("text") or message.get("content") or ""
    return (message.get("reasoning_content") or message.get("reasoning") or "") + text, calls


def _joined(events: list[dict[str, Any]]) -> list[tuple[str | None, Any]]:
    """Return what `_whole` does of the events of a stream."""
    if any("choices" in event for event in events):
        texts: dict[int, list[str]] = {}
        ends: dict[int, Any] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            own = texts.setdefault(choice["index"], ["", ""])
            for at, text in enumerate(_texts(choice.get("delta") or choice)):
                own[at] += text
            ends[choice["index"]] = _end(choice) or ends.get(choice["index"])
        return [(ends[index], tuple(texts[index])) for index in sorted(texts)]
    for event in events:
        if event["type"] in ("response.completed", "response.incomplete"):
            return _whole(event["response"])
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    reasons = [event["delta"].get("stop_reason") for event in events if event["type"] == "message_delta"]
    return [(reasons[-1] if reasons else None, (text, ""))]


@dataclass
class Record:
    """The effects on one server. `late`: seconds after the deadline and request, of answers that came too late."""

    name: str
    seconds: float = 0.0
    answers: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)  # of answers that failed
    faults: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    different: list[dict[str, Any]] = field(default_factory=list)
    late: list[tuple[float, str]] = field(default_factory=list)
    latest: float = float("-inf")  # the longest time after a deadline; negative: before it
    left: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return not (self.different or self.late or any(self.left.values())) and self.compared > 0


class Fuzz:
    """Sends requests to a server and injects faults meanwhile."""

    def __init__(self, record: Record, target: Target, folder: Path, every: int, draw: random.Random) -> None:
        """every: requests from a fault to the next."""
        self._num_asked = 0
        self.record, self._target, self._folder, self._every, self._draw = record, target, folder, every, draw

    async def run(self, requests: list[dict[str, Any]], alone: dict[str, Answer], num_clients: int) -> None:
        begin, waiting = time.monotonic(), iter(requests)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._target.url, timeout=PATIENCE_SECONDS, limits=limits) as http:
            await asyncio.gather(*(self._client(http, waiting, alone) for _ in range(num_clients)))
            await self._ready(http)
        self.record.seconds = time.monotonic() - begin

    async def _ready(self, http: httpx.AsyncClient) -> None:
        """Wait until the last fault is over."""
        ready = 0
        while ready < 3:  # a restart may begin late
            await asyncio.sleep(0.5)
            with contextlib.suppress(httpx.TransportError):
                ready = ready + 1 if (await http.get("/health")).status_code == 200 else 0

    async def _client(
        self, http: httpx.AsyncClient, waiting: Iterator[dict[str, Any]], alone: dict[str, Answer]
    ) -> None:
        for request in waiting:
            self._num_asked += 1
            if self._num_asked % self._every == 0:
                self._inject()
            deadline = request["body"].get("timeout_ms")
            begin = time.monotonic()
            answer = await ask(http, request)
            seconds = time.monotonic() - begin
            if answer.how == "finished" and deadline is not None and seconds >= deadline / 1000:
                answer.how = "timeout"  # not all APIs say so
            self.record.answers[answer.how] = self.record.answers.get(answer.how, 0) + 1
            if deadline is not None and answer.how != "hung up":
                over = seconds - deadline / 1000
                self.record.latest = max(self.record.latest, over)
                if over > ROOM_SECONDS:
                    self.record.late.append((over, f"{answer.how}: {json.dumps(request)[:300]}"))
            if answer.how == "finished":
                self._compare(request, alone[_key(request)].content, answer.content)
            elif answer.how not in ("hung up", "timeout"):
                reason = f"{answer.how}: {str(answer.content)[:200]}"
                self.record.reasons[reason] = self.record.reasons.get(reason, 0) + 1
                await asyncio.sleep(0.3)

    def _compare(self, request: dict[str, Any], expected: Any, got: Any) -> None:
        self.record.compared += 1
        if expected != got:
            self.record.different.append({"request": request, "expected": expected, "got": got})

    def _inject(self) -> None:
        kinds = ["kill -9", "SIGHUP", "exception"] + ["kill -9 of a rank"] * bool(self._target.follower_pids())
        kind = self._draw.choice(kinds)
        with contextlib.suppress(ProcessLookupError, IndexError):  # it is being restarted
            match kind:
                case "kill -9":
                    os.kill(self._draw.choice(self._target.engine_pids()), signal.SIGKILL)
                case "kill -9 of a rank":
                    os.kill(self._draw.choice(self._target.follower_pids()), signal.SIGKILL)
                case "SIGHUP":
                    self._target.process.send_signal(signal.SIGHUP)
                case "exception":
                    arm(self._folder, "exception")
            self.record.faults[kind] = self.record.faults.get(kind, 0) + 1


def _key(request: dict[str, Any]) -> str:
    """Identify what a request asks for, without what must not change the answer."""
    body = {name: value for name, value in request["body"].items() if name not in ("stream", "timeout_ms")}
    return json.dumps([request["path"], body], sort_keys=True)


async def _alone(target: Target, requests: list[dict[str, Any]]) -> dict[str, Answer]:
    """Return the answer of each distinct request, asked one after another, by `_key`."""
    found: dict[str, Answer] = {}
    async with httpx.AsyncClient(base_url=target.url, timeout=PATIENCE_SECONDS) as http:
        for request in requests:
            if (key := _key(request)) not in found:
                body = {name: value for name, value in request["body"].items() if name != "timeout_ms"}
                found[key] = await ask(http, {**request, "body": body | {"stream": False}})
                if found[key].how != "finished":
                    raise RuntimeError(f"alone, a request does not finish: {found[key]}: {request}")
    return found


def fuzz(name: str, number: int, num_clients: int, every: int, seed: int) -> Record:
    """Run one server's share."""
    settings, arithmetic = SERVERS[name]
    draw = random.Random(f"{seed} {name}")
    distinct = [draw_request(draw) for _ in range(-(-number // NUM_DISTINCT))]
    requests = [draw.choice(distinct) for _ in range(number)]
    record = Record(name)
    plain = ["--no-enable-prefix-caching", *COMMON, *arithmetic]
    with serving(*plain) as target:
        alone = asyncio.run(_alone(target, requests))
    with tempfile.TemporaryDirectory(prefix="quire-pairs-") as folder:
        flags = [flag.replace("{folder}", folder) for flag in (*COMMON, *settings, *arithmetic)]
        flags += ["--engine-restarts", "1000"]  # faults are many here: none may end the server
        with serving(*flags, module="tests.attack.faults", environment={FOLDER: folder}) as target:
            files = target.open_files()
            asyncio.run(Fuzz(record, target, Path(folder), every, draw).run(requests, alone, num_clients))
            record.left = what_is_left(target, files)
    return record


def report(record: Record) -> None:
    ways = ", ".join(f"{count} {how}" for how, count in sorted(record.answers.items()))
    faults = ", ".join(f"{count} x {kind}" for kind, count in sorted(record.faults.items()))
    print(f"{record.name}: {'holds' if record.holds else 'DOES NOT HOLD'}; {record.seconds:.0f} s; {ways}; {faults}")
    print(
        f"  {record.compared} answers compared, {len(record.different)} different; "
        f"{len(record.late)} deadlines missed, the latest answer {record.latest:+.2f} s; left: {record.left}"
    )
    for reason, count in sorted(record.reasons.items()):
        print(f"  {count} x {reason}")
    for each in record.different[:5]:
        print(f"  DIFFERENT {json.dumps(each['request'])}\n    alone {each['expected']}\n    here  {each['got']}")
    for over, what in sorted(record.late, reverse=True)[:5]:
        print(f"  LATE by {over:.2f} s: {what}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack.pairs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="TEXT", help="servers whose name contains one of these (else all)")
    parser.add_argument("--requests", type=int, default=2000, help="of all servers together")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--every", type=int, default=40, metavar="REQUESTS", help="from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="where to save what was seen")
    args = parser.parse_args(argv)
    names = [name for name in SERVERS if not args.names or any(text in name for text in args.names)]
    records = []
    for name in names:
        records.append(fuzz(name, args.requests // len(names), args.clients, args.every, args.seed))
        report(records[-1])
    total = sum((Counter(record.answers) for record in records), Counter[str]())
    print(f"{sum(total.values())} requests: {dict(total)}")
    if args.json:
        save({"servers": [asdict(record) for record in records], "environment": environment()}, args.json)
    return 0 if records and all(record.holds for record in records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
