"""`quire chat`: a conversation in the terminal, with a server or with a model of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.errors import ConfigError, EngineDeadError, EngineError
from engine.flags import add_flags, check, flag, load
from server.commands.common import SAMPLING_FLAGS, SamplingFlags, load_with_model

EPILOG = """examples:
  quire chat                                       with the bundled demo model
  quire chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence."
  quire chat --url http://127.0.0.1:8000           with a running server of the OpenAI API

In the chat: /new begins anew, /system TEXT sets the system prompt, /help lists these, /quit or Ctrl-D leaves.
Ctrl-C stops an answer, not the chat.
"""
HELP = "/new  begin anew · /system TEXT  set the system prompt · /help  this · /quit  leave · Ctrl-C  stop an answer"

Message = dict[str, str]


@dataclass(frozen=True)
class ChatFlags:
    """Chat."""

    url: str | None = flag(
        None, "server to chat with, such as http://127.0.0.1:8000 (else a model is loaded here)", metavar="URL"
    )
    api_key: str | None = flag(None, "key that the server asks for", metavar="KEY")
    system: str | None = flag(None, "system prompt")

    def __post_init__(self) -> None:
        check(self)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must begin with http:// or https://, got {self.url!r}")


class RefusedError(Exception):
    """This message could not be answered; the conversation can go on."""


class Model(Protocol):
    """What answers: a server or a model of its own."""

    name: str

    def answer(self, messages: list[Message]) -> AsyncGenerator[str, None]: ...
    async def close(self) -> None: ...


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat in the terminal",
        description="Chat in the terminal, with a running server or with a model loaded for the purpose.",
        epilog=EPILOG,
    )
    add_flags(parser, ChatFlags, SAMPLING_FLAGS, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name != "config"}
    with asyncio.Runner() as runner:
        if load(given, ChatFlags)[0].url is not None:
            chat, sampling = load(args, ChatFlags, SAMPLING_FLAGS)
            model: Model = runner.run(ServedModel.connect(chat, sampling, given.get("model")))
        else:
            config, chat, sampling = load_with_model(args, EngineConfig, ChatFlags, SAMPLING_FLAGS)
            model = runner.run(OwnModel.start(config, sampling))
        try:
            converse(runner, model, chat.system)
        finally:
            runner.run(model.close())
    return 0


def converse(runner: asyncio.Runner, model: Model, system: str | None) -> None:
    """Read, answer, print, until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing and history for input())
    prompt = ""
    if sys.stdin.isatty():
        print(f"Chatting with {model.name}. {HELP}")
        prompt = "> "
    messages: list[Message] = []
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)")
            continue
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        elif command == "/new":
            messages.clear()
            print("A new conversation.")
        elif command == "/system":
            system = rest.strip() or None
            messages.clear()
            print(
                "A new conversation, " + (f"with the system prompt: {system}" if system else "without a system prompt.")
            )
        elif command == "/help" or line.startswith("/"):
            print(HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            head = [{"role": "system", "content": system}] if system else []
            answer: list[str] = []
            try:
                runner.run(_print_answer(model, head + messages, answer))
            except KeyboardInterrupt:
                print(" [stopped]")
            except RefusedError as error:
                print(f"{error}\n(/new begins a new conversation)")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": "".join(answer)})


async def _print_answer(model: Model, messages: list[Message], answer: list[str]) -> None:
    async with contextlib.aclosing(model.answer(messages)) as texts:
        async for text in texts:
            answer.append(text)
            print(text, end="", flush=True)
    print()


class OwnModel:
    """A model in an engine process of this program's own."""

    def __init__(self, engine: Any, template: Any, sampling: SamplingFlags) -> None:
        self._engine, self._template, self._sampling = engine, template, sampling
        self._ids = itertools.count()
        self.name: str = engine.model_name

    @classmethod
    async def start(cls, config: EngineConfig, sampling: SamplingFlags) -> OwnModel:
        from engine.async_engine import AsyncEngine
        from engine.text.chat_template import ChatTemplate

        engine = await AsyncEngine.start(config)
        print(engine.summary, file=sys.stderr)
        tokenizer = engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            engine.close()
            missing = "chat template" if tokenizer is not None else "tokenizer (skip_tokenizer_init)"
            raise ConfigError(f"{engine.model_name} has no {missing}: it cannot chat; try quire generate")
        return cls(engine, ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map), sampling)

    async def answer(self, messages: list[Message]) -> AsyncGenerator[str, None]:
        from engine.text.chat_template import ChatTemplateError

        try:
            token_ids = self._engine.tokenizer.encode(self._template.render(messages), add_special_tokens=False)
            params = self._sampling.params(self._engine.default_sampling)
            updates = self._engine.generate(EngineRequest(str(next(self._ids)), token_ids, params))
        except (ValueError, ChatTemplateError) as error:
            raise RefusedError(str(error)) from None
        async with contextlib.aclosing(updates):
            async for update in updates:
                yield update.text
        if update.finish_reason == "error":
            raise EngineDeadError(f"the engine failed: {update.error}")

    async def close(self) -> None:
        self._engine.close()


class ServedModel:
    """A model behind an OpenAI-compatible HTTP API."""

    def __init__(self, client: Any, name: str, sampling: SamplingFlags) -> None:
        self._client, self._sampling = client, sampling
        self.name = name

    @classmethod
    async def connect(cls, chat: ChatFlags, sampling: SamplingFlags, name: str | None) -> ServedModel:
        import httpx

        assert chat.url is not None
        url = chat.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {chat.api_key}"} if chat.api_key else {}
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
            raise EngineError(f"{url}/v1/models does not list models: this is no OpenAI-compatible server") from None
        except BaseException:
            await client.aclose()
            raise
        return cls(client, name, sampling)

    async def answer(self, messages: list[Message]) -> AsyncGenerator[str, None]:
        import httpx

        body = {"model": self.name, "messages": messages, "stream": True} | self._sampling.given()
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
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""
        except httpx.HTTPError as error:
            raise RefusedError(f"the server is gone ({type(error).__name__}: {error})") from None

    async def close(self) -> None:
        await self._client.aclose()


def _error_message(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"
