"""Runs checks against a server and reports the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import httpx

Outcome = Literal["ok", "fails", "absent"]
_ABSENT = (404, 405, 501)


class FailedError(Exception):
    """The server behaves incorrectly."""


class AbsentError(Exception):
    """The server does not offer this feature, and says so."""


def want(condition: object, message: str) -> None:
    """Raise `FailedError` unless the condition holds."""
    if not condition:
        raise FailedError(message)


@dataclass(frozen=True)
class Event:
    """A server-sent event."""

    name: str
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Server:
    """The server under test."""

    def __init__(self, url: str, *, api_key: str | None, model: str, timeout: float) -> None:
        self.url, self.api_key, self.model, self.timeout = url, api_key, model, timeout
        headers = {"Authorization": f"Bearer {api_key}", "x-api-key": api_key} if api_key else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=timeout)

    def get(self, path: str) -> httpx.Response:
        """Send a GET request and return the successful response."""
        return _successful(self.http.get(path))

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send a POST request and return the response, whatever its status. Adds `model` if `body` has none."""
        return self.http.post(path, json={"model": self.model, **body})

    def ask(self, path: str, *, optional: bool = False, **body: Any) -> dict[str, Any]:
        """Send a POST request and return the JSON of the successful response. `optional`: the server may refuse."""
        answer: dict[str, Any] = _successful(self.post(path, body), optional).json()
        return answer

    def stream(self, path: str, *, optional: bool = False, **body: Any) -> list[Event]:
        """Return the events of a successful stream, after checking its exact format."""
        body = {"model": self.model, "stream": True, **body}
        with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                _successful(response, optional)
            kind = response.headers.get("content-type", "")
            want(kind.startswith("text/event-stream"), f"the content type is {kind!r}, not text/event-stream")
            text = b"".join(response.iter_raw()).decode()
        want(text.endswith("\n\n"), "the last event does not end with an empty line")
        events = []
        for block in text.replace("\r\n", "\n").removesuffix("\n\n").split("\n\n"):
            fields: dict[str, str] = {}
            for line in block.split("\n"):
                name, colon, value = line.partition(":")
                want(colon and name in ("data", "event", "id", "retry", ""), f"no line of an event: {line[:80]!r}")
                fields[name] = value.removeprefix(" ")
            if "data" in fields:
                events.append(Event(fields.get("event", ""), fields["data"]))
        return events


def _successful(response: httpx.Response, optional: bool = False) -> httpx.Response:
    status = response.status_code
    if status == 200:
        return response
    if status in _ABSENT or (optional and 400 <= status < 500):
        raise AbsentError(f"status {status}{_message(response)}")
    raise FailedError(f"status {status}{_message(response)}")


def _message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return f": {error['message'] if isinstance(error, dict) else error}"
    except (ValueError, LookupError, TypeError):
        return ""


@dataclass(frozen=True)
class Check:
    """A check of one feature. `essential`: ordinary clients need it."""

    group: str
    name: str
    essential: bool
    run: Callable[[Server], None]


class Suite:
    """Checks in the order of their declaration."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def check(
        self, group: str, name: str, *, essential: bool = False
    ) -> Callable[[Callable[[Server], None]], Callable[[Server], None]]:
        def declare(run: Callable[[Server], None]) -> Callable[[Server], None]:
            self.checks.append(Check(group, name, essential, run))
            return run

        return declare


@dataclass(frozen=True)
class Result:
    """The result of a check. `note`: the reason, unless it passed."""

    check: Check
    outcome: Outcome
    note: str
    seconds: float

    @property
    def is_bad(self) -> bool:
        return self.outcome == "fails" or (self.check.essential and self.outcome == "absent")

    def as_dict(self) -> dict[str, Any]:
        check = {"group": self.check.group, "check": self.check.name, "essential": self.check.essential}
        return check | {"outcome": self.outcome, "note": self.note, "seconds": round(self.seconds, 3)}


def run(check: Check, server: Server) -> Result:
    """Run a check. Never raises: any exception counts as the server's failure."""
    start = time.perf_counter()
    outcome: Outcome = "ok"
    note = ""
    try:
        check.run(server)
    except AbsentError as error:
        outcome, note = "absent", str(error)
    except FailedError as error:
        outcome, note = "fails", str(error)
    except httpx.TimeoutException:
        outcome, note = "fails", f"no answer within {server.timeout:g} s"
    except Exception as error:
        outcome, note = "fails", f"{type(error).__name__}: {error}"
    return Result(check, outcome, " ".join(note.split())[:200], time.perf_counter() - start)


SIGNS = {"ok": "✓", "fails": "✗", "absent": "–"}


def line(result: Result, width: int) -> str:
    """Return a row of the table."""
    note = f"  {result.note}" if result.note else ""
    return f"  {SIGNS[result.outcome]} {result.check.name:<{width}}  {result.seconds:5.1f} s{note}"


def summary(results: Iterable[Result]) -> str:
    outcomes = [result.outcome for result in results]
    return ", ".join(f"{outcomes.count(outcome)} {words}" for outcome, words in _WORDS.items())


_WORDS: dict[Outcome, str] = {"ok": "work", "fails": "fail", "absent": "not offered"}
