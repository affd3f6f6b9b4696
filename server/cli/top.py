"""`quire top URL`: shows live statistics of a running server in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine import EngineError
from engine.flags import add_flags, flag, load
from server.cli.common import base_url

if TYPE_CHECKING:
    import httpx

    from server.cli.top_view.metrics import Reading, Snapshot

EPILOG = """examples:
  quire top                                                     the server at http://127.0.0.1:8000
  quire top http://127.0.0.1:8000 --once                        the same once, for reports and scripts
  quire top http://127.0.0.1:8000 --interval 10 >> load.txt     one line every ten seconds, without a terminal

The statistics come from /metrics and /readyz. vLLM's servers work too, with fewer values. Press Ctrl-C to quit.
"""
HERE = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class TopFlags:
    """Top."""

    api_key: str | None = flag(None, "API key for the server", metavar="KEY")
    interval: float = flag(1.0, "seconds between updates", at_least=0.1)
    once: bool = flag(False, "print the statistics of one interval and exit")
    count: int | None = flag(None, "number of updates (default: until Ctrl-C)", at_least=1)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running server",
        description="Watch a running server: state, requests, tokens, latencies, keys, processes.",
        epilog=EPILOG,
    )
    parser.add_argument("url", metavar="URL", nargs="?", default=HERE, help=f"the server (default: {HERE})")
    add_flags(parser, TopFlags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import httpx
    from rich.console import Console
    from rich.live import Live

    from server.cli.top_view.view import line, screen

    given = vars(args).copy()
    url = base_url(given.pop("url"))
    (flags,) = load(given, TopFlags)
    headers = {"Authorization": f"Bearer {flags.api_key}"} if flags.api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=10) as http:
        if flags.once:
            Console().print(screen(next(_snapshots(http, flags)), url))
            return 0
        if not sys.stdout.isatty():
            for snapshot in _snapshots(http, flags):
                print(time.strftime("%H:%M:%S"), line(snapshot), flush=True)
            return 0
        with Live(console=Console(), screen=True, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
            for snapshot in _snapshots(http, flags):
                live.update(screen(snapshot, url), refresh=True)
    return 0


def _snapshots(http: httpx.Client, flags: TopFlags) -> Iterator[Snapshot]:
    """Yield a snapshot per interval. `EngineError` if no server answers at the start; later, wait until it answers
    again.
    """
    from server.cli.top_view.metrics import Reading, compare

    before = _read(http)
    for _ in itertools.repeat(None) if flags.count is None else range(flags.count):
        time.sleep(flags.interval)
        try:
            now = _read(http)
        except EngineError:
            yield compare(before, Reading("", {"phase": "no answer"}, time.monotonic()))
        else:
            yield compare(before, now)
            before = now


def _read(http: httpx.Client) -> Reading:
    import httpx

    from server.cli.top_view.metrics import Reading

    try:
        metrics, ready = http.get("/metrics"), http.get("/readyz")
        if metrics.status_code == 401:
            raise EngineError(f"{http.base_url} requires an API key: --api-key KEY")
        if metrics.status_code != 200:
            raise EngineError(f"{http.base_url} has no /metrics (status {metrics.status_code})")
        if ready.status_code == 404:  # the server is not Quire
            state = {"phase": "ready" if http.get("/health").status_code == 200 else "not ready"}
        else:
            state = ready.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise EngineError(f"no server answers at {http.base_url} ({error})") from None
    return Reading(metrics.text, state, time.monotonic())
