"""The official openai, anthropic and ollama clients, where a model has to answer in a form: parsed, by tools, in every
API.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import ollama
import pytest
from anthropic import Anthropic
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.clients.table import Client

CLIENTS = (
    Client("openai", "openai", "parsed content and tools, responses, structured output"),
    Client("anthropic", "anthropic", "parsed content, tools, streams"),
    Client("ollama", "ollama", "parsed content, tools, streams, embeddings"),
)
pytestmark = pytest.mark.slow

ASKED: Any = {"model": "demo", "temperature": 0}
QUESTION = "What is the weather in Rome?"


class Unit(Enum):
    C = "°C"
    F = "°F"


class Weather(BaseModel):
    """Today's weather in a city."""

    city: str = Field(max_length=20)
    unit: Unit
    days: int = Field(ge=1, le=7)


@pytest.fixture
def client(quire: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{quire}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic(quire: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=quire, api_key="none", max_retries=0) as client:
        yield client


def test_parsed_content(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    done = client.chat.completions.parse(messages=messages, response_format=Weather, max_tokens=100, **ASKED)
    assert isinstance(done.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(messages=messages, response_format=Weather, max_tokens=100, **ASKED) as stream:
        kinds = {event.type for event in stream}
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert stream.get_final_completion().choices[0].message.parsed == done.choices[0].message.parsed


def test_parsed_tools(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [pydantic_function_tool(Weather)]
    asked = {"messages": messages, "tools": tools, "parallel_tool_calls": False, "max_tokens": 150, **ASKED}
    message = client.chat.completions.parse(tool_choice="required", **asked).choices[0].message
    assert message.tool_calls
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    named: Any = {"type": "function", "function": {"name": "Weather"}}
    with client.chat.completions.stream(tool_choice=named, **asked) as stream:
        kinds = {event.type for event in stream}
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        again = stream.get_final_completion().choices[0]
    assert again.finish_reason == "tool_calls"
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(messages=messages, tools=tools, tool_choice="none", max_tokens=20, **ASKED)
    assert answer.choices[0].message.content


def test_responses(client: OpenAI) -> None:
    parsed = client.responses.parse(input=QUESTION, text_format=Weather, max_output_tokens=100, **ASKED)
    assert isinstance(parsed.output_parsed, Weather)
    tool: Any = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema(), "strict": False}
    asked: dict[str, Any] = {"tools": [tool], "max_output_tokens": 150, "parallel_tool_calls": False, **ASKED}
    with client.responses.stream(input=QUESTION, tool_choice="required", **asked) as stream:
        kinds = {event.type for event in stream}
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
        response = stream.get_final_response()
    (call,) = [item for item in response.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = client.responses.create(
        previous_response_id=response.id, input=[result], tool_choice="none", **{**asked, "max_output_tokens": 20}
    )
    assert answer.output_text


def test_messages(anthropic: Anthropic) -> None:
    tool: Any = {"name": "weather", "description": "Today's weather", "input_schema": Weather.model_json_schema()}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {"tools": [tool], "max_tokens": 150, "model": "demo", "extra_body": {"temperature": 0}}
    choices: list[Any] = [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
    for choice in choices:
        with anthropic.messages.stream(messages=messages, tool_choice=choice, **asked) as stream:
            assert "input_json" in {event.type for event in stream}
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use"
        use = next(block for block in message.content if block.type == "tool_use")
        Weather.model_validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = anthropic.messages.create(messages=messages, tool_choice={"type": "none"}, **asked)
    assert answer.content[0].type == "text"


def test_embeddings(client: OpenAI) -> None:
    same, other = (client.embeddings.create(model="demo", input=text).data[0].embedding for text in ("a fox", "sums"))
    assert len(same) == len(other) == 256
    assert sum(a * b for a, b in zip(same, other, strict=True)) < 0.99


@pytest.fixture
def local(quire: str) -> Iterator[ollama.Client]:
    with ollama.Client(quire) as client:
        yield client


def test_ollama(local: ollama.Client) -> None:
    asked: Any = {"model": "demo:latest", "options": {"temperature": 0}}
    messages = [{"role": "user", "content": QUESTION}]
    parsed = local.chat(**asked, messages=messages, format=Weather.model_json_schema())
    Weather.model_validate_json(parsed.message.content or "")
    parts = list(local.chat(**asked, messages=messages, tools=[weather], stream=True))
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert call.function.name == "weather"
    assert isinstance(call.function.arguments["city"], str)
    assert len(local.embed("demo", ["one", "two"]).embeddings) == 2


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return f"Sunny in {city}."
