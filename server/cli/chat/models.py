"""The models of a chat: one loaded in this process, or one behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from engine import ConfigError, EngineConfig, EngineDeadError, EngineError, EngineRequest
from server.cli.common import SamplingFlags

Message = dict[str, str]


class RefusedError(Exception):
    """The model rejected a message; the conversation can continue."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer. A server reports the token counts once, with the last piece."""

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0  # of the answer
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt


class Model(Protocol):
    """A model that answers conversations."""

    name: str

    def answer(self, messages: list[Message], sampling: SamplingFlags) -> AsyncGenerator[Piece, None]: ...
    async def close(self) -> None: ...


class OwnModel:
    """A model in an engine process that this program starts."""

    def __init__(self, engine: Any, renderer: Any) -> None:
        self._engine, self._renderer = engine, renderer
        self._ids = itertools.count()
        self.name: str = engine.model.name

    @classmethod
    async def start(cls, config: EngineConfig) -> OwnModel:
        from engine import AsyncEngine
        from engine.text.chat_templates import choose_renderer

        engine = await AsyncEngine.start(config)
        print(engine.summary, file=sys.stderr)
        tokenizer = engine.model.tokenizer
        if tokenizer is None or not tokenizer.chat_templates:
            engine.close()
            missing = "chat template" if tokenizer is not None else "tokenizer (skip_tokenizer_init)"
            raise ConfigError(f"{engine.model.name} has no {missing}: it cannot chat; try quire generate")
        return cls(engine, choose_renderer(tokenizer.chat_templates, tokenizer.special_tokens_map))

    async def answer(self, messages: list[Message], sampling: SamplingFlags) -> AsyncGenerator[Piece, None]:
        from engine.text.chat_template import ChatTemplateError

        try:
            token_ids = self._engine.model.tokenizer.encode(
                self._renderer.render(messages).text, add_special_tokens=False
            )
            params = sampling.params(self._engine.model.default_sampling)
            updates = self._engine.generate(EngineRequest(str(next(self._ids)), token_ids, params))
        except (ValueError, ChatTemplateError) as error:
            raise RefusedError(str(error)) from None
        async with contextlib.aclosing(updates):
            async for update in updates:
                yield Piece(update.text, "", len(update.token_ids))
        if update.finish_reason == "error":
            raise EngineDeadError(f"the engine failed: {update.error}")
        yield Piece(num_prompt_tokens=len(token_ids), num_cached_tokens=update.num_cached_tokens)

    async def close(self) -> None:
        self._engine.close()


class ServedModel:
    """A model behind an OpenAI-compatible HTTP API."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self.name = name

    @classmethod
    async def connect(cls, url: str, api_key: str | None, name: str | None) -> ServedModel:
        """Connect to a server. `name`: the model; None: the first one that the server lists."""
        import httpx

        url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        client = httpx.AsyncClient(base_url=f"{url}/v1", headers=headers, timeout=httpx.Timeout(None, connect=10))
        try:
            if name is None:
                response = await client.get("/models")
                if response.status_code != 200:
                    raise EngineError(f"{url}: {_error_message(response.status_code, response.content)}")
                name = str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            await client.aclose()
            raise EngineError(f"no server answers at {url} ({error}): start one with quire serve") from None
        except (ValueError, LookupError, TypeError):
            await client.aclose()
            raise EngineError(
                f"{url}/v1/models does not list models: this is not an OpenAI-compatible server"
            ) from None
        except BaseException:
            await client.aclose()
            raise
        return cls(client, name)

    async def answer(self, messages: list[Message], sampling: SamplingFlags) -> AsyncGenerator[Piece, None]:
        import httpx

        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= sampling.given()
        try:
            async with self._client.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RefusedError(_error_message(response.status_code, await response.aread()))
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data:"))
                    if "error" in event:
                        raise RefusedError(event["error"]["message"])
                    yield _piece(event)
        except httpx.HTTPError as error:
            raise RefusedError(f"the connection to the server was lost ({type(error).__name__}: {error})") from None

    async def close(self) -> None:
        await self._client.aclose()


def _piece(event: dict[str, Any]) -> Piece:
    """Return the content of a stream event."""
    delta: dict[str, Any] = event["choices"][0]["delta"] if event["choices"] else {}
    usage: dict[str, Any] = event.get("usage") or {}
    return Piece(
        delta.get("content") or "",
        delta.get("reasoning") or delta.get("reasoning_content") or "",
        usage.get("completion_tokens", 0),
        usage.get("prompt_tokens", 0),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def _error_message(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"
