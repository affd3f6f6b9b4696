"""Clients of every kind for the soak test: each makes one request and says how it went."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

OK, REFUSED, BUSY, FAILED = "ok", "refused", "busy", "failed"
STORY = "Once upon a time there was a little fox who lived in the wood. " * 12
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a request: `OK`, `REFUSED` as it deserved, `BUSY` with advice when to come back, `FAILED` with the
    reason.
    """

    how: str
    reason: str = ""


class Wrong(Exception):
    """The server answered, and not as it should."""


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _expect(condition: bool, answer: Any) -> None:
    if not condition:
        raise Wrong(f"not a right answer: {str(answer)[:300]}")


@dataclass
class Client:
    """One client with its own randomness."""

    http: httpx.AsyncClient
    random: random.Random

    async def post(self, path: str, **body: Any) -> Any:
        response = await self.http.post(path, json=body)
        return self._checked(response)

    def _checked(self, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise httpx.HTTPStatusError(response.text[:300], request=response.request, response=response)
        return response.json()

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream, which must end as one."""
        events: list[dict[str, Any]] = []
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                self._checked(response)
            ended = False
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                ended = ended or line == "data: [DONE]" or line == "event: message_stop"
        for event in events:
            if event.get("error"):
                raise Wrong(f"error event: {event['error'].get('message')}")
        _expect(ended, events[-1:] or "an empty stream")
        return events

    # ---- kinds ----

    async def completion(self) -> None:
        answer = await self.post(
            "/v1/completions", prompt="Once", max_tokens=self.random.randint(1, 60), ignore_eos=True
        )
        _expect(answer["choices"][0]["finish_reason"] == "length", answer)

    async def samples(self) -> None:
        answer = await self.post("/v1/completions", prompt=["One", "Two"], n=3, max_tokens=10, temperature=1.2)
        _expect(len(answer["choices"]) == 6, answer)

    async def chat_stream(self) -> None:
        events = await self.stream("/v1/chat/completions", messages=_user("Tell me a story."), max_tokens=80)
        _expect(events[-1]["choices"][0]["finish_reason"] in ("stop", "length"), events[-1])

    async def long_prompt(self) -> None:
        text = f"{self.random.randint(0, 5)} {STORY * self.random.randint(1, 3)}"
        answer = await self.post("/v1/completions", prompt=text, max_tokens=8)
        _expect(answer["usage"]["prompt_tokens"] > 100, answer)

    async def with_logprobs(self) -> None:
        answer = await self.post("/v1/completions", prompt="The cat", max_tokens=12, logprobs=3, echo=True, top_p=0.9)
        _expect(len(answer["choices"][0]["logprobs"]["tokens"]) > 2, answer)

    async def schema(self) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        answer = await self.post(
            "/v1/chat/completions", messages=_user("A person?"), max_tokens=100, response_format=wanted, temperature=1.3
        )
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            _expect(json.loads(choice["message"]["content"]).keys() == {"name", "age"}, answer)

    async def tools(self) -> None:
        answer = await self.post(
            "/v1/chat/completions", messages=_user("Look it up."), tools=[TOOL], tool_choice="required", max_tokens=100
        )
        _expect(answer["choices"][0]["finish_reason"] in ("tool_calls", "length"), answer)

    async def responses(self) -> None:
        first = await self.post("/v1/responses", input="Hello", max_output_tokens=10)
        answer = await self.post(
            "/v1/responses", input="And then?", max_output_tokens=10, previous_response_id=first["id"]
        )
        _expect(answer["status"] in ("completed", "incomplete"), answer)

    async def messages(self) -> None:
        events = await self.stream("/v1/messages", model="demo", messages=_user("Hello"), max_tokens=20)
        _expect(any(event.get("type") == "message_delta" for event in events), events)

    async def embeddings(self) -> None:
        answer = await self.post("/v1/embeddings", input=["a cat", "a dog"])
        _expect(len(answer["data"]) == 2, answer)

    async def penalties(self) -> None:
        answer = await self.post(
            "/v1/completions", prompt="A B A B", max_tokens=30, repetition_penalty=1.2, min_p=0.05, top_k=20, seed=3,
            logit_bias={"5": -3}, bad_words=["king"], stop=["."], dry_multiplier=0.5,
        )  # fmt: skip
        _expect(answer["choices"][0]["finish_reason"] in ("stop", "length"), answer)

    async def small_questions(self) -> None:
        for path in ("/v1/models", "/health", "/version", "/metrics", "/"):
            _expect((await self.http.get(path)).status_code in (200, 503), path)
        answer = await self.post("/tokenize", prompt="A little fox")
        back = await self.post("/detokenize", tokens=answer["tokens"])
        _expect("fox" in back["prompt"], back)

    async def hang_up(self) -> None:
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True, "n": 2}
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                if self.random.random() < 0.2:
                    return

    async def nonsense(self) -> None:
        bodies: list[dict[str, Any]] = [
            {"prompt": "a", "max_tokens": -1},
            {"prompt": [10**9], "max_tokens": 1},
            {"prompt": "a", "temperature": "hot"},
            {"prompt": STORY * 200, "max_tokens": 1},
            {"prompt": "a", "model": "another"},
            {"prompt": "a", "guided_regex": "x{1000000000}"},
        ]
        response = await self.http.post("/v1/completions", json=self.random.choice(bodies))
        if response.status_code in (400, 404, 413):
            raise Refused
        self._checked(response)
        raise Wrong("nonsense was served")


class Refused(Exception):
    """The request was refused, as it should be."""


KINDS: tuple[Callable[[Client], Awaitable[None]], ...] = (
    Client.completion, Client.samples, Client.chat_stream, Client.chat_stream, Client.long_prompt, Client.with_logprobs,
    Client.schema, Client.tools, Client.responses, Client.messages, Client.embeddings, Client.penalties,
    Client.small_questions, Client.hang_up, Client.nonsense,
)  # fmt: skip


async def run_once(client: Client, kind: Callable[[Client], Awaitable[None]]) -> Outcome:
    try:
        await kind(client)
    except Refused:
        return Outcome(REFUSED)
    except httpx.HTTPStatusError as error:
        status, advice = error.response.status_code, error.response.headers.get("retry-after")
        if status in (429, 503) and advice is not None:
            return Outcome(BUSY, f"{status}, again in {advice} s")
        return Outcome(FAILED, f"{status}: {error}")
    except (httpx.TransportError, Wrong, KeyError, ValueError) as error:
        return Outcome(FAILED, f"{type(error).__name__}: {error}")
    return Outcome(OK)
