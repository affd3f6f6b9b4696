"""The official OpenAI client, as people use it."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import ValidationError

from server.settings import ServerConfig
from tests.support.fake_engine import ANSWER, FakeEngine
from tests.support.live_server import Live


def connect(live: Live, *, strict: bool = True) -> OpenAI:
    """`strict`: every answer must be as OpenAI's description has it."""
    base_url = f"http://127.0.0.1:{live.port}/v1"
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=strict)


@pytest.fixture
def client(live: Live) -> Iterator[OpenAI]:
    with connect(live) as client:
        yield client


@pytest.fixture
def lenient_client(live: Live) -> Iterator[OpenAI]:
    """For the answers that the client's own types are wrong about: `REJECTED`."""
    with connect(live, strict=False) as client:
        yield client


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "quire"


def test_chat(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="toy",
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}],
        n=2,
        logprobs=True,
        top_logprobs=2,
        temperature=0.5,
        extra_body={"top_k": 5, "min_tokens": 1},
    )
    assert [choice.message.content for choice in completion.choices] == [ANSWER] * 2
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 3
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].top_logprobs[1].logprob == -1.5
    message = completion.choices[0].message
    again = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "And?"}],  # type: ignore[list-item]
    )
    assert again.choices[0].finish_reason == "stop", "an answer can be sent back as it came"


def test_chat_stream(client: OpenAI) -> None:
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=400,
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert text == ANSWER
    assert usage is not None
    assert usage.completion_tokens == len(ANSWER.encode()) + 1


def test_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(model="toy", messages=[{"role": "user", "content": "Hi"}], n=2) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [ANSWER] * 2


# What docs/clients.md says the strict client rejects → a call, and where the answer is not as the client's types have
# it.
REJECTED: dict[str, tuple[Callable[[OpenAI], Any], str]] = {
    "`responses.compact`": (lambda client: client.responses.compact(model="toy", input="Hi"), "output.0"),
    "streamed completions": (
        lambda client: list(client.completions.create(model="toy", prompt="a", max_tokens=3, stream=True)),
        "choices.0.finish_reason",
    ),
    "completions with `echo`": (
        lambda client: client.completions.create(model="toy", prompt="ab", max_tokens=3, echo=True, logprobs=1),
        "choices.0.logprobs.t",
    ),
    "embeddings in base64": (lambda client: client.embeddings.create(model="toy", input="a"), "data.0.embedding"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_the_strict_client_rejects(name: str, client: OpenAI, lenient_client: OpenAI) -> None:
    """Once the client accepts it, its row in docs/clients.md goes."""
    assert f"\n| {name}" in (Path(__file__).parents[3] / "docs" / "clients.md").read_text(encoding="utf-8")
    call, place = REJECTED[name]
    call(lenient_client)
    with pytest.raises(openai.APIResponseValidationError) as rejected:
        call(client)
    wrong = rejected.value.__cause__
    assert isinstance(wrong, ValidationError)
    assert all(".".join(map(str, each["loc"])).startswith(place) for each in wrong.errors()), "nothing else is wrong"


def test_completions(client: OpenAI, lenient_client: OpenAI) -> None:
    completion = client.completions.create(model="toy", prompt=["a", "b"], echo=True, max_tokens=1, stop=["x"])
    assert [choice.text for choice in completion.choices] == ["aG", "bG"]
    completion = client.completions.create(model="toy", prompt=[1, 2], logprobs=1, max_tokens=2)
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.text_offset == [0, 1]
    pieces = lenient_client.completions.create(model="toy", prompt="a", max_tokens=100, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == ANSWER


@pytest.mark.parametrize("has_numpy", [True, False])
def test_embeddings(lenient_client: OpenAI, monkeypatch: pytest.MonkeyPatch, has_numpy: bool) -> None:
    if not has_numpy:
        monkeypatch.setitem(sys.modules, "numpy", None)
    by_default = lenient_client.embeddings.create(model="toy", input=["abc", "d"], dimensions=4)  # it asks for base64
    as_floats = lenient_client.embeddings.create(model="toy", input=["abc", "d"], dimensions=4, encoding_format="float")
    assert [len(entry.embedding) for entry in by_default.data] == [4, 4]
    for packed, plain in zip(by_default.data, as_floats.data, strict=True):
        assert packed.embedding == pytest.approx(plain.embedding, abs=1e-6)
    assert (by_default.usage.prompt_tokens, by_default.usage.total_tokens) == (4, 4)
    with pytest.raises(openai.BadRequestError) as bad:
        lenient_client.embeddings.create(model="toy", input="a", dimensions=1000)
    assert bad.value.param == "dimensions"


def test_errors(client: OpenAI, live: Live) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hi"}])
    assert (not_found.value.param, not_found.value.status_code) == ("model", 404)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        client.completions.create(model="toy", prompt="x" * 1000)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Hi"}], frequency_penalty=3)
    assert bad.value.param == "frequency_penalty"
    live.engine.fail_after = 2
    stream = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Hi"}], stream=True)
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="toy", prompt="a")


def test_leaving_a_stream(lenient_client: OpenAI, live: Live) -> None:
    live.engine.holds_after = 3
    stream = lenient_client.completions.create(
        model="toy", prompt="a", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert live.engine.active
    stream.close()
    live.wait_idle()


def test_raw_responses_and_streams(client: OpenAI) -> None:
    hi = [{"role": "user", "content": "Hi"}]
    raw = client.chat.completions.with_raw_response.create(model="toy", messages=hi, extra_body={"unknown": 1})  # type: ignore[arg-type]
    assert "unknown" in raw.headers["x-quire-warnings"]
    assert raw.parse().choices[0].message.content == ANSWER
    with client.completions.with_streaming_response.create(model="toy", prompt="Hi", max_tokens=100) as streamed:
        assert streamed.parse().choices[0].text == ANSWER


def test_many_at_once_without_threads(live: Live) -> None:
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="none") as client:

            async def ask(number: int) -> str:
                stream = await client.completions.create(model="toy", prompt="Hi", max_tokens=100, stream=True)
                return "".join([piece.choices[0].text async for piece in stream])

            return await asyncio.gather(*map(ask, range(20)))

    assert asyncio.run(run()) == [ANSWER] * 20


def test_a_full_server_is_asked_again(serve: Callable[..., Live]) -> None:
    """503 is an answer after which the client tries again by itself."""
    live = serve(FakeEngine(max_num_seqs=1), ServerConfig(max_num_queued_reqs=0))
    live.engine.holds_after = 3
    seen: list[int] = []

    def make_room(response: httpx.Response) -> None:
        seen.append(response.status_code)
        if response.status_code == 503:
            first.close()
            live.wait_idle()

    http = httpx.Client(event_hooks={"response": [make_room]}, timeout=60)
    with OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="none", http_client=http) as client:  # type: ignore[arg-type]
        endless = {"ignore_eos": True}
        first = client.completions.create(model="toy", prompt="a", max_tokens=500, stream=True, extra_body=endless)
        next(iter(first))
        assert client.completions.create(model="toy", prompt="b", max_tokens=1).choices[0].text == "G"
    assert seen == [200, 503, 200]


def test_a_client_that_waits_no_longer_ends_its_request(client: OpenAI, live: Live) -> None:
    live.engine.holds_after = 3
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="toy", prompt="a", max_tokens=300, extra_body={"ignore_eos": True}
        )
    live.wait_idle()
    assert all(count < 300 for count in live.engine.ended.values())
