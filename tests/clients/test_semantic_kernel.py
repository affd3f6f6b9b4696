"""Semantic Kernel over Quire: a function that the model calls by itself; the model is scripted."""

import asyncio
from typing import Any

import openai
import pytest

from tests.clients.scripted import call, scripted
from tests.clients.table import Client

pytest.importorskip("semantic_kernel")

CLIENTS = (Client("Semantic Kernel", "semantic-kernel", "`ChatCompletionAgent`: a plugin's function and its result"),)
pytestmark = pytest.mark.slow


def test_a_plugin() -> None:
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Weather:
        @kernel_function(description="The weather of a city.")
        def look(self, city: str) -> str:
            return f"sunny in {city}"

    async def run(url: str) -> Any:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        service = OpenAIChatCompletion(ai_model_id="toy", async_client=client)
        agent = ChatCompletionAgent(service=service, name="demo", plugins=[Weather()])
        return await agent.get_response(messages="Weather in Rome?")

    with scripted(call("Weather-look", '{"city": "Rome"}'), "It is sunny.") as (live, engine):
        assert str(asyncio.run(run(f"http://127.0.0.1:{live.port}"))) == "It is sunny."
        assert "sunny in Rome" in engine.prompt()
