"""Processes of a server that are killed or stop, on several GPUs: what its clients see, and when.

The server is `quire serve` with the bundled model: once on two ranks, once as two replicas. On the CPU, ranks use gloo.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from benchmarks.processes import free_port
from tests.attack.recovery import Load
from tests.attack.target import Answer, Target, descendants, is_running, serving
from tests.gpu.checks import Checks
from tests.support.served import ROOT

NAMED_SECONDS = 10.0  # most until a process that is killed or stops is named
END_SECONDS = 10.0  # most until all processes have ended, once the API process is killed
ANSWER_SECONDS = 5.0  # most until another replica answers
LOAD_SECONDS = 2.0  # before a fault
RESTART_SECONDS = 60.0  # most from then until the processes that replace it answer
REFUSED_SECONDS = 60.0  # most for a command that cannot work
NUM_CLIENTS, NUM_RUNNING = 12, 4  # of their requests, so many run at a time; the others wait
NUM_TOKENS = {"cpu": 60, "cuda": 300}  # of an answer
LITTER = ("quire-", "symm_mem")  # what names of temporary files begin with
LITTER_OF_OTHERS = "quire-attack-"  # the folder of the server's log
MEMORY = 64 << 20  # bytes of a GPU that may differ: others use it, too


def check_lost_processes(checks: Checks) -> None:
    """Kill and stop ranks, replicas and the API process under load. Start servers that cannot run."""
    if checks.device != "cpu" and torch.cuda.device_count() < 2:
        print("left out: lost processes (there is one GPU)")
        return
    subjects = {"ranks": _check_ranks, "replicas": _check_replicas, "start": _check_starts}
    named = [check for subject, check in subjects.items() if subject in checks.match]
    num_threads = 1 if checks.device == "cpu" else len(subjects)  # two servers at a time need more than two cores
    with _nothing_left(checks), ThreadPoolExecutor(num_threads) as threads:
        for _ in threads.map(lambda check: check(checks), named or subjects.values()):
            pass


def _check_ranks(checks: Checks) -> None:
    """Two ranks: both are replaced if one is lost."""
    flags = ["--tensor-parallel-size", "2", "--max-num-seqs", str(NUM_RUNNING)]
    with serving(*flags, *_flags(checks)) as target:
        for rank, number, reason in (
            (1, signal.SIGKILL, "the process of rank 1 was killed by SIGKILL"),
            (1, signal.SIGSTOP, "the process of rank 1 sent no heartbeat for 7 s"),
            (0, signal.SIGSTOP, "the engine process was stopped for 7 s"),
        ):
            name, lost = f"ranks, {number.name} of rank {rank}", target.pids()[1:]
            pid = target.follower_pids()[0] if rank else target.engine_pid()
            loss = asyncio.run(lose(target, _body(checks), pid, number))
            _check_loss(checks, name, loss, reason, NUM_RUNNING)
            phases = [phase for phase in loss.phases if phase != "ready"]
            checks.saw(f"{name}: /health is 503", loss.health[503] > 0 and bool(phases), ", ".join(phases))
            checks.saw(f"{name}: no process is left", not left_running(lost, END_SECONDS), f"of {len(lost)}")
            checks.took(f"{name}: answers again", loss.silence, NAMED_SECONDS + RESTART_SECONDS)
        _check_restarts(checks, "ranks", target, 3)
        pids = target.pids()
    checks.saw("ranks, SIGTERM of the API process: no process is left", not left_running(pids, 0), f"of {len(pids)}")


def _check_replicas(checks: Checks) -> None:
    """Two replicas: one answers while the other is replaced."""
    flags = ["--data-parallel-size", "2", "--max-num-seqs", str(NUM_RUNNING // 2)]
    with serving(*flags, *_flags(checks)) as target:
        for number, how in ((signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "was stopped for 7 s")):
            name, replica = f"replicas, {number.name} of one", target.engine_pids()[0]
            lost = descendants(replica)
            loss = asyncio.run(lose(target, _body(checks), replica, number))
            _check_loss(checks, name, loss, f"the engine process {how}", NUM_RUNNING // 2)
            checks.saw(f"{name}: /health stays 200", loss.health.keys() == {200}, f"{loss.health.total()} times")
            checks.saw(f"{name}: no process is left", not left_running(lost, END_SECONDS), f"of {len(lost)}")
            checks.took(f"{name}: the other one answers", loss.silence, ANSWER_SECONDS)
            checks.took(f"{name}: both answer again", loss.restored, NAMED_SECONDS + RESTART_SECONDS)
        _check_restarts(checks, "replicas", target, 2)
        pids = target.pids()
        seconds = asyncio.run(_kill_under_load(target, _body(checks), pids))
        checks.took("replicas, SIGKILL of the API process: no process is left", seconds, END_SECONDS)


def _flags(checks: Checks) -> list[str]:
    return ["--kv-cache-memory-bytes", "64m", *(["--device", "cpu"] if checks.device == "cpu" else [])]


def _body(checks: Checks) -> bytes:
    """A request whose answer takes long enough to be cut off."""
    asked = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS[checks.device], "ignore_eos": True}
    return json.dumps(asked).encode()


def _check_loss(checks: Checks, name: str, loss: Loss, reason: str, num_running: int) -> None:
    checks.took(f"{name}: named", loss.named, NAMED_SECONDS)
    checks.saw(f"{name}: /readyz", (loss.reason or "").startswith(reason), loss.reason)
    checks.saw(f"{name}: requests that were there", loss.are_told(reason, num_running), loss.told)


def _check_restarts(checks: Checks, name: str, target: Target, expected: int) -> None:
    counted = target.metric("quire:engine_restarts_total")
    checks.saw(f"{name}: quire:engine_restarts_total", counted == expected, f"{counted:.0f}")


# ---- a fault under load ----


@dataclass
class Loss:
    """Observations of a lost process. Seconds since the signal; infinite: never."""

    named: float = float("inf")  # /readyz says why
    reason: str = ""
    restored: float = float("inf")  # all replicas take requests again
    silence: float = float("inf")  # the longest time without an answer
    phases: dict[str, None] = field(default_factory=dict)  # in the order in which they were seen
    health: Counter[int] = field(default_factory=Counter)  # statuses of /health
    answers: list[Answer] = field(default_factory=list)  # to the requests that were in the server at the signal

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status != 200]

    @property
    def told(self) -> str:
        """Errors with which the requests ended."""
        statuses = Counter(answer.status for answer in self.answers)
        counts = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
        return ": ".join([counts, *(answer.body.decode(errors="replace")[:160] for answer in self.failed[:1])])

    def are_told(self, reason: str, most: int) -> bool:
        """Return whether some requests failed, at most so many, each with an error that gives the reason."""
        told = [answer for answer in self.failed if answer.status == 500 and reason.encode() in answer.body]
        return 0 < len(told) <= most and len(told) == len(self.failed)


async def lose(target: Target, body: bytes, pid: int, number: signal.Signals) -> Loss:
    """Send the signal to the process under load, and watch until another process has replaced it."""
    loss = Loss()
    async with httpx.AsyncClient(base_url=target.url, timeout=10) as http, _loaded(target, body) as load:
        num_restarts = (await http.get("/readyz")).json()["num_restarts"]
        num_replicas = await _num_ready(http)
        sent = time.monotonic()
        os.kill(pid, number)
        while time.monotonic() - sent < NAMED_SECONDS + RESTART_SECONDS:
            loss.health[(await http.get("/health")).status_code] += 1
            state = (await http.get("/readyz")).json()
            if state["num_restarts"] > num_restarts:
                loss.phases[state["phase"]] = None
                if not loss.reason:
                    loss.named, loss.reason = time.monotonic() - sent, state["last_loss"]
                if loss.restored == float("inf") and await _num_ready(http) == num_replicas:
                    loss.restored = time.monotonic() - sent
                elif load.answered_since(sent + loss.restored):
                    break
            await asyncio.sleep(0.05)
    if load.answered_since(sent + loss.restored):
        moments = [sent, *load.answered_since(sent)]
        loss.silence = max(after - before for before, after in itertools.pairwise(moments))
    loss.answers = load.asked_before(sent)
    return loss


async def _num_ready(http: httpx.AsyncClient) -> int:
    """Number of replicas that take requests: only those have statistics."""
    return (await http.get("/metrics")).text.count("\nvllm:kv_cache_usage_perc{")


@contextlib.asynccontextmanager
async def _loaded(target: Target, body: bytes) -> AsyncIterator[Load]:
    """Clients, for some seconds before the block and until it ends."""
    load = Load(target, body)
    clients = [asyncio.create_task(load.ask()) for _ in range(NUM_CLIENTS)]
    await asyncio.sleep(LOAD_SECONDS)
    yield load
    load.runs = False
    await asyncio.gather(*clients)


async def _kill_under_load(target: Target, body: bytes, pids: Sequence[int]) -> float:
    """Kill the API process. Return the seconds until all of its processes have ended; infinite: they have not."""
    async with _loaded(target, body) as load:
        load.runs = False
        begin = time.monotonic()
        target.process.kill()
        left = await asyncio.to_thread(left_running, pids, END_SECONDS)
        return float("inf") if left else time.monotonic() - begin


def left_running(pids: Sequence[int], seconds: float) -> list[int]:
    """Processes that still run after at most so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


# ---- what is left of the servers ----


@contextlib.contextmanager
def _nothing_left(checks: Checks) -> Iterator[None]:
    """Check that servers which end in the block leave no memory of a GPU in use, and no file."""
    devices = range(torch.cuda.device_count() if checks.device != "cpu" else 0)
    _free_bytes(devices)  # makes this process's own contexts
    free, files = _free_bytes(devices), _files()
    yield
    deadline = time.monotonic() + END_SECONDS
    while (kept := _most_kept(free, devices)) > MEMORY and time.monotonic() < deadline:
        time.sleep(0.05)
    if devices:
        checks.saw("ranks, replicas: memory of the GPUs is free again", kept <= MEMORY, f"all but {kept >> 20} MiB")
    left = sorted(_files() - files)
    checks.saw("ranks, replicas: no file is left", not left, ", ".join(map(str, left)) or "/dev/shm, temporary files")


def _free_bytes(devices: Sequence[int]) -> list[int]:
    return [torch.cuda.mem_get_info(device)[0] for device in devices]


def _most_kept(free: Sequence[int], devices: Sequence[int]) -> int:
    """The most bytes of a GPU that were free and are not."""
    return max((before - now for before, now in zip(free, _free_bytes(devices), strict=True)), default=0)


def _files() -> set[Path]:
    temporary = Path(tempfile.gettempdir()).iterdir()
    mine = (path for path in temporary if path.name.startswith(LITTER) and not path.name.startswith(LITTER_OF_OTHERS))
    return {*Path("/dev/shm").iterdir(), *mine}


# ---- starts that must fail ----


def _check_starts(checks: Checks) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _check_refused(checks, "start, port taken", f"port {port} is in use", "--port", str(port))
    if checks.device == "cpu":
        print("left out: more GPUs than there are (this is the CPU)")
        return
    for flag in ("tensor", "data"):
        name, words = f"start, more GPUs than there are, {flag} parallel", ["--port", str(free_port())]
        _check_refused(checks, name, "at most", *words, f"--{flag}-parallel-size", str(4 * torch.cuda.device_count()))


def _check_refused(checks: Checks, name: str, reason: str, *flags: str) -> None:
    """Check that the server says the reason in one line, and ends."""
    if not checks.wants(name):
        return
    command = [sys.executable, "-m", "quire", "serve", str(ROOT / "configs" / "demo"), "--host", "127.0.0.1"]
    command += [*flags, *_flags(checks)]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=REFUSED_SECONDS)
        lines = (done.stdout + done.stderr).strip().splitlines()
        refused = done.returncode != 0 and len(lines) == 1 and reason in lines[0]
    except subprocess.TimeoutExpired:
        refused, lines = False, ["it runs"]
    checks.saw(f"{name}: one line", refused, " / ".join(lines))
    checks.took(f"{name}: ends", time.monotonic() - begin, REFUSED_SECONDS)
