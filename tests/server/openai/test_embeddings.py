"""/v1/embeddings: every kind of input, both encodings, what is counted, what is refused."""

import base64
import json
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.core.params.pooling import PoolingParams
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine, embedding_of, make_tokenizer
from tests.support.live_server import Live

LAST, MEAN = PoolingParams(), PoolingParams(pooling="mean")


def embed(live: Live, **body: Any) -> httpx.Response:
    return live.post("/v1/embeddings", **body)


def vectors(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "list"
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    assert {entry["object"] for entry in body["data"]} == {"embedding"}
    return [entry["embedding"] for entry in body["data"]]


def ids(text: str) -> list[int]:
    return make_tokenizer().encode(text)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("abc", ["abc"]),
        (["abc", "d"], ["abc", "d"]),
        (["abc"], ["abc"]),
        ([70, 71, 72], [[70, 71, 72]]),
        ([[70, 71], [72]], [[70, 71], [72]]),
    ],
)
def test_input(live: Live, given: Any, prompts: list[Any]) -> None:
    token_ids = [ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    response = embed(live, input=given, model="toy")
    for found, prompt in zip(vectors(response), token_ids, strict=True):
        assert found == pytest.approx(embedding_of(prompt, LAST), abs=1e-6)
    body = response.json()
    assert body["id"].startswith("embd-")
    assert body["model"] == "toy"
    num_tokens = sum(map(len, token_ids))
    assert body["usage"] == {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": sum(min(3, len(prompt) - 1) for prompt in token_ids)},
    }
    assert "warnings" not in body


def test_options(live: Live) -> None:
    def asked(**body: Any) -> tuple[list[int], PoolingParams, int]:
        (vector,) = vectors(embed(live, input="abcdef", **body))
        prompt, pooling, priority = live.engine.embedded[-1]
        assert vector == pytest.approx(embedding_of(prompt, pooling), abs=1e-6)
        return prompt, pooling, priority

    whole = ids("abcdef")
    assert asked() == (whole, LAST, 0)
    assert asked(pooling="mean", priority=-3, user="me") == (whole, MEAN, -3)
    assert asked(dimensions=3)[1] == PoolingParams(dimensions=3)
    assert asked(normalize=False)[1] == PoolingParams(normalize=False)
    assert asked(use_activation=False)[1] == PoolingParams(normalize=False)
    assert asked(truncate_prompt_tokens=2)[0] == whole[-2:]
    assert asked(truncate_prompt_tokens=2, truncation_side="right")[0] == whole[:2]
    assert asked(truncate_prompt_tokens=-1)[0] == whole
    assert asked(cache_salt="pepper")
    assert live.engine.salts[-1] == "pepper"
    live.engine.default_pooling = "mean"
    assert asked()[1] == MEAN
    assert len(vectors(embed(live, input="x" * 2000, truncate_prompt_tokens=-1))) == 1
    assert len(live.engine.embedded[-1][0]) == 512, "an embedding needs no room in the context"


def test_base64(live: Live) -> None:
    (packed,) = vectors(embed(live, input="abc", encoding_format="base64"))
    assert array("f", base64.b64decode(packed)).tolist() == pytest.approx(embedding_of(ids("abc"), LAST), abs=1e-6)  # type: ignore


def test_conversation(live: Live) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    embed(live, messages=turns).raise_for_status()
    tokenizer = live.engine.tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(live.engine.embedded[-1][0], False) == "<|im_start|>user\nHi<|im_end|>\n"
    embed(live, messages=turns, add_generation_prompt=True).raise_for_status()
    assert tokenizer.decode(live.engine.embedded[-1][0], False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({}, 400, "input", "is required"),
        ({"input": ""}, 400, "input", "must not be empty"),
        ({"input": []}, 400, "input", "must not be empty"),
        ({"input": ["a", ""]}, 400, "input", "must not be empty"),
        ({"input": [[1], []]}, 400, "input", "must not be empty"),
        ({"input": {"a": 1}}, 400, "input", "must be a string, a list of strings"),
        ({"input": [1, 999]}, 400, "input", "input token ids must be from 0 to 258, got 999"),
        ({"input": "x" * 513}, 400, "input", "maximum context length is 512 tokens. However, your prompt has 513"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "input", "must be omitted"),
        ({"input": "a", "model": "other"}, 404, "model", "does not exist"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "must be at least 1, got 0"),
        ({"input": "a", "dimensions": 9}, 400, "dimensions", "must be at most 8, the model's own, got 9"),
        ({"input": "a", "encoding_format": "bytes"}, 400, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "max"}, 400, "pooling", "'last', 'mean' or 'cls'"),
        ({"input": "a", "embed_dtype": "float16"}, 400, "embed_dtype", "not supported yet"),
        ({"input": "a", "normalize": True, "use_activation": False}, 400, "use_activation", "must have the same value"),
        ({"input": "a", "priority": 2**64}, 400, "priority", "less than or equal"),
        ({"input": "a", "truncate_prompt_tokens": 0}, 400, "input", "is empty"),
    ],
)
def test_refused(live: Live, body: dict[str, Any], status: int, param: str, message: str) -> None:
    error = embed(live, **body).json()["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert message in error["message"]
    assert not live.engine.active


def test_what_is_ignored_is_said(live: Live, serve: Callable[..., Live]) -> None:
    response = embed(live, input="a", colour="red")
    assert response.json()["warnings"] == ["colour: is not a field of this request; ignored"]
    assert json.loads(response.headers["x-quire-warnings"]) == response.json()["warnings"]
    strict = serve(FakeEngine(), ServerConfig(strict=True))
    assert embed(strict, input="a", colour="red").json()["error"]["param"] == "colour"


def test_failures(live: Live) -> None:
    live.engine.fail_after = 0
    assert embed(live, input=["a", "b"]).status_code == 500
    live.wait_idle()
    live.engine.states.enter("dead")
    assert embed(live, input="a").status_code == 503


def test_what_is_counted(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine())
    vectors(embed(live, input=["abcdef", "gh"]))
    lines = dict(line.rsplit(" ", 1) for line in live.http.get("/metrics").text.splitlines() if line[0] != "#")
    labels = '{engine="0",model_name="toy"}'
    assert float(lines["vllm:prompt_tokens_total" + labels]) == 8
    assert float(lines["vllm:prompt_tokens_cached_total" + labels]) == 3 + 1
    assert float(lines['vllm:request_success_total{engine="0",finished_reason="stop",model_name="toy"}']) == 2
    for name in ("request_prompt_tokens", "e2e_request_latency_seconds", "request_prefill_time_seconds"):
        assert float(lines[f"vllm:{name}_count{labels}"]) == 2, name
    for name in (
        "time_to_first_token_seconds",
        "request_generation_tokens",
        "request_decode_time_seconds",
        "request_params_max_tokens",
        "request_params_n",
    ):
        assert float(lines[f"vllm:{name}_count{labels}"]) == 0, name


def test_a_model_that_only_embeds(live: Live) -> None:
    live.engine.generates = False
    assert len(vectors(embed(live, input="a"))) == 1
    for response in (live.chat(), live.complete()):
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (400, "model")
        assert "Use /v1/embeddings" in error["message"]


def test_abort_and_leaving(live: Live) -> None:
    live.engine.holds = True
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(embed, live, input=["a", "b"], request_id="mine")
        while len(live.engine.active) < 2:
            time.sleep(0.005)
        assert live.http.get("/load").json()["server_load"] == 1
        assert live.post("/v1/requests/embd-mine/abort").json() == {"id": "embd-mine", "aborted": True}
        assert waiting.result().status_code == 409
        assert "aborted" in waiting.result().json()["error"]["message"]
    live.wait_idle()
    with pytest.raises(httpx.ReadTimeout):
        live.http.post("/v1/embeddings", json={"input": ["a"] * 20}, timeout=httpx.Timeout(60, read=0.2))
    live.wait_idle()
    assert live.http.get("/load").json()["server_load"] == 0


def test_without_a_tokenizer(serve: Callable[..., Live]) -> None:
    engine = FakeEngine()
    engine.tokenizer = None
    live = serve(engine)
    assert len(vectors(embed(live, input=[70, 71]))) == 1
    assert "skip-tokenizer-init" in embed(live, input="a").json()["error"]["message"]
