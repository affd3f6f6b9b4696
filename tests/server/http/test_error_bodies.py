"""Every error body, byte for byte, in all APIs: what clients match on does not change with a rewording inside.

After a change that is meant, `python -m tests.server.http.test_error_bodies` writes the new bodies.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine, GrammarEngine
from tests.support.live_server import Live, run_server
from tests.support.templates import HERMES, LLAMA3, THINKER

EXPECTED = Path(__file__).with_suffix(".json")
CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
ASK = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 4},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi", "max_output_tokens": 16},
    MESSAGES: {"messages": ASK, "max_tokens": 4},
    "/v1/embeddings": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/classify": {"input": "a"},
}
LONG = "x" * 600
# Fields of the sampling parameters, as chat, completions and token requests have them.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": -1}, {"temperature": 3}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": 2}, {"top_k": -3},
    {"top_k": 1.5}, {"min_p": 7}, {"typical_p": 0}, {"top_n_sigma": 101}, {"seed": 2**70}, {"max_tokens": 0},
    {"min_tokens": -1}, {"min_tokens": 9, "max_tokens": 4}, {"thinking_token_budget": -1}, {"n": 0}, {"n": 500},
    {"stop": ""}, {"stop": [""]}, {"stop": ["a"] * 70}, {"stop": "x" * 1001}, {"stop": 5}, {"stop_token_ids": [-1]},
    {"stop_token_ids": [999_999]}, {"stop_token_ids": [1] * 2000}, {"presence_penalty": 3}, {"frequency_penalty": -3},
    {"repetition_penalty": 0}, {"logit_bias": {"x": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": 101}},
    {"logit_bias": {"999999": 1}}, {"allowed_token_ids": []}, {"allowed_token_ids": [-5]}, {"bad_words": [""]},
    {"allowed_token_ids": [999_999]}, {"bad_words": ["x" * 300]}, {"bad_words": ["y" * 200, *map(str, range(100))]},
    {"dry_multiplier": -1}, {"dry_base": 0}, {"dry_allowed_length": 0}, {"dry_sequence_breakers": [""]},
    {"dry_multiplier": 1, "dry_sequence_breakers": [999_999]}, {"xtc_threshold": 2}, {"xtc_probability": -1},
    {"prompt_logprobs": 30}, {"prompt_logprobs": 9}, {"logprob_token_ids": [-1]}, {"colour": 1}, {"priority": "high"},
    {"structured_outputs": {}}, {"structured_outputs": {"json": {}, "regex": "a"}},
    {"structured_outputs": {"regex": ""}}, {"structured_outputs": {"regex": "(?<=a)b"}},
    {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": [""]}}, {"structured_outputs": {"grammar": "x"}},
    {"structured_outputs": {"grammar": "start: nothing"}}, {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": {"type": "nothing"}}}, {"structured_outputs": {"json": {"$ref": "http://a/b"}}},
    {"structured_outputs": {"json": {"not": {"type": "string"}}}},
]  # fmt: skip
FORMATS: list[dict[str, Any]] = [
    {"guided_regex": "("}, {"guided_choice": [""]}, {"guided_json": {"type": "nothing"}}, {"guided_grammar": "x"},
    {"guided_json": "{"}, {"guided_regex": "a", "guided_json": {}}, {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
    {"response_format": {"type": "json_object", "schema": {"not": {}}}},
    {"use_beam_search": True, "n": 11}, {"use_beam_search": True, "n": 3}, {"length_penalty": 3},
    {"stream_options": {}},
    {"use_beam_search": True, "n": 2, "prompt_logprobs": 1}, {"use_beam_search": True, "guided_regex": "a"},
    {"truncate_prompt_tokens": -2}, {"cache_salt": ""}, {"request_id": "?"}, {"timeout_ms": 0}, {"model": "other"},
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f"}}


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


BAD_SCHEMA = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
TOOLS: list[dict[str, Any]] = [
    {"tools": [TOOL, TOOL]}, {"tool_choice": "required"}, {"tools": [TOOL], "tool_choice": "some"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tools": [tool({"type": "string"})]}, {"tools": [tool(BAD_SCHEMA)], "tool_choice": "required"},
    {"tools": [tool(BAD_SCHEMA, strict=True)]}, {"tools": [tool({"type": "object", "properties": 5})]},
    {"tools": [TOOL] * 600, "tool_choice": "required"}, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tools": [TOOL], "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    {"tools": [TOOL], "use_beam_search": True, "n": 2}, {"chat_template_kwargs": {"messages": 1}},
    {"messages": [{"role": "user", "content": "refuse me"}]}, {"messages": []}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [*ASK, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
    {"messages": [{"role": "user", "content": LONG}]}, {"messages": [{"role": "user", "content": LONG * 9}]},
    {"reasoning_effort": "most"}, {"logprobs": True, "top_logprobs": 9}, {"logprobs": True, "top_logprobs": 99},
]  # fmt: skip
PROMPTS: list[dict[str, Any]] = [
    {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [-1]}, {"prompt": [999_999]}, {"prompt": LONG},
    {"prompt": LONG * 9}, {"prompt": ["a"] * 3000}, {"prompt": ["a"] * 100, "n": 100}, {"prompt": 5}, {"logprobs": 9},
    {"logprobs": 99}, {"suffix": "x"}, {"best_of": 2}, {"echo": True, "stream": True, "logprobs": 1, "n": 2},
]  # fmt: skip
OTHERS: dict[str, list[dict[str, Any]]] = {
    RESPONSES: [
        {"temperature": 3}, {"top_p": 0}, {"max_output_tokens": 0}, {"input": []}, {"input": LONG}, {"model": "other"},
        {"previous_response_id": "resp_no"}, {"conversation": "conv_no"}, {"tool_choice": "required"},
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]},
        {"tools": [{"type": "function", "name": "f", "parameters": BAD_SCHEMA, "strict": True}]},
        {"tools": [{"type": "function", "name": "f"}] * 2}, {"text": {"format": {"type": "json_schema", "name": "a"}}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
        {"input": [{"type": "item_reference", "id": "msg_no"}]}, {"top_logprobs": 30},
        {"background": True, "stream": 5},
        {"input": [{"role": "user", "content": "refuse me"}]}, {"top_k": -3}, {"stop": ""}, {"seed": 2**70},
    ],
    MESSAGES: [
        {"temperature": 3}, {"top_p": 0}, {"top_k": -3}, {"max_tokens": 0}, {"stop_sequences": [""]},
        {"stop_sequences": ["x" * 1001]}, {"messages": []}, {"model": "other"}, {"system": 5},
        {"messages": [{"role": "user", "content": LONG}]}, {"tool_choice": {"type": "any"}},
        {"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, {"tool_choice": {"type": "tool"}},
        {"tools": [{"name": "f", "input_schema": BAD_SCHEMA}], "tool_choice": {"type": "any"}},
        {"tools": [{"name": "f", "input_schema": {}}] * 2}, {"thinking": {"type": "enabled", "budget_tokens": -1}},
        {"messages": [{"role": "user", "content": "refuse me"}]}, {"thread": "t"},
    ],
    OLLAMA: [
        {"model": "other"}, {"options": {"temperature": 3}}, {"options": {"top_k": -3}},
        {"options": {"num_predict": -5}},
        {"options": {"stop": [""]}}, {"options": {"seed": 2**70}}, {"format": {"type": "nothing"}}, {"format": "xml"},
        {"messages": [{"role": "user", "content": LONG}]}, {"tools": [TOOL, TOOL]}, {"options": {"top_p": 2}},
        {"messages": [{"role": "user", "content": "refuse me"}]}, {"images": ["a"]},
    ],
    "/v1/embeddings": [
        {"input": ""}, {"input": LONG}, {"input": [999_999]}, {"input": [-1]}, {"dimensions": 0}, {"dimensions": 99},
        {"pooling": "most"}, {"model": "other"}, {"input": ["a"] * 3000}, {"encoding_format": "hex"},
        {"priority": 2**40},
    ],
    "/score": [{}, {"text_1": []}, {"model": "other"}, {"text_1": ["a", "b"]}],
    "/rerank": [{}, {"documents": []}, {"top_n": -1}],
    "/classify": [{}, {"input": ""}],
    "/tokenize": [{"prompt": 5}, {"model": "other"}, {"messages": ASK, "prompt": "a"}],
    "/detokenize": [{"tokens": [999_999]}, {"tokens": [-1]}, {"tokens": "a"}],
}  # fmt: skip


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    for change in (*SAMPLING, *FORMATS, *TOOLS):
        yield CHAT, GOOD[CHAT] | change
    for change in (*SAMPLING, *FORMATS, *PROMPTS):
        yield COMPLETIONS, GOOD[COMPLETIONS] | change
    for change in SAMPLING:
        yield TOKENS, {"token_ids": [1], "sampling_params": change}
    for path, changes in OTHERS.items():
        good = {"model": "toy", "messages": ASK} if path == OLLAMA else GOOD.get(path, {})
        for change in changes:
            yield path, good | change


def servers() -> Iterator[tuple[str, Callable[[], FakeEngine], ServerConfig, list[tuple[str, dict[str, Any]]]]]:
    """Yield a name, an engine, settings and requests, for each kind of server."""
    plain = list(GOOD.items())
    in_all = [(path, {"model": "toy", **body}) for path, body in ((OLLAMA, {"messages": ASK}), *GOOD.items())]
    streams = [(path, {**body, "stream": True}) for path, body in in_all[:5]]
    with_tools = [(CHAT, GOOD[CHAT] | change) for change in TOOLS] + [
        (path, body) for path, body in requests() if "tools" in body and path != CHAT
    ]
    yield "plain", FakeEngine, ServerConfig(), list(requests())
    yield "hermes", lambda: GrammarEngine(template=HERMES), ServerConfig(), with_tools
    yield "llama3", lambda: GrammarEngine(template=LLAMA3), ServerConfig(), with_tools
    thinks = [(CHAT, GOOD[CHAT] | change) for change in ({"thinking_token_budget": 0}, {"guided_regex": "("})]
    yield "thinker", lambda: GrammarEngine(template=THINKER), ServerConfig(), thinks
    yield "no_template", lambda: FakeEngine(template=None), ServerConfig(), in_all
    no_auto = ServerConfig(enable_auto_tool_choice=False)
    yield "no_auto", lambda: GrammarEngine(template=HERMES), no_auto, with_tools[:3]
    strict = [(CHAT, GOOD[CHAT] | change) for change in ({"colour": 1}, {"store": True}, {"reasoning_effort": "low"})]
    yield "strict", FakeEngine, ServerConfig(strict=True), strict
    few = ServerConfig(max_num_queued_reqs=1)
    too_many = [(COMPLETIONS, {"prompt": "Hi", "n": 3}), (MESSAGES, {**GOOD[MESSAGES], "n": 1})]
    yield "few", lambda: FakeEngine(max_num_seqs=1), few, too_many
    asks_tokenizer = [
        *in_all, (COMPLETIONS, {"prompt": [1], "stop": "a"}), (COMPLETIONS, {"prompt": [1], "bad_words": ["a"]}),
        (COMPLETIONS, {"prompt": [1], "structured_outputs": {"regex": "a"}}),
        (COMPLETIONS, {"prompt": [1], "structured_outputs": {"regex": "("}}),
        (COMPLETIONS, {"prompt": [1], "dry_multiplier": 1, "dry_sequence_breakers": ["a"]}),
    ]  # fmt: skip
    yield "no_tokenizer", lambda: changed(FakeEngine(template=None), tokenizer=None), ServerConfig(), asks_tokenizer
    yield "embeds", lambda: changed(FakeEngine(), generates=False), ServerConfig(), in_all
    yield "failing", lambda: changed(FakeEngine(), fail_after=1), ServerConfig(), in_all
    yield "refusing", lambda: changed(FakeEngine(), fail_after=1, refuses=True), ServerConfig(), in_all
    timed = [(path, {**body, "timeout_ms": 60_000}) for path, body in plain[:3]]
    yield "late", lambda: changed(FakeEngine(), time_out_after=0), ServerConfig(), timed
    yield "dying", lambda: changed(FakeEngine(), die_after=1), ServerConfig(), in_all[:1] + in_all[1:2]
    dead = changed(FakeEngine(), die_after=0)
    dead.states.enter("dead", reason="the engine process was killed by SIGKILL")
    yield "dead", lambda: dead, ServerConfig(), in_all
    yield "failing streams", lambda: changed(FakeEngine(), fail_after=1), ServerConfig(), streams[2:3]


def changed(engine: FakeEngine, **attributes: Any) -> FakeEngine:
    for name, value in attributes.items():
        setattr(engine, name, value)
    return engine


def bodies() -> dict[str, list[Any]]:
    """Return status and body of the answer to each request. Answers that are no errors keep the status and the
    warnings.
    """
    found: dict[str, list[Any]] = {}
    for name, make, settings, asked in servers():
        with run_server(make(), settings) as live:
            for number, (path, body) in enumerate(asked):
                found[f"{name} {number} {path} {json.dumps(body)[:200]}"] = answer(live, path, body)
    return found


def answer(live: Live, path: str, body: dict[str, Any]) -> list[Any]:
    response = live.post(path, **body)
    if response.is_error:
        return [response.status_code, response.text]
    is_object = response.headers["content-type"].startswith("application/json")
    return [response.status_code, response.json().get("warnings") if is_object else None]


def test_error_bodies_are_the_same() -> None:
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    found = bodies()
    assert found.keys() == expected.keys()
    assert {key: value for key, value in found.items() if value != expected[key]} == {}
    statuses = {status for status, _ in found.values()}
    assert {200, 400, 404, 500, 503, 504} <= statuses
    assert sum(status != 200 for status, _ in found.values()) > 300


if __name__ == "__main__":
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in bodies().items())
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
