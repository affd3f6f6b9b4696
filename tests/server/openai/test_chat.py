"""/v1/chat/completions and /v1/completions, whole answers: shapes, sampling parameters, logprobs, samples,
templates.
"""

from collections.abc import Callable
from typing import Any

import pytest

from server.settings import ServerConfig
from tests.support.fake_engine import ANSWER, FakeEngine
from tests.support.live_server import Live

TIMINGS = {
    "queue_time_ms",
    "prefill_time_ms",
    "time_to_first_token_ms",
    "generation_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
}


def test_chat_answer(live: Live) -> None:
    response = live.chat("Hi", model="toy")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("metrics").keys() == TIMINGS
    num_prompt, num_answer = len("_user\nHi_\n_assistant\n"), len(ANSWER.encode()) + 1
    assert body == {
        "object": "chat.completion",
        "model": "toy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER, "refusal": None, "reasoning": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    assert live.prompt_text() == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_completion_answer(live: Live) -> None:
    body = live.complete("Hi", max_tokens=100).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None,
         "prompt_logprobs": None, "prompt_token_ids": None}
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 2


def test_defaults_of_length(live: Live) -> None:
    assert live.complete().json()["choices"][0]["finish_reason"] == "length"
    assert live.engine.requests[-1][2].max_tokens == 16
    live.chat()
    _, prompt, sampling = live.engine.requests[-1]
    assert sampling.max_tokens == 512 - len(prompt)
    live.chat(max_tokens=10_000, max_completion_tokens=9000)
    assert live.engine.requests[-1][2].max_tokens == 512 - len(prompt)
    live.chat(max_tokens=9, max_completion_tokens=7)
    assert live.engine.requests[-1][2].max_tokens == 7
    live.engine.default_sampling = {"max_tokens": 5, "temperature": 0.25, "top_k": 9}
    live.complete()
    assert (live.engine.requests[-1][2].max_tokens, live.engine.requests[-1][2].temperature) == (5, 0.25)
    live.complete(temperature=0.75, top_k=-1)
    assert (live.engine.requests[-1][2].temperature, live.engine.requests[-1][2].top_k) == (0.75, -1)


def test_every_sampling_field_arrives(live: Live) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 20,
        "min_p": 0.125,
        "seed": 7,
        "min_tokens": 2,
        "max_tokens": 30,
        "stop": ["x", "yy"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "allowed_token_ids": [5, 6],
        "typical_p": 0.5,
        "top_n_sigma": 1.5,
        "xtc_threshold": 0.25,
        "xtc_probability": 0.5,
    }
    for send in (live.chat, live.complete):
        assert send(**fields).status_code == 200
        sampling = live.engine.requests[-1][2]
        assert {name: getattr(sampling, name) for name in fields} == fields
    assert live.chat(stop="x", temperature=1).status_code == 200
    dry: dict[str, Any] = {
        "dry_multiplier": 0.75,
        "dry_base": 2,
        "dry_allowed_length": 3,
        "dry_sequence_breakers": ["x", 7],
    }
    assert live.chat(logit_bias={"5": -100, "6": 1.5}, bad_words=["ab"], **dry, cache_salt="me").status_code == 200
    sampling = live.engine.requests[-1][2]
    assert sampling.logit_bias == {5: -100, 6: 1.5}
    assert sampling.bad_words == [[64, 65], [220, 64, 65]]
    assert (sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length) == (0.75, 2, 3)
    assert live.engine.salts[-1] == "me"


def test_null_means_the_default(live: Live) -> None:
    fields = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "max_tokens",
        "tools",
    ]
    more = ["tool_choice", "response_format", "logit_bias", "presence_penalty", "user", "metadata", "model"]
    nothing: dict[str, Any] = dict.fromkeys(fields + more)
    response = live.chat(**nothing)
    assert response.status_code == 200, response.text
    response = live.complete(**dict.fromkeys([*fields[:-1], "echo", "suffix", "best_of", "logit_bias"]))
    assert response.status_code == 200, response.text


def test_fields_that_change_nothing_are_fine(live: Live) -> None:
    neutral: dict[str, Any] = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
    }
    assert live.chat(**neutral, response_format={"type": "text"}, tool_choice="none", tools=[]).status_code == 200
    assert live.complete(**neutral, best_of=1, suffix="").status_code == 200


def test_stop_strings_and_tokens(live: Live) -> None:
    choice = live.chat(stop=["plus", "von"]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        "Grüße! Ein 👋 ",
        "stop",
        "von",
    )
    choice = live.complete(max_tokens=99, stop="ß", include_stop_str_in_output=True).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("Grüß", "ß")
    body = live.complete(max_tokens=99, stop="ü").json()
    assert body["usage"]["completion_tokens"] == len("Grü".encode()), "what comes after a stop string is not counted"
    assert live.engine.tokenizer is not None
    (full_stop,) = live.engine.tokenizer.encode(".")
    choice = live.complete(max_tokens=99, stop_token_ids=[full_stop]).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("Grüße! Ein 👋 von mir", full_stop)


def test_samples(live: Live) -> None:
    body = live.chat(n=3, seed=1, max_tokens=4).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == ["rüe"[:2] + "\ufffd", "üß", "\ufffdße"], "each sample with the seed of its own"
    assert {sampling.seed for _, _, sampling in live.engine.requests} == {1, 2, 3}
    assert len({request_id for request_id, _, _ in live.engine.requests}) == 3
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == len(live.engine.requests[0][1])
    assert live.chat(n=2).json()["choices"][1]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("abc", [3]), (["a", "bc"], [1, 2]), ([65, 66], [2]), ([[65], [66, 67, 68]], [1, 3]), ("<|im_end|>", [1])],
)
def test_prompts(live: Live, prompt: Any, lengths: list[int]) -> None:
    body = live.complete(prompt, n=2, echo=True, max_tokens=6).json()
    assert len(body["choices"]) == 2 * len(lengths)
    assert body["usage"]["prompt_tokens"] == sum(lengths)
    assert [len(tokens) for _, tokens, _ in live.engine.requests] == [length for length in lengths for _ in "ab"]
    assert all(choice["text"].endswith("Grüß") for choice in body["choices"])
    if isinstance(prompt, str):
        assert body["choices"][0]["text"] == prompt + "Grüß"
    if prompt == ["a", "bc"]:
        assert [choice["text"] for choice in body["choices"]] == ["aGrüß", "aGrüß", "bcGrüß", "bcGrüß"]
    if prompt == [65, 66]:
        assert live.engine.tokenizer is not None
        assert body["choices"][0]["text"] == live.engine.tokenizer.decode([65, 66]) + "Grüß"


def test_chat_logprobs(live: Live) -> None:
    content = live.chat(logprobs=True, top_logprobs=3, max_tokens=4).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["G", "r", "\ufffd", "\ufffd"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == "Grü".encode()
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5, -9999.0]
    assert content[0]["top_logprobs"][0] == {"token": "G", "logprob": -0.5, "bytes": [71]}
    content = live.chat(logprobs=True, max_tokens=1).json()["choices"][0]["logprobs"]["content"]
    assert content == [{"token": "G", "logprob": -0.5, "bytes": [71], "top_logprobs": []}]


def test_completion_logprobs(live: Live) -> None:
    logprobs = live.complete(logprobs=2, max_tokens=6).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc", "bytes:\\xc3", "bytes:\\x9f"]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 3]
    assert logprobs["token_logprobs"] == [-0.5] * 6
    assert live.engine.tokenizer is not None
    assert logprobs["top_logprobs"][0] == {"G": -0.5, live.engine.tokenizer.token_text(65): -1.5}
    logprobs = live.complete(logprobs=0, max_tokens=1).json()["choices"][0]["logprobs"]
    assert logprobs == {"tokens": ["G"], "token_logprobs": [-0.5], "top_logprobs": [{"G": -0.5}], "text_offset": [0]}


def test_scores_of_prompts(live: Live) -> None:
    body = live.chat("Hi", prompt_logprobs=1, max_tokens=2, n=2).json()
    prompt = live.engine.requests[0][1]
    scores = body["prompt_logprobs"]
    assert len(scores) == len(prompt)
    assert scores[0] is None
    assert live.engine.tokenizer is not None
    text = live.engine.tokenizer.token_text(prompt[2])
    assert scores[2][str(prompt[2])] == {"logprob": -2.0, "rank": 2, "decoded_token": text}
    assert scores[2]["67"]["rank"] == 1
    body = live.complete(["ab", "cde"], prompt_logprobs=0, n=2, max_tokens=1).json()
    assert [len(choice["prompt_logprobs"]) for choice in body["choices"]] == [2, 2, 3, 3]


def test_echo_with_logprobs(live: Live) -> None:
    """Score texts as evaluation harnesses do."""
    choices = live.complete(["Hüt", "x"], echo=True, logprobs=1, max_tokens=1, n=2).json()["choices"]
    for choice in choices[:2]:
        logprobs = choice["logprobs"]
        assert choice["text"] == "HütG"
        assert logprobs["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xbc", "t", "G"]
        assert logprobs["token_logprobs"] == [None, -1, -2, -3, -0.5]
        assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][3] == {"d": -0.25, "t": -3.0}
    assert [choice["logprobs"]["tokens"] for choice in choices[2:]] == [["x", "G"]] * 2
    body = live.complete("ab", echo=True, logprobs=1, max_tokens=0).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -1]
    assert body["usage"]["completion_tokens"] == 0
    assert live.complete("ab", echo=True, max_tokens=0).json()["choices"][0]["text"] == "ab"


def test_token_ids_and_truncation(live: Live) -> None:
    assert live.engine.tokenizer is not None
    encode = live.engine.tokenizer.encode
    for body in (live.complete("abc", return_token_ids=True, max_tokens=2).json(),):
        (choice,) = body["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (encode("abc"), encode("Gr"))
    body = live.chat("Hi", return_token_ids=True, max_tokens=2).json()
    assert body["prompt_token_ids"] == live.engine.requests[-1][1]
    assert body["choices"][0]["token_ids"] == encode("Gr")
    choice = live.complete("a", logprobs=1, return_tokens_as_token_ids=True, max_tokens=1).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{encode('G')[0]}"]
    content = live.chat(logprobs=True, return_tokens_as_token_ids=True, max_tokens=1).json()["choices"][0]["logprobs"]
    assert content["content"][0]["token"] == f"token_id:{encode('G')[0]}"
    body = live.complete("abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=1).json()
    assert (body["choices"][0]["text"], body["usage"]["prompt_tokens"]) == ("efG", 2)
    assert live.complete("x" * 600, truncate_prompt_tokens=-1, max_tokens=12).json()["usage"]["prompt_tokens"] == 500
    assert live.chat("x" * 600, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 511


def test_messages_as_the_template_sees_them(live: Live) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ada"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 42}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    assert live.post("/v1/chat/completions", messages=messages).status_code == 200
    text = live.prompt_text()
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n")
    assert '<|im_start|>assistant\nf{"x": 42}<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n' in text


def test_template_options(live: Live) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    live.chat("Hi", chat_template_kwargs={"extra": "E"}, tools=tools, tool_choice="none", add_generation_prompt=False)
    assert live.prompt_text() == "<|im_start|>user\nHi<|im_end|>\nE1"
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is "}]
    body = live.post("/v1/chat/completions", messages=messages, continue_final_message=True).json()
    assert live.prompt_text().endswith("<|im_start|>assistant\nIt is ")
    assert body["choices"][0]["message"]["role"] == "assistant"


def test_server_template_and_role(serve: Callable[..., Live], tmp_path: Any) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ word }}:{{ messages[0].content }}")
    for given in (str(path), path.read_text()):
        settings = ServerConfig(chat_template=given, default_chat_template_kwargs={"word": "A"}, response_role="bot")
        live = serve(FakeEngine(template=None), settings, served_model_names=["one", "two"])
        body = live.chat("Hi", model="two").json()
        assert (body["model"], body["choices"][0]["message"]["role"]) == ("two", "bot")
        assert live.prompt_text() == "A:Hi"
        live.chat("Hi", chat_template_kwargs={"word": "B"})
        assert live.prompt_text() == "B:Hi"


def test_tokenize_and_detokenize(live: Live) -> None:
    body = live.post("/tokenize", prompt="Hé", return_token_strs=True).json()
    assert body["count"] == len(body["tokens"]) == 3
    assert body["max_model_len"] == 512
    assert body["token_strs"] == ["H", "Ã", "©"]
    assert live.post("/detokenize", tokens=body["tokens"]).json() == {"prompt": "Hé"}
    body = live.post("/tokenize", messages=[{"role": "user", "content": "Hi"}], model="toy").json()
    live.chat("Hi")
    assert body["tokens"] == live.engine.requests[-1][1]
    assert body["token_strs"] is None
    assert live.post("/tokenize", prompt="a", messages=[]).json()["error"]["param"] == "messages"
    both = live.post("/tokenize", prompt="a", messages=[{"role": "user", "content": "Hi"}])
    assert both.json()["error"]["param"] == "prompt"
    assert live.post("/tokenize").json()["error"]["param"] == "prompt"
    assert live.post("/detokenize", tokens=[999]).json()["error"]["param"] == "tokens"
