"""Measures the first five minutes, as a newcomer spends them: `python -m tests.packaging.set_up`.

    clone    git clone, `make serve`, one streamed answer: seconds, and what it puts on the disk; then the second start
    wheel    the wheel in an environment of its own, started in another folder: the page and one streamed answer

Takes the committed state (HEAD). Needs git, make, and a warm cache of packages: run it twice, believe the second.
Caches of Quire and of its compiler are new each time. The exit code is 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.processes import ROOT, free_port, last_line

PATIENCE = 1200  # seconds until a server must have answered
MAX_SECONDS, MAX_BYTES, MAX_RESTART = 60, 1.3e9, 3  # on two quiet cores
QUESTION = {"messages": [{"role": "user", "content": "What is paged attention?"}], "stream": True, "temperature": 0}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("clone", "wheel"), help="one of the two")
    only = parser.parse_args(argv).only
    measured: Measured = []
    with tempfile.TemporaryDirectory(prefix="quire-set-up-") as name:
        folder = Path(name)
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "quire")], check=True)
        if only != "wheel":
            measured += clone(folder / "quire")
        if only != "clone":
            measured += wheel(folder / "quire", folder / "elsewhere")
    for text, value, limit, unit in measured:
        beside = f"  (at most {limit:g})" if limit else ""
        print(f"{text:<56}{value:8.2f} {unit}{beside}{'  MISSED' if limit and value > limit else ''}")
    return int(any(limit and value > limit for _, value, limit, _ in measured))


Measured = list[tuple[str, float, float, str]]  # what, how much, at most (0: no limit), unit


def clone(checkout: Path) -> Measured:
    """`checkout`: a fresh clone."""
    measured: Measured = []
    before, port = time.monotonic(), free_port()
    serve = ["make", "serve", f"ARGS=--host 127.0.0.1 --port {port}"]
    with started(serve, checkout) as log:
        first_token(port, log)
        measured.append(
            ("make serve in a new clone, until the answer streams", time.monotonic() - before, MAX_SECONDS, "s")
        )
    size = sum(path.lstat().st_blocks * 512 for path in checkout.rglob("*"))
    measured.append(("disk: the clone with its environment and caches", size / 1e9, MAX_BYTES / 1e9, "GB"))
    before = time.monotonic()
    with started(serve, checkout) as log:
        first_token(port, log)
        measured.append(("make serve again, until the answer streams", time.monotonic() - before, MAX_RESTART, "s"))
    return measured


def wheel(checkout: Path, folder: Path) -> Measured:
    """The wheel of `checkout`, used in `folder`, which knows nothing of it."""
    folder.mkdir()
    before = time.monotonic()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(checkout)], check=True)
    (file,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "own"], cwd=folder, check=True)
    pip = ["own/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    torch = re.search(r"^torch==.*", (checkout / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    index = ["--index-url", "https://download.pytorch.org/whl/cpu"]
    subprocess.run([*pip, *index, torch[0]], cwd=folder, check=True, env=environment(folder))
    subprocess.run([*pip, "-c", checkout / "constraints.txt", file], cwd=folder, check=True, env=environment(folder))
    measured: Measured = [("the wheel", file.stat().st_size / 1e6, 0, "MB")]
    measured.append(("the wheel and a new environment from it", time.monotonic() - before, 0, "s"))
    before, port = time.monotonic(), free_port()
    with started(["own/bin/quire", "serve", "--host", "127.0.0.1", "--port", str(port)], folder) as log:
        first_token(port, log)
        measured.append(("quire serve from another folder, until it streams", time.monotonic() - before, 0, "s"))
        page = get(port, "/")
        files = re.findall(r'(?:src|href)="(static/[^"#]+)"', page)
        assert files, "the page refers to no files"
        for name in files:
            get(port, f"/{name}")
    measured.append(("files of the chat page that were there", len(files), 0, ""))
    return measured


def environment(folder: Path) -> dict[str, str]:
    """Nothing of the checkout that runs this; new caches beside `folder`, but that of pip."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    pip_cache = subprocess.run(
        [sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return kept | {"XDG_CACHE_HOME": str(folder / ".caches"), "PIP_CACHE_DIR": pip_cache}


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[Path]:
    """A server, and the file of what it says. At the end Ctrl-C must stop it."""
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield Path(log.name)
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def first_token(port: int, log: Path) -> str:
    """Wait until a question is answered by the first piece of text. RuntimeError: the server did not come up."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(QUESTION), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            for line in response if response.status == 200 else ():
                event = line.decode().removeprefix("data: ").strip()
                if event.startswith("{") and (text := json.loads(event)["choices"][0]["delta"].get("content")):
                    return str(text)
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise RuntimeError(f"no answer after {PATIENCE} s; the last it said: {last_line(log)}")


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"GET {path}: {response.status}")
    return body.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
