"""Time from a server's command to the first token, with warm caches; several checkouts in alternating order."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import free_port, last_line, process_group
from benchmarks.result_files import save
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, check, flag, load, run_command

BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "stream": True})
COLUMNS = {"answers": "port answers, s", "ready": "ready, s", "first_token": "first token, s"}
TIMEOUT = 300.0  # seconds
EPILOG = """examples:
  quire bench startup
  quire bench startup --engines quire@../before,quire --rounds 7

The first start of each is not counted. Seconds are medians, the least in parentheses; seconds of CPU time tell more
on a busy machine. A request is sent when /health says that the server is ready."""


@dataclass(frozen=True)
class StartupFlags:
    """Starts."""

    engines: tuple[str, ...] = flag(("quire",), "quire, or quire@FOLDER: another checkout", metavar="NAME")
    model: str | None = flag(None, "folder of the model (else the bundled one)", metavar="FOLDER")
    rounds: int = flag(5, "starts of each", at_least=1)
    output_json: str | None = flag(None, "where to save the figures", metavar="FILE")

    def __post_init__(self) -> None:
        check(self)
        names = tuple(dict.fromkeys(word for item in self.engines for word in item.split(",") if word))
        for name in names:
            kind, _, folder = name.partition("@")
            if kind != "quire" or (folder and not Path(folder, "server").is_dir()):
                raise ConfigError(f"engines must be quire or quire@FOLDER, a checkout, got {name!r}")
        object.__setattr__(self, "engines", names)


def main(argv: list[str]) -> int:
    parser = Parser(prog="quire bench startup", description="Time from the command to the first token.", epilog=EPILOG)
    add_flags(parser, StartupFlags)
    (flags,) = load(parser.parse_args(argv), StartupFlags)
    starts: dict[str, list[dict[str, float]]] = {engine: [] for engine in flags.engines}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(flags.rounds + 1):
            for engine in flags.engines[:: -1 if number % 2 else 1]:
                figures = start(engine, flags.model, Path(scratch) / "log.txt")
                if number:
                    starts[engine].append(figures)
    print(table(starts))
    if flags.output_json:
        save(starts, flags.output_json)
    return 0


def start(engine: str, model: str | None, log_path: Path) -> dict[str, float]:
    """Start once: seconds from the command to each of `COLUMNS`, and CPU time of each process until the first token."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "quire", "serve", *([model] if model else [])]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    begin = time.perf_counter()
    found: dict[str, float] = {}
    with process_group(command, engine, log_path) as process:
        while "ready" not in found:
            if process.poll() is not None or time.perf_counter() - begin > TIMEOUT:
                raise ConfigError(f"{engine} did not start: {last_line(log_path)}")
            status = _status(port)
            if status is not None:
                found.setdefault("answers", time.perf_counter() - begin)
            if status == 200:
                found["ready"] = time.perf_counter() - begin
            else:
                time.sleep(0.02)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
            connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                if not response.readline().startswith(b"data: {"):
                    raise ConfigError(f"{engine} gives no tokens: {last_line(log_path)}")
        found["first_token"] = time.perf_counter() - begin
        found |= _cpu_seconds(process)
    return found


def _status(port: int) -> int | None:
    """Status of /health; None if nothing listens."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
        try:
            connection.request("GET", "/health")
            with connection.getresponse() as response:
                return response.status
        except (OSError, http.client.HTTPException):
            return None


def _cpu_seconds(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """CPU time of the API process and of its child, the engine process; nothing without /proc."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        return {}
    pids = {"API process": str(process.pid), "engine process": children.read_text().split()[0]}
    return {name: sum(map(int, _stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK") for name, pid in pids.items()}


def _stat(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def table(starts: dict[str, list[dict[str, float]]]) -> str:
    """Medians as Markdown."""
    names = list(dict.fromkeys(name for rows in starts.values() for row in rows for name in row))
    head = ["engine", *(COLUMNS.get(name, f"CPU time of the {name}, s") for name in names)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * len(names)]
    for engine, rows in starts.items():
        cells = [_cell([row[name] for row in rows if name in row]) for name in names]
        lines.append("| " + " | ".join([engine, *cells]) + " |")
    return "\n".join(lines)


def _cell(seconds: list[Any]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f})" if seconds else "–"


if __name__ == "__main__":
    run_command(main)
