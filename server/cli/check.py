"""`quire check URL`: tests which parts of the APIs a server supports."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from engine import ConfigError, EngineError
from engine.flags import add_flags, flag, load
from server.cli.common import base_url

if TYPE_CHECKING:
    from server.cli.checks.runner import Check, Result, Server

EPILOG = """examples:
  quire check http://127.0.0.1:8000
  quire check http://127.0.0.1:8000 --only tools "structured output"
  quire check http://127.0.0.1:8000 --deterministic
  quire check https://example.org --api-key KEY --model NAME --json > result.json

Tests any server with OpenAI's, Anthropic's or Ollama's API. ✓ works, ✗ fails, – is not offered. If the packages openai,
anthropic and ollama are installed, the official clients are tested too. The exit code is 0 if no offered feature
fails and every feature that common clients need is offered.
"""


@dataclass(frozen=True)
class CheckFlags:
    """Check."""

    model: str | None = flag(None, "model to use (default: the first one that the server lists)", metavar="NAME")
    api_key: str | None = flag(None, "API key for the server", metavar="KEY")
    only: tuple[str, ...] = flag((), "groups of checks to run (default: all)", metavar="GROUP")
    timeout: float = flag(60.0, "seconds to wait for a response", above=0)
    deterministic: bool = flag(
        False, "compare the bytes of requests alone and among others instead, as --deterministic promises them"
    )
    json: bool = flag(False, "print the results as JSON")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="test which API features a server supports",
        description="Test which parts of OpenAI's, Anthropic's and Ollama's APIs a server supports.",
        epilog=EPILOG,
    )
    parser.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    add_flags(parser, CheckFlags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the checks. The exit code is 1 when an offered or essential feature does not work."""
    from server.cli.checks import agents, official_clients, ollama_api, openai_api, other_apis
    from server.cli.checks.runner import Server, summary

    given = vars(args).copy()
    url = base_url(given.pop("url"))
    (flags,) = load(given, CheckFlags)
    modules = (openai_api, other_apis, ollama_api, agents, official_clients)
    checks = [each for module in modules for each in module.suite.checks]
    groups = list(dict.fromkeys(each.group for each in checks))
    if unknown := [group for group in flags.only if group not in groups]:
        raise ConfigError(f"only must be some of {', '.join(groups)}; got {unknown[0]!r}")
    chosen = [each for each in checks if not flags.only or each.group in flags.only]
    server = Server(url, api_key=flags.api_key, model=flags.model or "", timeout=flags.timeout)
    with contextlib.closing(server.http):
        server.model = server.model or _first_model(server)
        if flags.deterministic:
            return _compare(server, as_json=flags.json)
        results = _run(chosen, server, quiet=flags.json)
    if flags.json:
        rows = [result.as_dict() for result in results]
        print(json.dumps({"url": url, "model": server.model, "results": rows}, indent=1, ensure_ascii=False))
    else:
        print(f"\n{summary(results)}")
    return int(any(result.is_bad for result in results))


def _compare(server: Server, *, as_json: bool) -> int:
    """Compare requests alone and among others. The exit code is 1 if one of them differs, or the server refuses."""
    from server.cli.checks import determinism
    from server.cli.checks.runner import AbsentError, FailedError

    try:
        found = determinism.run(server, (lambda row: None) if as_json else partial(print, flush=True))
    except (AbsentError, FailedError) as error:
        raise EngineError(f"{server.url}{determinism.PATH}: {error}") from None
    if as_json:
        rows = [each.as_dict() for each in found]
        print(json.dumps({"url": server.url, "model": server.model, "deterministic": rows}, indent=1))
    else:
        num_same, num_all = sum(each.num_same for each in found), sum(each.num_all for each in found)
        print(f"\n{num_same} of {num_all} are the same bytes")
    return int(not all(each.is_good for each in found))


def _run(checks: list[Check], server: Server, *, quiet: bool) -> list[Result]:
    """Run the checks one after the other, and print each result unless `quiet`."""
    from server.cli.checks.runner import line, run

    results: list[Result] = []
    width = max(len(check.name) for check in checks)
    for group, members in itertools.groupby(checks, key=lambda check: check.group):
        if not quiet:
            print(f"\n{group}" if results else f"{server.url} · {server.model}\n\n{group}", flush=True)
        for each in members:
            results.append(run(each, server))
            if not quiet:
                print(line(results[-1], width), flush=True)
    return results


def _first_model(server: Server) -> str:
    import httpx

    try:
        response = server.http.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(f"no server answers at {server.url} ({error})") from None
    if response.status_code == 401:
        raise EngineError(f"{server.url} requires an API key: --api-key KEY")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise EngineError(f"{server.url}/v1/models lists no model: name one with --model") from None
