"""Hostile schemas, expressions, grammars and tools at a real server: all are answered, and no other request waits
for them.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.served import blocks_in_use, serve
from tests.support.templates import HERMES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def doubled(depth: int) -> Any:
    """Twice as large at each level."""
    return reduce(lambda inner, _: {"type": "object", "properties": {"a": inner, "b": inner}}, range(depth), True)  # type: ignore[arg-type, return-value]


def references(number: int) -> Any:
    defs: dict[str, Any] = {
        f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"minLength": 1}]} for i in range(number)
    }
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{number}": {"type": "string"}}}


def tools(schema: Any, number: int = 40) -> dict[str, Any]:
    functions = [
        {"name": f"f{i}", "parameters": {"type": "object", "properties": {"x": schema}}} for i in range(number)
    ]
    return {"tools": [{"type": "function", "function": function} for function in functions], "tool_choice": "required"}


ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}}
HOSTILE: dict[str, Callable[[], dict[str, Any] | str]] = {
    "a repetition": lambda: {"guided_regex": "x{1000000000}"},
    "repetitions of repetitions": lambda: {"guided_regex": "(((((a{10}){10}){10}){10}){10}){10}"},
    "stars": lambda: {"guided_regex": "a*" * 4999},
    "a large automaton": lambda: {"guided_regex": "(.*a.{20})"},
    "two large automata": lambda: {"guided_regex": "(?s:.*)(a|b)(?s:.){300}(c|d)(?s:.){300}"},
    "brackets": lambda: {"guided_regex": "(" * 4999 + "a" + ")" * 4999},
    "megabytes of regex": lambda: {"guided_regex": "ab" * 1_000_000},
    "megabytes of schema": lambda: {"guided_json": {"enum": ["x" * 3_000_000]}},
    "megabytes of schema as a text": lambda: {"guided_json": json.dumps({"enum": [*range(400_000)]})},
    "a deep schema": lambda: {"guided_json": '{"items":' * 60 + "{}" + "}" * 60},
    "a very deep schema as a text": lambda: {"guided_json": '{"items":' * 100_000 + "{}" + "}" * 100_000},
    "a very deep schema": lambda: (
        '{"prompt": "a", "guided_json": ' + '{"items":' * 100_000 + "{}" + "}" * 100_000 + "}"
    ),
    "doubled": lambda: {"guided_json": doubled(10)},
    "doubled often": lambda: {"guided_json": doubled(15)},
    "endless": lambda: {"guided_json": ENDLESS},
    "properties": lambda: {"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}},
    "references": lambda: {"guided_json": references(380)},
    "products": lambda: {"guided_json": {"allOf": [{"anyOf": [{"const": i}, {"minLength": i}]} for i in range(20)]}},
    "products of patterns": lambda: {
        "guided_json": {"allOf": [{"pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(15)]}
    },
    "choices": lambda: {"guided_choice": [f"choice {i}" for i in range(100_000)]},
    "ambiguity": lambda: {"guided_grammar": 'start: s\ns: s s | "a" | "b" | /[a-z ]/'},
    "rules repeated": lambda: {"guided_grammar": 'start: (("a" "b"){1000}){1000}'},
    "terminals repeated": lambda: {"guided_grammar": 'start: X{1000}\nX: Y{1000}\nY: "a"{1000}'},
    "brackets in GBNF": lambda: {"guided_grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "tools doubled": lambda: tools(doubled(8)),
    "tools of stars": lambda: tools({"type": "string", "pattern": "a*" * 1000}),
    "tools of large automata": lambda: tools({"type": "string", "pattern": "(.*a.{15})"}, 20),
    "tools of megabytes": lambda: tools({"description": "y" * 90_000}),
    "a prompt of megabytes": lambda: {"prompt": "y" * 3_000_000},
}


@pytest.fixture(scope="module")
def server(demo_model: Path, quick_quire: list[str]) -> Iterator[str]:
    """The bundled model, with a template that shows tools; the base URL."""
    with serve(demo_model, "--chat-template", HERMES, "--kv-cache-memory-bytes", "64m", quire=quick_quire) as url:
        yield url
        assert blocks_in_use(url) == 0


def test_they_stall_no_other_request(server: str) -> None:
    async def run() -> tuple[dict[str, httpx.Response], int]:
        async with httpx.AsyncClient(base_url=server, timeout=200) as client:
            num_events, done = 0, asyncio.Event()

            async def others() -> int:
                """Streams, one after another: the events that came meanwhile."""
                nonlocal num_events
                body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
                while not done.is_set():
                    async with client.stream("POST", COMPLETIONS, json=body) as response:
                        lines = [line async for line in response.aiter_lines() if line]
                    assert lines[-1] == "data: [DONE]"
                    assert not any('"error"' in line for line in lines)
                    num_events += len(lines)
                return num_events

            async def post(name: str) -> tuple[str, httpx.Response]:
                made = HOSTILE[name]()
                if isinstance(made, str):
                    headers = {"Content-Type": "application/json"}
                    return name, await client.post(COMPLETIONS, content=made, headers=headers)
                if "tools" in made:
                    return name, await client.post(
                        CHAT, json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 30, **made}
                    )
                return name, await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 30, **made})

            beside = asyncio.create_task(others())
            answers = dict(await asyncio.gather(*map(post, HOSTILE)))
            done.set()
            return answers, await beside

    answers, num_events = asyncio.run(run())
    for name, answer in answers.items():
        assert answer.status_code in (200, 400), (name, answer.text[:300])
        if answer.status_code == 400:
            assert 0 < len(answer.json()["error"]["message"]) < 700, name
    refused = {name for name, answer in answers.items() if answer.status_code == 400}
    assert {"a repetition", "megabytes of regex", "megabytes of schema", "a very deep schema", "endless"} <= refused
    assert {"a deep schema", "doubled", "references", "a large automaton"}.isdisjoint(refused)
    assert num_events > 20, "a stream went on all the time"
    assert (
        httpx.post(f"{server}{COMPLETIONS}", json={"prompt": "a", "guided_choice": ["yes"]}, timeout=60).json()[
            "choices"
        ][0]["text"]
        == "yes"
    )
