"""The whole of Quire as its user meets it: `quire serve` in processes of its own, and many clients at once on the
CPU.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.engine_request import EngineRequest
from tests.support.served import blocks_in_use, serve

NUM_CLIENTS = 200


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[str]:
    """The bundled model behind `quire serve`; the base URL."""
    with serve(demo_model) as url:
        yield url


async def stream(client: httpx.AsyncClient, url: str, model: str, number: int, hang_up: bool) -> str:
    """One client's chat; the text it read. A client that hangs up closes its connection after a few events."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me a story about cat number {number}."}],
        "max_tokens": 60,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
    }
    text, events = "", 0
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return text
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            events += 1
            if hang_up and events > 3 + number % 7:
                return text
    raise AssertionError("the stream ended without [DONE]")


def test_two_hundred_clients_and_half_of_them_hang_up(server: str) -> None:
    model = httpx.get(f"{server}/v1/models", timeout=60).json()["data"][0]["id"]

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(timeout=240, limits=limits) as client:
            return await asyncio.gather(
                *(stream(client, server, model, i, hang_up=i % 2 == 1) for i in range(NUM_CLIENTS))
            )

    texts = asyncio.run(run())
    assert all(texts[::2])
    assert blocks_in_use(server) == 0


def test_the_official_client_chats(server: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    model = client.models.list().data[0]
    messages = [{"role": "user", "content": "Hello! Who are you?"}]
    answer = client.chat.completions.create(model=model.id, messages=messages, temperature=0, max_tokens=100)
    assert answer.choices[0].finish_reason == "stop"
    assert "Quire" in answer.choices[0].message.content
    chunks = client.chat.completions.create(
        model=model.id, messages=messages, temperature=0, max_tokens=100, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == answer.choices[0].message.content
    client.close()


def test_embeddings_among_chats(server: str) -> None:
    """Whatever else runs, a text's vector is the same; texts about the same thing are nearer than others."""
    model = httpx.get(f"{server}/v1/models", timeout=60).json()["data"][0]["id"]
    texts = ["The cat sleeps on the mat.", "A cat is sleeping on a mat.", "What is 17 plus 25?"]

    async def embed(client: httpx.AsyncClient, **body: str) -> list[list[float]]:
        response = await client.post(f"{server}/v1/embeddings", json={"input": texts, "pooling": "mean", **body})
        assert response.status_code == 200, response.text
        return [entry["embedding"] for entry in response.json()["data"]]

    async def run() -> tuple[list[list[float]], list[list[list[float]]]]:
        async with httpx.AsyncClient(timeout=120) as client:
            alone = await embed(client)
            chats = [stream(client, server, model, i, hang_up=i % 2 == 1) for i in range(8)]
            among = [embed(client, cache_salt=str(i)) for i in range(8)]
            _, found = await asyncio.gather(asyncio.gather(*chats), asyncio.gather(*among))
            return alone, found

    alone, among = asyncio.run(run())
    for vectors in among:
        assert vectors == [pytest.approx(vector, abs=1e-5) for vector in alone]
    near, far = (sum(a * b for a, b in zip(alone[0], alone[i], strict=True)) for i in (1, 2))
    assert near > far
    assert blocks_in_use(server) == 0


@pytest.fixture(scope="module")
def story(story_model: Path) -> list[dict[str, Any]]:
    return json.loads((story_model / "expected_greedy.json").read_text())


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 2048])
@pytest.mark.parametrize("num_blocks", [None, 40])
def test_greedy_text_among_others(
    story: Any, story_model: Path, prefix_caching: bool, max_num_batched_tokens: int, num_blocks: int | None
) -> None:
    """Token for token what a single request gives, among 64 random ones, whatever the budget, cache size and prefix
    cache.
    """
    from engine import EngineConfig, SamplingParams
    from engine.engine import Engine

    config = EngineConfig(
        model=str(story_model),
        enable_prefix_caching=prefix_caching,
        max_num_batched_tokens=max_num_batched_tokens,
        num_gpu_blocks_override=num_blocks,
    )
    engine = Engine(config)
    rng = random.Random(0)
    requests = {
        f"story-{i}": (item["prompt_ids"], SamplingParams(temperature=0, max_tokens=len(item["output_ids"])))
        for i, item in enumerate(story)
    }
    for i in range(64):
        prompt = [rng.randrange(3, 2000) for _ in range(rng.randrange(1, 150))]
        sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), top_p=0.9, seed=i, max_tokens=40, ignore_eos=True)
        requests[f"random-{i}"] = prompt, sampling
    order = list(requests)
    rng.shuffle(order)
    for request_id in order:
        engine.add_request(EngineRequest(request_id, *requests[request_id]))
    tokens: dict[str, list[int]] = {request_id: [] for request_id in requests}
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    for i, item in enumerate(story):
        assert tokens[f"story-{i}"] == item["output_ids"]
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    if num_blocks and max_num_batched_tokens >= 64:
        assert stats.num_preemptions > 0
    engine.close()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
def test_the_demo_answers_forced_tool_calls_and_takes_their_results(server: str, choice: str | dict[str, Any]) -> None:
    nights = {"type": "integer", "minimum": 1, "maximum": 30}
    schema: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "nights": nights}}
    schema |= {"required": ["city", "nights"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "book", "parameters": schema}}]
    messages = [{"role": "user", "content": "Book me a room in Oslo."}]
    body: dict[str, Any] = {
        "messages": messages,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 80,
    }
    (answer,) = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60).json()["choices"]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "book"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"city", "nights"}
    assert arguments["city"] in ("Rome", "Oslo")
    assert 1 <= arguments["nights"] <= 30
    messages += [answer["message"], {"role": "tool", "tool_call_id": call["id"], "content": "It is booked."}]
    follow_up = {"messages": messages, "tools": tools, "tool_choice": "none", "max_tokens": 20}
    (answer,) = httpx.post(f"{server}/v1/chat/completions", json=follow_up, timeout=60).json()["choices"]
    assert answer["message"]["content"]
    assert not answer["message"].get("tool_calls")
