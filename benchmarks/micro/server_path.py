"""CPU time of a token between engine and socket, with an engine that has no model.

The server is `quire serve` as it is, over real sockets and processes; only the steps are made up, one each `--step-ms`
for all streams. A client in this process reads all streams and does nothing else. What is measured is CPU time, which
is the same on a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.model_shapes import SHAPES, add_tokenizer, model_folder
from benchmarks.processes import free_port, wait_until_ready
from benchmarks.result_files import save
from engine.core.batch import EngineOutput, SchedulerStats, StepOutputs
from engine.core.engine_request import EngineRequest
from engine.flags import Parser, add_flags, flag, load
from engine.replicas import engine_process, process
from engine.setup.machine import environment
from engine.stats import ExpertTokens

STEP_SECONDS = "QUIRE_BENCH_STEP_SECONDS"  # environment: between two steps of the engine without a model
VOCABULARY = 10_000  # token ids are below this
EPILOG = """examples:
  quire bench server-path
  quire bench server-path --endpoint /v1/completions --streams 64 --step-ms 5
  quire bench server-path --save-result path.json

"API" is CPU time of the process with HTTP, JSON and text; with --api-server-count of all of them and of the main
process, which passes tokens on. "Engine process" is what the engine's process spends beside its steps. All are of the
time in which all streams run. An event carries one token when the server keeps up.
"""


@dataclass(frozen=True)
class PathFlags:
    """Path from engine to socket."""

    streams: int = flag(256, "answers at the same time", at_least=1)
    tokens: int = flag(256, "of each answer", at_least=2)
    step_ms: float = flag(20.0, "milliseconds between steps; one token of each stream in each", above=0)
    endpoint: str = flag(
        "/v1/chat/completions", "what is asked for", choices=("/v1/chat/completions", "/v1/completions")
    )
    model: str = flag("qwen3-0.6b", "whose vocabulary is used", choices=tuple(SHAPES))
    models_dir: str = flag("out/models", "where configurations of models are written", metavar="FOLDER")
    api_server_count: int = flag(1, "processes that take connections", at_least=1)
    repeat: int = flag(3, "how often to measure; the median counts", at_least=1)
    extra_body: dict[str, Any] | None = flag(None, "more fields for each request")  # noqa: RUF009
    save_result: str | None = flag(None, "where to save the figures as JSON", metavar="FILE")


# ---- the engine without a model ----


class MadeUp:
    """Stand-in for an engine in `engine.replicas.process`: a token for each request at each step, at given times."""

    def __init__(self, config: Any, *, eos_token_ids: Any = (), progress: Any = None, lost: Any = None) -> None:
        self._seconds = float(os.environ[STEP_SECONDS])
        self._left: dict[str, int] = {}
        self._begun: set[str] = set()
        self._next = self._num_tokens = 0.0
        self.runner = self.options = self
        self.expert_tokens = ExpertTokens()
        self.max_num_seqs = config.max_num_seqs or 1024
        self.num_blocks, self.block_size, self.max_model_len = 1 << 20, 16, config.max_model_len or 4096

    def summary(self) -> str:
        return "an engine without a model"

    def add_request(self, request: EngineRequest) -> None:
        assert request.sampling.max_tokens is not None
        self._left[request.request_id] = request.sampling.max_tokens

    def abort(self, request_id: str) -> bool:
        return self._left.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self._left)

    def idle(self) -> bool:
        return False

    def step(self) -> StepOutputs:
        now = time.monotonic()
        if self._next > now:
            time.sleep(self._next - now)
        self._next = max(self._next, now) + self._seconds
        outputs = StepOutputs([], [], [])
        for number, (request_id, left) in enumerate(self._left.items()):
            token_id = 256 + (number * 7919 + left * 104729) % (VOCABULARY - 256)
            if request_id in self._begun and left > 1:
                outputs.request_ids.append(request_id)
                outputs.token_ids.append(token_id)
            else:
                self._begun.add(request_id)
                outputs.outputs.append(EngineOutput(request_id, [token_id], "length" if left == 1 else None))
            self._left[request_id] = left - 1
        self._left = {request_id: left for request_id, left in self._left.items() if left}
        self._begun &= self._left.keys()
        self._num_tokens += len(outputs.token_ids) + len(outputs.outputs)
        return outputs

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._left), 0, self.num_blocks, self.num_blocks, 0, 0, 0, 0, int(self._num_tokens))

    def close(self) -> None:
        pass


# ---- the measurement ----


class Reader(asyncio.Protocol):
    """One connection that asks once and counts the events of the answer."""

    def __init__(self, request: bytes, crowd: Crowd) -> None:
        self._request, self._crowd = request, crowd
        self._accepted = self._begun = self._ended = False
        self._head = self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._accepted:
            self._head += data
            self._accepted = self._head.startswith(b"HTTP/1.1 200")
            if not self._accepted and self._head.endswith(b"}"):
                self._crowd.failed(self._head)
        if b'data: {"error"' in data:
            self._crowd.failed(data)
        num_new = data.count(b"data: {")
        if num_new and not self._begun:
            self._begun = True
            self._crowd.begun()
        self._crowd.num_events += num_new
        if not self._ended and b"data: [DONE]" in self._end + data:
            self._ended = True
            self._crowd.ended()
            self._transport.close()
        self._end = (self._end + data)[-20:]  # the network may cut the last event in two

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended:
            self._crowd.failed(b"the connection was lost")


class Crowd:
    """All readers; what is measured lies between the moments when the last one begins and the first one ends."""

    def __init__(self, size: int, pids: list[int]) -> None:
        self._size, self._pids = size, pids
        self._num_begun = self._num_ended = self.num_events = 0
        self.first: Snapshot | None = None
        self.last: Snapshot | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def failed(self, answer: bytes) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the server refuses: {answer.decode(errors='replace')}"))

    def begun(self) -> None:
        self._num_begun += 1
        if self._num_begun == self._size:
            asyncio.get_running_loop().call_later(0.1, self._start)

    def _start(self) -> None:
        self.first = Snapshot.take(self.num_events, self._pids)

    def ended(self) -> None:
        if not self._num_ended:
            self.last = Snapshot.take(self.num_events, self._pids)
        self._num_ended += 1
        if self._num_ended == self._size and not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True)
class Snapshot:
    """CPU seconds that processes have used, and what was seen by then."""

    time: float
    num_events: int
    seconds: list[float]
    system: list[float]  # of them in the kernel, in hundredths

    @classmethod
    def take(cls, num_events: int, pids: list[int]) -> Snapshot:
        tick = os.sysconf("SC_CLK_TCK")
        system = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[12]) / tick for pid in pids]
        return cls(time.perf_counter(), num_events, [time.clock_gettime(~pid << 3 | 2) for pid in pids], system)


async def measure(flags: PathFlags, port: int, pids: list[int]) -> dict[str, float]:
    """All streams once: figures by name. `pids`: of the engine process, the main process, and further API processes."""
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": flags.tokens, "ignore_eos": True}
    if flags.endpoint.endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": "Tell me a story."}]
    else:
        body["prompt"] = list(range(300, 556))
    data = json.dumps(body | (flags.extra_body or {})).encode()
    head = f"POST {flags.endpoint} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
    crowd, own = Crowd(flags.streams, pids), time.process_time()
    begin = Snapshot.take(0, pids)
    loop = asyncio.get_running_loop()
    connections = []
    try:
        for _ in range(flags.streams):
            connections.append(await loop.create_connection(lambda: Reader(request, crowd), "127.0.0.1", port))
        await crowd.done
    finally:
        for transport, _ in connections:
            transport.abort()
        await asyncio.sleep(0.01)
    own = time.process_time() - own
    first, last = crowd.first, crowd.last
    if first is None or last is None or first.time >= last.time:
        raise RuntimeError("the streams did not run at the same time: ask for more --tokens")
    num_events, seconds = last.num_events - first.num_events, last.time - first.time
    tokens = (last.time - first.time) / (flags.step_ms / 1000) * flags.streams
    engine, main, *others = (after - before for before, after in zip(first.seconds, last.seconds, strict=True))
    api, at_first = main + sum(others), sum(first.seconds[1:]) - sum(begin.seconds[1:])
    apart = {"main_process_us_per_token": main / tokens * 1e6} if others else {}
    return {
        "api_us_per_event": api / num_events * 1e6,
        "api_us_per_event_in_kernel": (sum(last.system[1:]) - sum(first.system[1:])) / num_events * 1e6,
        **apart,
        "api_events_per_cpu_second": num_events / api,
        "api_us_per_request_at_the_start": (at_first - api / num_events * first.num_events) / flags.streams * 1e6,
        "engine_process_us_per_token": engine / tokens * 1e6,
        "events_per_second": num_events / seconds,
        "tokens_per_event": tokens / num_events,
        "client_us_per_event": own / crowd.num_events * 1e6,
    }


def main(argv: list[str]) -> int:
    parser = Parser(prog="quire bench server-path", description=(__doc__ or "").split("\n")[0], epilog=EPILOG)
    add_flags(parser, PathFlags)
    (flags,) = load(parser.parse_args(argv), PathFlags)
    folder = model_folder(flags.model, Path(flags.models_dir))
    add_tokenizer(folder)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    port = free_port()
    command = [sys.executable, "-P", "-m", "benchmarks.micro.server_path", "server", str(folder), "--port", str(port)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--max-model-len", "4096", "--device", "cpu"]
    command += ["--chat-template", template, "--disable-uvicorn-access-log"]
    command += ["--api-server-count", str(flags.api_server_count)]
    environ = {**os.environ, STEP_SECONDS: str(flags.step_ms / 1000)}
    server = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    try:
        if not wait_until_ready(server, port, time.time() + 300):
            raise RuntimeError("the server does not start")
        pids = _pids(server.pid, flags.api_server_count)
        runs = []
        for number in range(flags.repeat + 1):
            found = uvloop.run(measure(flags, port, pids))
            if number:  # the first one warms up
                runs.append(found)
                print("  ".join(f"{name} {value:,.2f}" for name, value in found.items()), file=sys.stderr, flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    result = {name: sorted(run[name] for run in runs)[len(runs) // 2] for name in runs[0]}
    for name, value in result.items():
        print(f"{name.replace('_', ' ').replace(' us ', ' µs '):<40} {value:>12,.2f}")
    if flags.save_result:
        save({"benchmark": "server_path", **result, "runs": runs, "environment": environment()}, flags.save_result)
    return 0


def _pids(main: int, num_api: int) -> list[int]:
    """Return the processes of a server: of the engine, the main one, and further API processes."""
    children = [int(pid) for pid in Path(f"/proc/{main}/task/{main}/children").read_text().split()]
    is_api = {pid: b"server.processes" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    (engine,) = (pid for pid in children if not is_api[pid])
    others = [pid for pid in children if is_api[pid]]
    assert len(others) == (num_api if num_api > 1 else 0)
    return [engine, main, *others]


def _serve(argv: list[str]) -> int:
    from server.cli import main as cli

    engine_process.ENGINE_MODULE = "benchmarks.micro.server_path"
    return cli.main(["serve", *argv])


if __name__ == "__main__":
    if sys.argv[1:2] == ["server"]:
        sys.exit(_serve(sys.argv[2:]))
    if sys.argv[1:2] and sys.argv[1].startswith("ipc:"):
        process.main(MadeUp)
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
