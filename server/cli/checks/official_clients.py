"""Checks through the official openai, anthropic and ollama clients, if they are installed."""

from __future__ import annotations

import importlib
from typing import Any, Literal

import pydantic

from server.cli.checks.runner import AbsentError, Server, Suite, want

HELLO: Any = [{"role": "user", "content": "Say hello."}]

suite = Suite()
check = suite.check


def _openai(server: Server) -> Any:
    try:
        module = importlib.import_module("openai")
    except ImportError:
        raise AbsentError("not checked: pip install openai") from None
    return module.OpenAI(
        base_url=f"{server.url}/v1", api_key=server.api_key or "none", max_retries=0, timeout=server.timeout
    )


def _anthropic(server: Server) -> Any:
    try:
        module = importlib.import_module("anthropic")
    except ImportError:
        raise AbsentError("not checked: pip install anthropic") from None
    return module.Anthropic(
        base_url=server.url, api_key=server.api_key or "none", max_retries=0, timeout=server.timeout
    )


@check("openai client", "models")
def models(server: Server) -> None:
    with _openai(server) as client:
        want(server.model in [model.id for model in client.models.list()], f"{server.model} is not in the list")


@check("openai client", "chat, whole and streamed")
def chat(server: Server) -> None:
    with _openai(server) as client:
        asked = {"model": server.model, "messages": HELLO, "max_tokens": 12}
        whole = client.chat.completions.create(**asked)
        want(whole.choices[0].message.role == "assistant", "it is no message of the assistant")
        ends = [
            choice.finish_reason
            for chunk in client.chat.completions.create(**asked, stream=True)
            for choice in chunk.choices
        ]
        want([end for end in ends if end] in (["stop"], ["length"]), "the stream has not one finish_reason")


@check("openai client", "chat.completions.parse")
def parsed(server: Server) -> None:
    class Weather(pydantic.BaseModel):
        city: Literal["Paris", "Rome"]
        days: Literal[1, 2, 3]

    client = _openai(server)
    openai = importlib.import_module("openai")
    try:
        body = client.chat.completions.parse(
            model=server.model, messages=HELLO, response_format=Weather, max_tokens=300
        )
        want(isinstance(body.choices[0].message.parsed, Weather), "it was not parsed")
    except openai.LengthFinishReasonError:
        raise AbsentError("the model came to no end") from None
    except openai.BadRequestError as error:
        raise AbsentError(f"status 400: {error}") from None
    finally:
        client.close()


@check("openai client", "completions")
def completions(server: Server) -> None:
    with _openai(server) as client:
        body = client.completions.create(model=server.model, prompt="Once", max_tokens=4)
        want(isinstance(body.choices[0].text, str), "there is no text")


@check("openai client", "responses, whole and streamed")
def responses(server: Server) -> None:
    with _openai(server) as client:
        asked = {"model": server.model, "input": "Say hello."}
        try:
            want(client.responses.create(**asked).object == "response", "it is no response")
        except importlib.import_module("openai").NotFoundError as error:
            raise AbsentError(f"status 404: {error}") from None
        with client.responses.stream(**asked) as stream:
            want(next(iter(stream)).type == "response.created", "the first event is another")


@check("openai client", "embeddings")
def embeddings(server: Server) -> None:
    with _openai(server) as client:
        try:
            data = client.embeddings.create(model=server.model, input=["one", "two"]).data
        except importlib.import_module("openai").APIStatusError as error:
            if error.status_code not in (400, 404, 501):
                raise
            raise AbsentError(f"status {error.status_code}: {error}") from None
        want(len(data) == 2 and len(data[0].embedding) > 0, "two texts did not give two embeddings")


@check("anthropic client", "messages, whole and streamed")
def messages(server: Server) -> None:
    with _anthropic(server) as client:
        asked = {"model": server.model, "max_tokens": 12, "messages": HELLO}
        try:
            want(client.messages.create(**asked).type == "message", "it is no message")
        except importlib.import_module("anthropic").NotFoundError as error:
            raise AbsentError(f"status 404: {error}") from None
        with client.messages.stream(**asked) as stream:
            want(stream.get_final_message().stop_reason, "the stream has no stop_reason")


@check("ollama client", "chat, whole and streamed")
def ollama_chat(server: Server) -> None:
    try:
        module = importlib.import_module("ollama")
    except ImportError:
        raise AbsentError("not checked: pip install ollama") from None
    headers = {"Authorization": f"Bearer {server.api_key or 'none'}"}
    with module.Client(server.url, headers=headers, timeout=server.timeout) as client:
        asked = {"model": server.model, "messages": HELLO, "options": {"num_predict": 12}}
        try:
            want(client.chat(**asked).done, "the answer is not done")
        except module.ResponseError as error:
            raise AbsentError(str(error)) from None
        want([part.done for part in client.chat(**asked, stream=True)][-1], "the stream does not end")
