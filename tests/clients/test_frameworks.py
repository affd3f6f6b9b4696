"""Frameworks for agents, each with one tool that it runs and a final answer; the model is scripted."""

import asyncio
from typing import Any

import pytest

from tests.clients.scripted import call, scripted
from tests.clients.table import Client

CLIENTS = (
    Client("Anthropic SDK's tool runner", "anthropic", "a tool and its result; threads are refused and left out"),
    Client("smolagents", "smolagents", "`ToolCallingAgent`: a tool, its result, `final_answer`"),
    Client("Haystack", "haystack-ai", "`Agent` over `OpenAIChatGenerator`: a tool and its result"),
    Client("Inspect", "inspect-ai", "`openai-api` models: a tool and its result"),
)
CALL, ANSWER = call("weather", '{"city": "Rome"}'), "It is sunny."
pytestmark = pytest.mark.slow


def test_anthropic_tool_runner() -> None:
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    with scripted(CALL, ANSWER) as (live, engine):
        client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{live.port}", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "Weather in Rome?"}]
        runner = client.beta.messages.tool_runner(model="toy", max_tokens=200, tools=[weather], messages=messages)
        assert runner.until_done().content[-1].text == ANSWER
        assert "sunny in Rome" in engine.prompt()
        assert CALL in engine.prompt(), "the conversation before is not lost"


def test_smolagents() -> None:
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Where.
        """
        return f"sunny in {city}"

    with scripted(CALL, call("final_answer", '{"answer": "It is sunny."}')) as (live, engine):
        model = smolagents.OpenAIModel("toy", api_base=f"http://127.0.0.1:{live.port}/v1", api_key="none")
        agent = smolagents.ToolCallingAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0)
        engine.result_mark = "sunny in"  # results are plain messages here
        assert agent.run("Weather in Rome?") == ANSWER
        assert "sunny in Rome" in engine.prompt()


def test_haystack() -> None:
    pytest.importorskip("haystack")
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    with scripted(CALL, ANSWER) as (live, engine):
        generator = OpenAIChatGenerator(
            model="toy", api_base_url=f"http://127.0.0.1:{live.port}/v1", api_key=Secret.from_token("none")
        )
        agent = Agent(chat_generator=generator, tools=[create_tool_from_function(weather)])
        result = agent.run(messages=[ChatMessage.from_user("Weather in Rome?")])
        assert result["messages"][-1].text == ANSWER
        assert "sunny in Rome" in engine.prompt()


def test_inspect() -> None:
    pytest.importorskip("inspect_ai")
    from inspect_ai.model import ChatMessageUser, GenerateConfig, execute_tools, get_model
    from inspect_ai.tool import Tool, tool

    @tool
    def weather() -> Tool:
        async def execute(city: str) -> str:
            """The weather of a city.

            Args:
                city: Where.
            """
            return f"sunny in {city}"

        return execute

    async def run(url: str) -> Any:
        model = get_model(
            "openai-api/quire/toy", base_url=f"{url}/v1", api_key="none", config=GenerateConfig(max_retries=0)
        )
        messages: list[Any] = [ChatMessageUser(content="Weather in Rome?")]
        first = await model.generate(messages, tools=[weather()])
        messages += [first.message, *(await execute_tools([*messages, first.message], [weather()])).messages]
        return (await model.generate(messages, tools=[weather()])).completion

    with scripted(CALL, ANSWER) as (live, engine):
        assert asyncio.run(run(f"http://127.0.0.1:{live.port}")) == ANSWER
        assert "sunny in Rome" in engine.prompt()
