"""OpenAI's Agents SDK for Python: tools, structured output and handoffs, by both of its APIs."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.scripted import call, scripted
from tests.clients.table import Client

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")

CLIENTS = (
    Client("OpenAI Agents (Python)", "openai-agents", "tools, structured output, streams, sessions, by both APIs"),
)
pytestmark = pytest.mark.slow


class Report(BaseModel):
    city: str
    sunny: bool


@pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_and_structured_output(api: str, stream: bool) -> None:
    asked: list[tuple[str, int]] = []

    @agents.function_tool
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        asked.append((city, days))
        return f"sunny in {city}"

    async def run(url: str) -> Any:
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = getattr(agents, api)(model="toy", openai_client=client)
        agent = agents.Agent(name="demo", instructions="Use tools.", model=model, tools=[weather], output_type=Report)
        session = agents.SQLiteSession("one")
        if not stream:
            return await agents.Runner.run(agent, "Weather in Rome?", session=session)
        result = agents.Runner.run_streamed(agent, "Weather in Rome?", session=session)
        assert [event async for event in result.stream_events()]
        return result

    with scripted(call("weather", '{"city": "Rome", "days": 2}'), '{"city": "Rome", "sunny": true}') as (live, engine):
        result = asyncio.run(run(f"http://127.0.0.1:{live.port}"))
        assert "sunny in Rome" in engine.prompt()
    assert asked == [("Rome", 2)]
    assert result.final_output == Report(city="Rome", sunny=True)
