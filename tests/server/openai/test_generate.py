"""/inference/v1/generate: token ids in, token ids out, as vLLM's clients have it."""

import json
from typing import Any

import pytest

from tests.support.fake_engine import ANSWER, make_tokenizer
from tests.support.live_server import Live

IDS = [*make_tokenizer().encode(ANSWER), 257]
PATH = "/inference/v1/generate"


def test_an_answer(live: Live) -> None:
    response = live.post(PATH, model="toy", token_ids=[70, 71], sampling_params={"temperature": 0}, request_id="mine")
    body = response.json()
    assert body["request_id"] == "generate-tokens-mine"
    (choice,) = body["choices"]
    assert choice == {"index": 0, "logprobs": None, "finish_reason": "stop", "token_ids": IDS}
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == len(IDS)
    (_, prompt, sampling) = live.engine.requests[-1]
    assert (prompt, sampling.temperature, sampling.max_tokens) == ([70, 71], 0, 510)
    assert "warnings" not in body


def test_several_answers_with_log_probabilities(live: Live) -> None:
    sampling = {"max_tokens": 3, "n": 2, "seed": 0, "logprobs": 1, "prompt_logprobs": 1}
    body = live.post(PATH, token_ids=[70, 71, 72], sampling_params=sampling).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [IDS[:3], IDS[1:4]]
    for choice in body["choices"]:
        names = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert names == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
        assert all(len(entry["top_logprobs"]) == 1 for entry in choice["logprobs"]["content"])
    first, *others = body["prompt_logprobs"]
    assert first is None
    assert [str(token_id) in found for token_id, found in zip([71, 72], others, strict=True)] == [True, True]


def test_a_stream(live: Live) -> None:
    body = {"token_ids": [70], "sampling_params": {"max_tokens": 5}, "stream": True}
    response = live.post(PATH, **body, stream_options={"include_usage": True})
    *events, end = response.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    *chunks, last = [json.loads(each.removeprefix("data: ")) for each in events]
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == IDS[:5]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"token_ids": []}, "token_ids", "must not be empty"),
        ({"token_ids": "Hi"}, "token_ids", ""),
        ({"token_ids": [999]}, "token_ids", "token_ids token ids must be from 0 to 258, got 999"),
        ({"token_ids": [1], "sampling_params": None}, "sampling_params", "must be an object"),
        ({"token_ids": [1], "sampling_params": {"top_p": 2}}, "sampling_params.top_p", "must be"),
        ({"token_ids": [1], "features": {"mm_hashes": {}}}, "features", "is not supported yet"),
        ({"token_ids": [1], "stream": True, "sampling_params": {"prompt_logprobs": 1}},
         "sampling_params.prompt_logprobs", "is not supported with stream=true"),
    ],
)  # fmt: skip
def test_errors(live: Live, body: dict[str, Any], param: str, message: str) -> None:
    response = live.post(PATH, **{"sampling_params": {}, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
