"""Drives a live server with requests that no client would send, and watches that it neither fails, nor hangs, nor
leaks.

    python -m tests.clients.fuzz_api --seconds 600

Three at once: schemathesis over the OpenAPI description (the `schemathesis` command must be on PATH), broken bytes made
from the description's own examples, and an ordinary chat every second that must be answered in time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.support.served import ROOT, blocks_in_use, metric, serve
from tests.support.tiny_model import write_model

MODEL_NAME = "fuzzed"
SCALARS = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"1e-400", b"9" * 5000, b"0." + b"1" * 5000, b"00",
b"1_0",
           b"9223372036854775808", b"-9223372036854775809", b"18446744073709551616", b"2147483648", b"true", b"null",
           b"[]",
           b"{}", b'""', b'"\\u0000"', b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\xff\xfe"', b'"\xed\xa0\x80"',
           b'"\xc0\xaf"',
           b"'a'", b"undefined", b"/* */ 1", b'"\\x41"', b'"a\nb"', b"[" * 100_000, b"[" * 300 + b"]" * 300,
           b'{"a":' * 300 + b"1" + b"}" * 300]  # fmt: skip


class Broken:
    """Bodies that are nearly right, from right ones."""

    def __init__(self, seed: int, bodies: list[tuple[str, bytes]]) -> None:
        self._random, self._bodies = random.Random(seed), bodies
        self._ways = [
            self._cut,
            self._flip,
            self._scalar,
            self._twice,
            self._long,
            self._nested,
            self._junk,
            self._as_it_is,
        ]

    def make(self) -> tuple[str, str, bytes]:
        """Path, kind of damage, body."""
        path, body = self._random.choice(self._bodies)
        way = self._random.choice(self._ways)
        return path, way.__name__[1:], way(body)

    def _cut(self, body: bytes) -> bytes:
        return body[: self._random.randrange(len(body))]

    def _flip(self, body: bytes) -> bytes:
        changed = bytearray(body)
        for _ in range(self._random.randint(1, 8)):
            changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed)

    def _scalar(self, body: bytes) -> bytes:
        return self._replaced(body, self._random.choice(SCALARS))

    def _twice(self, body: bytes) -> bytes:
        keys = re.findall(rb'"(\w+)":', body)
        return body[:-1] + b',"%b":%b}' % (self._random.choice(keys), self._random.choice(SCALARS[:20]))

    def _long(self, body: bytes) -> bytes:
        piece = self._random.choice([b"a", "ü".encode(), "👋".encode(), b" ", b"\\n", b"\\u0000", b"<|im_end|>", b"1"])
        return self._replaced(body, b'"' + piece * (self._random.choice([10_000, 1_000_000]) // len(piece)) + b'"')

    def _nested(self, body: bytes) -> bytes:
        depth = self._random.choice([50, 150, 500, 20_000])
        opening, closing = self._random.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"type":"text","text":', b"}]")])
        return self._replaced(body, opening * depth + b"1" + closing * depth)

    def _junk(self, body: bytes) -> bytes:
        return self._random.randbytes(self._random.choice([1, 10, 1000, 100_000]))

    def _as_it_is(self, body: bytes) -> bytes:
        return body

    def _replaced(self, body: bytes, value: bytes) -> bytes:
        """One of the values of the body, at any depth, is another."""
        spans = [
            match.span(1) for match in re.finditer(rb':("(?:[^"\\]|\\.)*"|[\d.e-]+|true|false|null)(?=[,}])', body)
        ]
        if not spans:
            return value
        start, end = self._random.choice(spans)
        return body[:start] + value + body[end:]


class Watch:
    """Responses of all threads."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.slowest = (0.0, "")

    def send(self, client: httpx.Client, what: str, path: str, content: bytes, most: int = 499) -> None:
        started, told = time.monotonic(), f"{what} POST {path} {content[:200]!r}"
        try:
            response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            self.faults.append(f"{type(error).__name__}: {told}")
            return
        self.slowest = max(self.slowest, (time.monotonic() - started, told))
        self.counts[f"{what} {response.status_code}"] += 1
        if response.status_code > most:
            self.faults.append(f"{response.status_code}: {told}")


def examples(description: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Path and body of each example of a request."""
    operations = [(path, operation) for path, methods in description["paths"].items() for operation in methods.values()]
    contents = [
        (path, operation["requestBody"]["content"]) for path, operation in operations if "requestBody" in operation
    ]
    return [
        (path, json.dumps(example["value"], separators=(",", ":")).encode())
        for path, content in contents
        for example in content["application/json"]["examples"].values()
    ]


def narrowed(description: dict[str, Any]) -> dict[str, Any]:
    """The description with the one model that there is, and few answers and tokens, so that requests get through."""
    limits = {"model": {"enum": [MODEL_NAME]}, "n": {"maximum": 4}, "timeout_ms": {"minimum": 600_000}}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict"):
        limits[name] = {"maximum": 32}
    for kind in description["components"]["schemas"].values():
        for name, limit in limits.items():
            if name in kind.get("properties", {}):
                kind["properties"][name] |= limit
    return description


def fuzz(url: str, seconds: float, patience: float, seed: int, schemathesis: str | None) -> list[str]:
    """Send requests; return the faults."""
    description = httpx.get(f"{url}/openapi.json", timeout=patience).json()
    bodies, watch, end = examples(description), Watch(patience), time.monotonic() + seconds
    hello = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}).encode()

    def repeat(act: Callable[[httpx.Client], None]) -> None:
        with httpx.Client(base_url=url, timeout=patience) as client:
            while time.monotonic() < end:
                act(client)

    def damage(client: httpx.Client) -> None:
        path, kind, body = broken.make()
        watch.send(client, kind, path, body)
        time.sleep(0.05)  # leaves the machine to the others

    def greet(client: httpx.Client) -> None:
        watch.send(client, "hello", "/v1/chat/completions", hello, most=200)
        time.sleep(1)

    broken = Broken(seed, bodies)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
        jobs = [threads.submit(repeat, damage), threads.submit(repeat, greet)]
        if schemathesis is not None:
            file = Path(folder, "openapi.json")
            file.write_text(json.dumps(narrowed(description)))
            jobs.append(threads.submit(run_schemathesis, schemathesis, file, url, seconds, patience, seed, watch))
        for job in jobs:
            job.result()
    for kind, count in sorted(watch.counts.items()):
        print(f"{count:8} {kind}")
    print("slowest answer to broken bytes or hello: {:.2f} s for {}".format(*watch.slowest))
    faults = watch.faults
    if usage := blocks_in_use(url):
        faults.append(f"{usage:.2%} of the KV cache is in use at the end")
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        if number := metric(url, name):
            faults.append(f"{name} is {number:g} at the end")
    page = httpx.get(f"{url}/metrics", timeout=patience).text
    failed = re.findall(r'^http_requests_total\{.*status="5.*$', page, re.MULTILINE)
    faults += [line for line in failed if 'handler="/health"' not in line]  # asked while it started
    print(f"{metric(url, 'http_requests_total'):.0f} requests, {metric(url, 'vllm:request_success_total'):.0f} answers")
    return faults


def run_schemathesis(
    program: str, file: Path, url: str, seconds: float, patience: float, seed: int, watch: Watch
) -> None:
    """One worker: with several, Python 3.11's parser fails inside of it."""
    options = "--checks not_a_server_error --continue-on-failure --workers 1 --warnings off --suppress-health-check all"
    command = [program, "run", str(file), "--url", url, *options.split(), "--max-time", str(round(seconds))]
    command += ["--request-timeout", str(patience), "--seed", str(seed)]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    _, mark, summary = done.stdout.partition("== SUMMARY ==")
    print(summary if mark else done.stdout[-5000:])
    if done.returncode:
        watch.faults.append(f"schemathesis: {done.stdout[-20_000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--patience", type=float, default=30, help="seconds after which a request counts as hanging")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--no-schemathesis", action="store_true", help="broken bytes only")
    parser.add_argument(
        "--experts", action="store_true", help="a random mixture of experts instead of the bundled model"
    )
    args = parser.parse_args()
    program = None if args.no_schemathesis else shutil.which("schemathesis")
    if program is None and not args.no_schemathesis:
        parser.error("there is no schemathesis: pip install schemathesis, or --no-schemathesis")
    flags = ["--max-model-len", "256", "--served-model-name", MODEL_NAME, "--disable-uvicorn-access-log"]
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), experts=True) if args.experts else ROOT / "configs" / "demo"
        with serve(model, *flags) as url:
            faults = fuzz(url, args.seconds, args.patience, args.seed, program)
    print(f"seed {args.seed}:", "no faults" if not faults else f"{len(faults)} faults", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
