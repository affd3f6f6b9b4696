"""Every parameter of a request, from HTTP down to the sampler of a real model: what it does can be seen in the
answer.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.apis.openai.completions.protocol import NOT_YET_IN_COMPLETIONS, CompletionRequest
from server.apis.openai.fields import NO_EFFECT, NOT_YET_IN_BOTH
from tests.support.served import blocks_in_use, metric, serve

PATHS = {
    "/v1/completions": {"prompt": "Hello world"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}
END = 257
LETTERS = list(range(64, 90))  # of the byte-level vocabulary: one character each
GREEDY = {"temperature": 0}
HOT = {"temperature": 2, "seed": 1}
ENDING = {"logit_bias": {str(END): 100}, **GREEDY}
LETTERS_ONLY = {"allowed_token_ids": LETTERS, **GREEDY}
TWO_LETTERS = {"allowed_token_ids": LETTERS[:2], **GREEDY}
DRY = {**TWO_LETTERS, "dry_multiplier": 2}
XTC = {"temperature": 1, "seed": 1, "xtc_probability": 1, "xtc_threshold": 0}


@dataclass
class Answer:
    body: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        return self.body["choices"][0]

    @property
    def token_ids(self) -> list[int]:
        return self.choice["token_ids"]

    @property
    def text(self) -> str:
        return self.choice["text"] if "text" in self.choice else self.choice["message"]["content"]


Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def url(tiny_model: Path, quick_quire: list[str]) -> Iterator[str]:
    with serve(tiny_model, "--dtype", "float32", "--max-model-len", "2048", quire=quick_quire) as url:
        yield url
        assert blocks_in_use(url) == 0


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture(params=PATHS)
def ask(http: httpx.Client, request: pytest.FixtureRequest) -> Ask:
    def ask(**fields: Any) -> Answer:
        response = http.post(
            request.param,
            json={**PATHS[request.param], "max_tokens": 40, "return_token_ids": True, **fields},  # type: ignore[dict-item]
        )
        assert response.status_code == 200, response.text
        return Answer(response.json())

    return ask


def is_greedy(on: Answer, off: Answer, ask: Ask) -> bool:
    greedy = ask(temperature=0, top_k=0, top_p=1).token_ids
    return on.token_ids == greedy != off.token_ids


def repeats_less(on: Answer, off: Answer, ask: Ask) -> bool:
    return len(set(on.token_ids)) > len(set(off.token_ids))


def differs(on: Answer, off: Answer, ask: Ask) -> bool:
    return on.token_ids != off.token_ids


# What is asked in both cases, what is asked in one of them (of the other's answer), and what that does.
Row = tuple[dict[str, Any], Callable[[Answer], dict[str, Any]], Callable[[Answer, Answer, Ask], bool]]
ROWS: list[Row] = [
    (HOT, lambda _: GREEDY, is_greedy),
    (HOT, lambda _: {"top_k": 1}, is_greedy),
    (HOT, lambda _: {"top_p": 1e-6}, is_greedy),
    (HOT, lambda _: {"min_p": 1}, is_greedy),
    (HOT, lambda _: {"top_n_sigma": 1e-6}, is_greedy),
    (
        {**HOT, "n": 2},
        lambda _: {"typical_p": 1e-6},
        lambda on, off, _: on.token_ids == on.body["choices"][1]["token_ids"] and off.token_ids != on.token_ids,
    ),
    (
        {"temperature": 1},
        lambda _: {"seed": 9},
        lambda on, off, ask: on.token_ids == ask(temperature=1, seed=9).token_ids != off.token_ids,
    ),
    (GREEDY, lambda _: {"n": 3}, lambda on, off, _: (len(on.body["choices"]), len(off.body["choices"])) == (3, 1)),
    (
        GREEDY,
        lambda _: {"max_tokens": 3},
        lambda on, off, _: on.token_ids == off.token_ids[:3] and on.choice["finish_reason"] == "length",
    ),
    (ENDING, lambda _: {"min_tokens": 6}, lambda on, off, _: (len(on.token_ids), len(off.token_ids)) == (7, 1)),
    (
        ENDING,
        lambda _: {"ignore_eos": True},
        lambda on, off, _: (len(on.token_ids), off.token_ids, off.choice["finish_reason"]) == (40, [END], "stop"),
    ),
    (
        {**ENDING, "ignore_eos": True},
        lambda _: {"skip_special_tokens": False},
        lambda on, off, _: (on.text, off.text) == ("<|end|>" * 40, ""),
    ),
    (
        LETTERS_ONLY,
        lambda off: {"stop": ["none", off.text[6:9]]},
        lambda on, off, _: (
            on.text == off.text[: off.text.index(off.text[6:9])] and on.choice["stop_reason"] == off.text[6:9]
        ),
    ),
    (
        LETTERS_ONLY,
        lambda off: {"stop": off.text[6:9], "include_stop_str_in_output": True},
        lambda on, off, _: on.text == off.text[: off.text.index(off.text[6:9]) + 3],
    ),
    (
        LETTERS_ONLY,
        lambda off: {"stop_token_ids": [off.token_ids[5]]},
        lambda on, off, _: (
            on.token_ids == off.token_ids[: off.token_ids.index(off.token_ids[5]) + 1]
            and on.choice["stop_reason"] == off.token_ids[5]
        ),
    ),
    (LETTERS_ONLY, lambda _: {"presence_penalty": 2}, repeats_less),
    (LETTERS_ONLY, lambda _: {"frequency_penalty": 2}, repeats_less),
    (LETTERS_ONLY, lambda _: {"repetition_penalty": 3}, repeats_less),
    (GREEDY, lambda _: {"logit_bias": {"70": 100}}, lambda on, off, _: set(on.token_ids) == {70} != set(off.token_ids)),
    (GREEDY, lambda _: {"allowed_token_ids": [5, 70]}, lambda on, off, _: set(on.token_ids) <= {5, 70}),
    (
        LETTERS_ONLY,
        lambda off: {"bad_words": [off.text[0], off.text[1:3]]},
        lambda on, off, _: off.text[0] not in on.text and off.text[1:3] not in on.text,
    ),
    (TWO_LETTERS, lambda _: {"dry_multiplier": 2}, differs),
    (DRY, lambda _: {"dry_base": 50}, differs),
    (
        DRY,
        lambda _: {"dry_allowed_length": 1000},
        lambda on, off, ask: on.token_ids == ask(**TWO_LETTERS).token_ids != off.token_ids,
    ),
    (
        DRY,
        lambda _: {"dry_sequence_breakers": LETTERS[:2]},
        lambda on, off, ask: on.token_ids == ask(**TWO_LETTERS).token_ids != off.token_ids,
    ),
    (
        {**XTC, "xtc_threshold": 0.9},
        lambda _: {"xtc_threshold": 0},
        lambda on, off, ask: off.token_ids == ask(temperature=1, seed=1).token_ids != on.token_ids,
    ),
    (
        {**XTC, "xtc_probability": 0},
        lambda _: {"xtc_probability": 1},
        lambda on, off, ask: off.token_ids == ask(temperature=1, seed=1).token_ids != on.token_ids,
    ),
]


@pytest.mark.parametrize(("common", "one", "effect"), ROWS)
def test_parameters_do_what_they_say(ask: Ask, common: dict[str, Any], one: Any, effect: Any) -> None:
    off = ask(**common)
    fields = one(off)
    on = ask(**{**common, **fields})
    assert effect(on, off, ask), (fields, on.token_ids, off.token_ids)


# Parameters of the prompt and of the answer's form, and what they do to it.
FORMS: list[tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = [
    ({"truncate_prompt_tokens": 4}, lambda body: body["usage"]["prompt_tokens"] == 4),
    (
        {"logprobs": True, "logprob_token_ids": [65, 66], "return_tokens_as_token_ids": True},
        lambda body: all(f'"token_id:{i}"' in json.dumps(find(body, "logprobs")) for i in (65, 66)),
    ),
    ({"prompt_logprobs": 1}, lambda body: len(find(body, "prompt_logprobs")) == body["usage"]["prompt_tokens"]),
    ({"return_token_ids": True}, lambda body: len(find(body, "prompt_token_ids")) == body["usage"]["prompt_tokens"]),
    ({"request_id": "mine"}, lambda body: body["id"].endswith("-mine")),
    ({"model": "no such"}, lambda body: body["error"]["code"] == 404),
    ({"priority": -5}, lambda body: not body.get("warnings")),
    ({"use_beam_search": True, "n": 2, "length_penalty": 0.5}, lambda body: len(body["choices"]) == 2),
]


def find(body: dict[str, Any], name: str) -> Any:
    """A field of the response, or of its first choice."""
    return body[name] if name in body else body["choices"][0][name]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "holds"), FORMS)
def test_forms(http: httpx.Client, path: str, fields: dict[str, Any], holds: Callable[[dict[str, Any]], bool]) -> None:
    if fields.get("logprobs") and path == "/v1/completions":
        fields = {**fields, "logprobs": 0}  # their number
    body = http.post(path, json={**PATHS[path], "max_tokens": 2, **fields}).json()  # type: ignore[dict-item]
    assert holds(body), body


@pytest.mark.parametrize("path", PATHS)
def test_cache_salt_keeps_prompts_apart(http: httpx.Client, path: str) -> None:
    long = {"prompt": "salt" * 20, "messages": [{"role": "user", "content": "salt" * 20}]}
    ask = {name: long[name] for name in PATHS[path]} | {"max_tokens": 1}  # type: ignore[attr-defined]
    cached = [
        http.post(path, json=ask | salt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ({}, {}, {"cache_salt": path}, {"cache_salt": path})
    ]
    assert [tokens > 0 for tokens in cached] == [False, True, False, True]


def test_every_parameter_is_tried() -> None:
    tried = {name for _, one, _ in ROWS for name in one(ANY)} | {name for fields, _ in FORMS for name in fields}
    tried |= {"prompt", "echo", "logprobs", "return_tokens_as_token_ids"}  # in test_scores.py
    tried |= {"stream", "stream_options", "add_special_tokens", "cache_salt"}
    tried |= {"user", "safety_identifier"}  # in generation/test_owners.py
    tried |= {"timeout_ms"}  # in generation/test_deadlines.py
    tried |= {"truncation_side", "thinking_token_budget"}  # in test_fields.py
    grammars = {
        name for name in CompletionRequest.model_fields if name.startswith(("guided_", "structured_", "response_"))
    }
    without = NO_EFFECT.keys() | NOT_YET_IN_BOTH.keys() | NOT_YET_IN_COMPLETIONS.keys()
    assert CompletionRequest.model_fields.keys() - without - grammars <= tried


ANY = Answer({"choices": [{"text": "abcdefghijkl", "token_ids": LETTERS}]})


def test_answers_share_their_prompt(http: httpx.Client, url: str) -> None:
    """Eight answers to a prompt of 1,000 tokens compute and hold its full blocks once."""
    before = computed(url)
    prompt = [(i * i + 3 * i) % 250 for i in range(1000)]
    body = {"prompt": prompt, "n": 8, "max_tokens": 100, "ignore_eos": True, "seed": 1, "stream": True}
    begun: set[int] = set()
    used: list[int] = []
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                begun |= {choice["index"] for choice in json.loads(line[6:])["choices"]}
            if len(begun) == 8 and not used:
                load = httpx.get(f"{url}/load", timeout=60).json()
                used.append(load["num_blocks"] - load["num_free_blocks"])
    whole, rest = divmod(1000, 16)
    assert computed(url) - before == 1000 + 7 * rest
    assert used[0] <= whole + 8 * (1 + 100 // 16 + 1)
    usage = http.post("/v1/completions", json={**body, "stream": False, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == 1000
    assert usage["prompt_tokens_details"]["cached_tokens"] == whole * 16


def computed(url: str) -> int:
    """Tokens of prompts that were computed, not found in the cache."""
    found = metric(url, "vllm:prompt_tokens_total") - metric(url, "vllm:prompt_tokens_cached_total")
    return round(found)
