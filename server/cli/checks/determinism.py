"""Compares the bytes that a server gives the same request: alone, again, and among others.

Every request asks for log-probabilities, so that a difference shows before it changes a token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from server.cli.checks.runner import SIGNS, Server

PATH = "/v1/completions"
CROWDS = (1, 7, 44)  # other requests that run at the same time
COUNT = 12  # requests that are compared
TOKENS = 24
TEXT = "the old lighthouse keeper counted ships while the tide carried letters from a city that no one remembered"
WORDS = TEXT.split()


@dataclass(frozen=True)
class Comparison:
    """Requests sent in one way, compared with each of them alone. `difference`: the first one."""

    name: str
    num_same: int
    num_all: int
    difference: str = ""

    @property
    def is_good(self) -> bool:
        return self.num_same == self.num_all

    def line(self, width: int) -> str:
        """Return a row of the table."""
        sign = SIGNS["ok" if self.is_good else "fails"]
        note = f"  {self.difference}" if self.difference else ""
        return f"  {sign} {self.name:<{width}}  {self.num_same:>2} of {self.num_all}{note}"

    def as_dict(self) -> dict[str, Any]:
        return {"way": self.name, "same": self.num_same, "of": self.num_all, "difference": self.difference}


NAMES = ("alone, again", *(f"among {n} other{'s' if n > 1 else ''}" for n in CROWDS), "scored afterwards")


def bodies() -> list[dict[str, Any]]:
    """Return the requests: short and long prompts, some with a common beginning, greedy and sampled."""
    found = []
    for i in range(COUNT):
        own = " ".join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(1 + (i * 11) % 60))
        prompt = f"{' '.join(WORDS * 2)} {own}" if i % 3 == 0 else f"{own} {i}"
        found.append(_body(prompt, temperature=(0.0, 0.9)[i % 2], seed=i))
    return found


def _body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": TOKENS, "logprobs": 2, "ignore_eos": True, **more}


def _other(i: int) -> dict[str, Any]:
    """Return a request that only keeps the server busy: all sizes and lengths, none of them compared."""
    words = " ".join(WORDS[(i * 3 + j) % len(WORDS)] for j in range(1 + (i * 17) % 90))
    return _body(f"{i} {words}", temperature=1.0, seed=1000 + i) | {"max_tokens": 8 + (i * 7) % 40}


def compare(server: Server) -> Iterator[Comparison]:
    """Send the requests alone, then in each way, and yield what differs. Raises what `Server.ask` does."""
    requests = bodies()
    alone = [_answer(server, body) for body in requests]
    yield _compared(NAMES[0], alone, [_answer(server, body) for body in requests])
    for name, crowd in zip(NAMES[1:], CROWDS, strict=False):
        with ThreadPoolExecutor(crowd + COUNT) as pool:
            others = [pool.submit(_answer, server, _other(i)) for i in range(crowd)]
            found = list(pool.map(lambda body: _answer(server, body), requests))
            for other in others:
                other.result()
        yield _compared(name, alone, found)
    yield _scored(server, requests, alone)


def _answer(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = server.ask(PATH, **body)["choices"][0]
    return {"text": choice["text"], **choice["logprobs"]}


def _compared(name: str, alone: list[dict[str, Any]], found: list[dict[str, Any]]) -> Comparison:
    pairs = list(enumerate(zip(alone, found, strict=True), 1))
    wrong = [(i, *pair) for i, pair in pairs if json.dumps(pair[0]) != json.dumps(pair[1])]
    difference = _difference(*wrong[0]) if wrong else ""
    return Comparison(name, len(pairs) - len(wrong), len(pairs), difference)


def _difference(number: int, want: dict[str, Any], got: dict[str, Any]) -> str:
    for at, (one, other) in enumerate(zip(want["tokens"], got["tokens"], strict=False), 1):
        if one != other:
            return f"request {number}, token {at}: {other!r}, alone {one!r}"
        if (p := want["token_logprobs"][at - 1]) != (q := got["token_logprobs"][at - 1]):
            return f"request {number}, token {at}: log-probability {q!r}, alone {p!r}"
    return f"request {number} differs"


def _scored(server: Server, requests: list[dict[str, Any]], alone: list[dict[str, Any]]) -> Comparison:
    """Compare the log-probabilities of generated texts with those of the same texts as prompts.

    Only where the text is cut into the same tokens again, which is not certain.
    """
    same = count = 0
    difference = ""
    for number, (body, answer) in enumerate(zip(requests, alone, strict=True), 1):
        echoed = server.ask(PATH, prompt=body["prompt"] + answer["text"], max_tokens=0, echo=True, logprobs=2)
        found = echoed["choices"][0]["logprobs"]
        first = len(found["tokens"]) - len(answer["tokens"])
        if first < 1 or found["tokens"][first:] != answer["tokens"]:
            continue
        count += 1
        if found["token_logprobs"][first:] == answer["token_logprobs"]:
            same += 1
        elif not difference:
            got = {name: found[name][first:] for name in ("tokens", "token_logprobs")}
            difference = _difference(number, answer, got)
    return Comparison(NAMES[-1], same, count, difference)


def run(server: Server, show: Callable[[str], None]) -> list[Comparison]:
    """Compare, showing each row at once."""
    width, found = max(map(len, NAMES)), []
    show(f"{server.url} · {server.model}\n\nsame request, same bytes")
    for each in compare(server):
        found.append(each)
        show(each.line(width))
    return found
