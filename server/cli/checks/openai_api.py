"""Checks of OpenAI's older endpoints, their streams and errors."""

from __future__ import annotations

import json
from typing import Any

from server.cli.checks.runner import AbsentError, Event, Server, Suite, want

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "Say hello."}]
GREEDY: dict[str, Any] = {"temperature": 0}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris for 3 days?"}]

suite = Suite()
check = suite.check


def first(body: dict[str, Any]) -> dict[str, Any]:
    """Return the first choice of an answer."""
    want(body.get("choices"), "the answer has no choices")
    choice: dict[str, Any] = body["choices"][0]
    want(
        choice.get("finish_reason") in ("stop", "length", "tool_calls"), f"finish_reason: {choice.get('finish_reason')}"
    )
    return choice


def text_of(body: dict[str, Any]) -> str:
    """Return the text of a message, including its reasoning."""
    message = first(body)["message"]
    want(message.get("role") == "assistant", f"the role is {message.get('role')!r}")
    return (message.get("reasoning_content") or message.get("reasoning") or "") + (message.get("content") or "")


def chunks_of(events: list[Event]) -> list[dict[str, Any]]:
    want(events and events[-1].data == "[DONE]", "the stream does not end with [DONE]")
    chunks = [event.json for event in events[:-1]]
    want(all("error" not in chunk for chunk in chunks), "there is an error in the stream")
    want(len({chunk["id"] for chunk in chunks}) == 1, "the chunks have different ids")
    return chunks


# ---- service ----


@check("service", "GET /v1/models", essential=True)
def models(server: Server) -> None:
    cards = server.get("/v1/models").json()["data"]
    want(server.model in [card["id"] for card in cards], f"{server.model} is not in the list")
    want(all(card["object"] == "model" for card in cards), 'a card is no "model"')


@check("service", "GET /v1/models/{model}")
def model(server: Server) -> None:
    want(server.get(f"/v1/models/{server.model}").json()["id"] == server.model, "it is another model")


@check("service", "GET /health")
def health(server: Server) -> None:
    server.get("/health")


@check("service", "GET /metrics")
def metrics(server: Server) -> None:
    want("# TYPE " in server.get("/metrics").text, "these are no Prometheus metrics")


# ---- chat ----


@check("chat", "an answer", essential=True)
def answer(server: Server) -> None:
    body = server.ask(CHAT, messages=HELLO, max_tokens=16)
    want(body["object"] == "chat.completion", f"the object is {body['object']!r}")
    text_of(body)
    usage = body["usage"]
    want(usage["prompt_tokens"] > 0, "usage counts no prompt tokens")
    want(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "the usage does not add up")


@check("chat", "max_tokens", essential=True)
def max_tokens(server: Server) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        limit: dict[str, Any] = {field: 2}
        body = server.ask(CHAT, messages=HELLO, **limit)
        want(body["usage"]["completion_tokens"] <= 2, f"{field}=2 gave {body['usage']['completion_tokens']} tokens")


@check("chat", "messages of every role, content in parts", essential=True)
def roles(server: Server) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": parts},
    ]
    text_of(server.ask(CHAT, messages=turns, max_tokens=8))


@check("chat", "several answers (n)")
def several(server: Server) -> None:
    body = server.ask(CHAT, messages=HELLO, max_tokens=4, n=3, optional=True)
    want([choice["index"] for choice in body["choices"]] == [0, 1, 2], "n=3 did not give choices 0, 1 and 2")


@check("chat", "temperature 0 is reproducible")
def greedy(server: Server) -> None:
    texts = {text_of(server.ask(CHAT, messages=HELLO, max_tokens=12, **GREEDY)) for _ in range(2)}
    want(len(texts) == 1, "the same request gave different answers")


@check("chat", "seed is reproducible")
def seed(server: Server) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 12, "temperature": 1, "seed": 7}
    want(len({text_of(server.ask(CHAT, **asked)) for _ in range(2)}) == 1, "the same seed gave different answers")


@check("chat", "stop")
def stop(server: Server) -> None:
    text = text_of(server.ask(CHAT, messages=HELLO, max_tokens=16, **GREEDY))
    if len(text) < 4:
        raise AbsentError("the model says too little to stop it")
    end = text[2:4]
    body = server.ask(CHAT, messages=HELLO, max_tokens=16, stop=[end], **GREEDY)
    want(first(body)["finish_reason"] == "stop", "the finish_reason is not stop")
    want(end not in text_of(body), "the stop text is in the answer")


@check("chat", "logprobs")
def logprobs(server: Server) -> None:
    body = server.ask(CHAT, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2, optional=True, **GREEDY)
    content = first(body)["logprobs"]["content"]
    want(len(content) > 0, "there are none")
    for entry in content:
        want(entry["logprob"] <= 0.001, f"a log-probability is {entry['logprob']}")
        want(len(entry["top_logprobs"]) == 2, f"{len(entry['top_logprobs'])} top_logprobs instead of 2")


@check("chat", "penalties and logit_bias")
def penalties(server: Server) -> None:
    server.ask(CHAT, messages=HELLO, max_tokens=4, presence_penalty=0.5, frequency_penalty=0.5, optional=True)
    server.ask(CHAT, messages=HELLO, max_tokens=4, logit_bias={"1": -100}, optional=True)


# ---- streams ----


@check("streams", "chat", essential=True)
def chat_stream(server: Server) -> None:
    chunks = chunks_of(server.stream(CHAT, messages=HELLO, max_tokens=12, **GREEDY))
    want(all(chunk["object"] == "chat.completion.chunk" for chunk in chunks), "a chunk has another object")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    want(choices[0]["delta"].get("role") == "assistant", "the first delta has no role")
    want([c["finish_reason"] for c in choices if c["finish_reason"]] in (["stop"], ["length"]), "not one finish_reason")


@check("streams", "a stream says what a whole answer says")
def same_text(server: Server) -> None:
    whole = text_of(server.ask(CHAT, messages=HELLO, max_tokens=12, **GREEDY))
    choices = [
        c for chunk in chunks_of(server.stream(CHAT, messages=HELLO, max_tokens=12, **GREEDY)) for c in chunk["choices"]
    ]
    deltas = [choice["delta"] for choice in choices]
    reasoning = "".join(delta.get("reasoning_content") or delta.get("reasoning") or "" for delta in deltas)
    text = reasoning + "".join(delta.get("content") or "" for delta in deltas)
    want(text == whole, f"{text!r} is not {whole!r}")


@check("streams", "stream_options.include_usage")
def usage_chunk(server: Server) -> None:
    options = {"include_usage": True}
    chunks = chunks_of(server.stream(CHAT, messages=HELLO, max_tokens=4, stream_options=options, optional=True))
    want(chunks[-1]["choices"] == [], "the last chunk has choices")
    want(chunks[-1]["usage"]["completion_tokens"] > 0, "the usage counts nothing")


@check("streams", "completions", essential=True)
def text_stream(server: Server) -> None:
    chunks = chunks_of(server.stream(TEXT, prompt="Once upon a time", max_tokens=8))
    want("".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), "there is no text")


# ---- completions ----


@check("completions", "an answer", essential=True)
def completion(server: Server) -> None:
    body = server.ask(TEXT, prompt="Once upon a time", max_tokens=8)
    want(body["object"] == "text_completion", f"the object is {body['object']!r}")
    want(isinstance(first(body)["text"], str), "there is no text")


@check("completions", "several prompts")
def prompts(server: Server) -> None:
    body = server.ask(TEXT, prompt=["One", "Two"], max_tokens=2, optional=True)
    want(sorted(choice["index"] for choice in body["choices"]) == [0, 1], "two prompts did not give choices 0 and 1")


@check("completions", "token ids as a prompt")
def token_ids(server: Server) -> None:
    body = server.ask(TEXT, prompt=[1, 2, 3], max_tokens=2, optional=True)
    want(body["usage"]["prompt_tokens"] == 3, f"three token ids were {body['usage']['prompt_tokens']}")


@check("completions", "logprobs")
def legacy_logprobs(server: Server) -> None:
    found = first(server.ask(TEXT, prompt="Once", max_tokens=4, logprobs=2, optional=True))["logprobs"]
    lengths = {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    want(len(lengths) == 1, "its lists have different lengths")


@check("completions", "beam search (vLLM)")
def beams(server: Server) -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, "use_beam_search": True}
    texts = [choice["text"] for choice in server.ask(TEXT, **asked, n=2, optional=True)["choices"]]
    want(len(texts) == 2, f"n=2 gave {len(texts)} answers")
    want(len(set(texts)) == 2, "both answers are the same")


@check("completions", "echo with logprobs scores the prompt")
def echo(server: Server) -> None:
    body = server.ask(TEXT, prompt="Once upon a time", max_tokens=1, echo=True, logprobs=1, optional=True)
    want(first(body)["text"].startswith("Once upon a time"), "the text does not begin with the prompt")
    found = first(body)["logprobs"]["token_logprobs"]
    want(found[0] is None, "the first token has no predecessor, but a log-probability")
    want(all(value <= 0.001 for value in found[1:]), "a log-probability is positive")


# ---- tools ----


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    want(call["function"]["name"] == "get_weather", f"{call['function']['name']!r} is called")
    arguments: dict[str, Any] = json.loads(call["function"]["arguments"])
    want(isinstance(arguments.get("city"), str), f"the arguments are not by the schema: {arguments}")
    want(1 <= arguments["days"] <= 9, f"the arguments are not by the schema: {arguments}")
    return arguments


def finished(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the choice. Raises `AbsentError` if it is truncated, since half an object proves nothing."""
    if choice["finish_reason"] == "length":
        raise AbsentError("the model came to no end")
    return choice


@check("tools", "tool_choice auto is accepted")
def tools_auto(server: Server) -> None:
    first(server.ask(CHAT, messages=ASK, tools=[TOOL], max_tokens=64, optional=True))


@check("tools", "tool_choice required, arguments by the schema")
def tools_required(server: Server) -> None:
    body = server.ask(CHAT, messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=200, optional=True)
    calls = finished(first(body))["message"].get("tool_calls")
    want(calls, "no tool is called")
    for call in calls:
        want(call["id"] and call["type"] == "function", "a call has no id or type")
        arguments_of(call)


@check("tools", "a named tool, streamed")
def tools_streamed(server: Server) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    events = server.stream(CHAT, messages=ASK, tools=[TOOL], tool_choice=choice, max_tokens=200, optional=True)
    choices = [choice for chunk in chunks_of(events) for choice in chunk["choices"]]
    parts = [part for c in choices for part in c["delta"].get("tool_calls") or () if part["index"] == 0]
    finished(choices[-1])
    want(parts, "no tool is called")
    want(parts[0].get("id") and not any(part.get("id") for part in parts[1:]), "the id is not in the first delta alone")
    name = "".join(part["function"].get("name") or "" for part in parts)
    arguments_of(
        {"function": {"name": name, "arguments": "".join(p["function"].get("arguments") or "" for p in parts)}}
    )


@check("tools", "a tool's result goes back")
def tool_result(server: Server) -> None:
    call = {"id": "call_123", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "call_123", "content": "sunny"})
    first(server.ask(CHAT, messages=turns, tools=[TOOL], max_tokens=16, optional=True))


@check("tools", "parallel_tool_calls false")
def one_call(server: Server) -> None:
    asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    body = server.ask(CHAT, messages=ASK, max_tokens=200, optional=True, **asked)
    want(len(first(body)["message"].get("tool_calls") or ()) == 1, "it is not one call")


@check("tools", "a tool that is not there is 400")
def unknown_tool(server: Server) -> None:
    choice = {"type": "function", "function": {"name": "no_such_tool"}}
    server.ask(CHAT, messages=ASK, tools=[TOOL], max_tokens=1, optional=True)
    error_of(server, 400, CHAT, {"messages": ASK, "tools": [TOOL], "tool_choice": choice})


# ---- structured output ----


@check("structured output", "response_format json_schema")
def json_schema(server: Server) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    body = server.ask(CHAT, messages=ASK, response_format=format, max_tokens=200, optional=True)
    arguments_of({"function": {"name": "get_weather", "arguments": finished(first(body))["message"]["content"]}})


@check("structured output", "response_format json_schema, streamed")
def json_schema_streamed(server: Server) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    events = server.stream(CHAT, messages=ASK, response_format=format, max_tokens=200, optional=True)
    choices = [choice for chunk in chunks_of(events) for choice in chunk["choices"]]
    finished(choices[-1])
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    arguments_of({"function": {"name": "get_weather", "arguments": text}})


@check("structured output", "response_format json_object")
def json_object(server: Server) -> None:
    asked = [{"role": "user", "content": "Give me a short JSON object with one key."}]
    body = server.ask(CHAT, messages=asked, response_format={"type": "json_object"}, max_tokens=300, optional=True)
    want(isinstance(json.loads(finished(first(body))["message"]["content"]), dict), "it is no JSON object")


@check("structured output", "structured_outputs regex (vLLM)")
def regex(server: Server) -> None:
    body = server.ask(TEXT, prompt="A number:", structured_outputs={"regex": "[0-9]{3}"}, max_tokens=16, optional=True)
    text = first(body)["text"]
    want(len(text) == 3 and text.isdigit(), f"{text!r} does not match [0-9]{{3}}")


@check("structured output", "structured_outputs choice (vLLM)")
def choice(server: Server) -> None:
    asked = {"choice": ["yes", "no"]}
    body = server.ask(CHAT, messages=HELLO, structured_outputs=asked, max_tokens=300, optional=True)
    text = finished(first(body))["message"]["content"]
    want(text in ("yes", "no"), f"{text!r} is neither yes nor no")


@check("structured output", "guided_json (vLLM, older)")
def guided(server: Server) -> None:
    body = server.ask(CHAT, messages=ASK, guided_json=WEATHER, max_tokens=200, optional=True)
    arguments_of({"function": {"name": "get_weather", "arguments": finished(first(body))["message"]["content"]}})


@check("structured output", "a schema that is none is 400")
def bad_schema(server: Server) -> None:
    format: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "no such type"}}}
    server.ask(CHAT, messages=HELLO, response_format={"type": "json_object"}, max_tokens=1, optional=True)
    error_of(server, 400, CHAT, {"messages": HELLO, "response_format": format, "max_tokens": 1})


# ---- errors ----


def error_of(server: Server, status: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, body)
    want(response.status_code == status, f"status {response.status_code} instead of {status}")
    error = response.json()["error"]
    want(isinstance(error, dict) and error.get("message"), "the error has no message")
    return dict(error)


@check("errors", "an unknown model is 404")
def unknown_model(server: Server) -> None:
    error_of(server, 404, CHAT, {"messages": HELLO, "model": "no such model"})


@check("errors", "a missing field is 400")
def missing_field(server: Server) -> None:
    error_of(server, 400, CHAT, {})


@check("errors", "a value out of range is 400")
def out_of_range(server: Server) -> None:
    for field, value in (("temperature", -1), ("top_p", 2), ("max_tokens", -1), ("n", 0)):
        error_of(server, 400, CHAT, {"messages": HELLO, "max_tokens": 1, field: value})


@check("errors", "broken JSON is 400")
def broken_json(server: Server) -> None:
    response = server.http.post(CHAT, content=b'{"messages": [', headers={"Content-Type": "application/json"})
    want(response.status_code == 400, f"status {response.status_code}")


@check("errors", "a prompt that is too long is 400")
def too_long(server: Server) -> None:
    card = next(card for card in server.get("/v1/models").json()["data"] if card["id"] == server.model)
    most = card.get("max_model_len")
    if not isinstance(most, int) or most > 200_000:
        raise AbsentError("/v1/models does not tell a max_model_len of at most 200,000")
    error_of(server, 400, TEXT, {"prompt": "a b " * most, "max_tokens": 1})
