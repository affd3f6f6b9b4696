"""Checks of /v1/responses, Anthropic's /v1/messages, tokens and embeddings."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from server.cli.checks.runner import Event, Server, Suite, want

RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
HELLO = [{"role": "user", "content": "Say hello."}]

suite = Suite()
check = suite.check


@check("responses", "an answer")
def response(server: Server) -> None:
    body = server.ask(RESPONSES, input="Say hello.", max_output_tokens=16, store=False)
    want(body["object"] == "response", f"the object is {body['object']!r}")
    want(body["status"] in ("completed", "incomplete"), f"the status is {body['status']!r}")
    want(body["output"], "there is no output")
    want(body["usage"]["output_tokens"] > 0, "the usage counts nothing")


@check("responses", "the events of a stream")
def response_stream(server: Server) -> None:
    events = server.stream(RESPONSES, input="Say hello.", max_output_tokens=16, store=False)
    found = [event.json for event in events if event.data != "[DONE]"]
    want(all(event.name == data["type"] for event, data in zip(events, found, strict=False)), "a name is not the type")
    names = [data["type"] for data in found]
    want(names[0] == "response.created", f"the first event is {names[0]}")
    want(names[-1] in ("response.completed", "response.incomplete"), f"the last event is {names[-1]}")
    numbers = [data["sequence_number"] for data in found]
    want(numbers == sorted(set(numbers)), "the sequence numbers do not rise")
    for begin, end in (("output_item.added", "output_item.done"), ("content_part.added", "content_part.done")):
        want(names.count(f"response.{begin}") == names.count(f"response.{end}"), f"not every {begin} has its {end}")


@check("responses", "kept, continued, deleted")
def response_kept(server: Server) -> None:
    kept = server.ask(RESPONSES, input="Say hello.", max_output_tokens=8)["id"]
    want(server.get(f"{RESPONSES}/{kept}").json()["id"] == kept, "it is another response")
    more = server.ask(RESPONSES, input="Again.", previous_response_id=kept, max_output_tokens=8)
    want(more["previous_response_id"] == kept, "it does not go on from the other")
    want(server.http.delete(f"{RESPONSES}/{kept}").status_code == 200, "it cannot be deleted")
    want(server.http.get(f"{RESPONSES}/{kept}").status_code == 404, "it is still there")


@check("messages (Anthropic)", "an answer")
def message(server: Server) -> None:
    body = server.ask(MESSAGES, messages=HELLO, max_tokens=16, system="Be brief.")
    want((body["type"], body["role"]) == ("message", "assistant"), "it is no message of the assistant")
    want(body["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence"), f"stop_reason: {body['stop_reason']!r}")
    want(body["usage"]["output_tokens"] > 0, "the usage counts nothing")


@check("messages (Anthropic)", "the events of a stream")
def message_stream(server: Server) -> None:
    events: list[Event] = server.stream(MESSAGES, messages=HELLO, max_tokens=16)
    names = [event.json["type"] for event in events if event.name != "ping"]
    want(names[0] == "message_start", f"the first event is {names[0]}")
    want(names[-2:] == ["message_delta", "message_stop"], f"the last events are {names[-2:]}")
    want(names.count("content_block_start") == names.count("content_block_stop"), "a block does not end")


@check("messages (Anthropic)", "errors in Anthropic's shape")
def message_error(server: Server) -> None:
    answer = server.post(MESSAGES, {"messages": []})
    if answer.status_code == 404 and answer.json().get("type") != "error":
        server.ask(MESSAGES, messages=HELLO, max_tokens=1)
    want(answer.status_code == 400, f"status {answer.status_code}")
    want(answer.json()["error"]["type"] == "invalid_request_error", "its type is no invalid_request_error")


@check("messages (Anthropic)", "count_tokens")
def message_count(server: Server) -> None:
    want(server.ask(f"{MESSAGES}/count_tokens", messages=HELLO)["input_tokens"] > 0, "it counts nothing")


@check("tokens", "/tokenize and /detokenize (vLLM)")
def tokens(server: Server) -> None:
    body = server.ask("/tokenize", prompt="Hello world", add_special_tokens=False)
    want(body["count"] == len(body["tokens"]), "the count is not the number of tokens")
    text = server.ask("/detokenize", tokens=body["tokens"])["prompt"]
    want(text.strip() == "Hello world", f"'Hello world' came back as {text!r}")


@check("tokens", "/inference/v1/generate (vLLM)")
def generated_tokens(server: Server) -> None:
    prompt = server.ask("/tokenize", prompt="Hello world", add_special_tokens=False)["tokens"]
    body = server.ask("/inference/v1/generate", token_ids=prompt, sampling_params={"max_tokens": 3, "temperature": 0})
    want(0 < len(body["choices"][0]["token_ids"]) <= 3, "max_tokens=3 gave another number of token ids")
    want(body["choices"][0]["finish_reason"] in ("stop", "length"), "there is no finish_reason")


@check("embeddings", "POST /v1/embeddings")
def embeddings(server: Server) -> None:
    body = server.ask(EMBEDDINGS, input=["one", "two"], optional=True)
    data, usage = body["data"], body["usage"]
    want([entry["index"] for entry in data] == [0, 1], "two texts did not give embeddings 0 and 1")
    want(len(data[0]["embedding"]) == len(data[1]["embedding"]) > 0, "they have different lengths")
    want(data[0]["embedding"] != data[1]["embedding"], "two texts gave the same embedding")
    want(abs(math.hypot(*data[0]["embedding"]) - 1) < 0.01, "its length is not 1")
    want(usage["total_tokens"] == usage["prompt_tokens"] > 0, "the usage counts no prompt tokens, or others")


@check("embeddings", "POST /v1/rerank (Jina, Cohere)")
def rerank(server: Server) -> None:
    asked: dict[str, Any] = {"query": "a red apple", "documents": ["a teapot", "a red apple", "the moon"]}
    found = server.ask("/v1/rerank", **asked, optional=True)["results"]
    scores = [each["relevance_score"] for each in found]
    want(sorted(each["index"] for each in found) == [0, 1, 2], "not every document has a result")
    want(scores == sorted(scores, reverse=True), "the best is not the first")
    want(found[0]["index"] == 1, "the query itself is not the best document")
    want(len(server.ask("/v1/rerank", **asked, top_n=2)["results"]) == 2, "top_n=2 did not give two results")


@check("embeddings", "POST /v1/score (vLLM)")
def scores(server: Server) -> None:
    body = server.ask("/v1/score", text_1="a red apple", text_2=["a teapot", "a red apple"], optional=True)
    data = body["data"]
    want([entry["index"] for entry in data] == [0, 1], "two texts did not give scores 0 and 1")
    want(data[1]["score"] > data[0]["score"], "a text fits itself less well than another")


@check("embeddings", "as base64")
def base64_embeddings(server: Server) -> None:
    asked: dict[str, Any] = {"input": "one", "optional": True}
    numbers = server.ask(EMBEDDINGS, **asked)["data"][0]["embedding"]
    packed = base64.b64decode(server.ask(EMBEDDINGS, encoding_format="base64", **asked)["data"][0]["embedding"])
    values = struct.unpack(f"<{len(packed) // 4}f", packed)
    want(len(values) == len(numbers), f"they are {len(values)} float32 values instead of {len(numbers)}")
    want(max(abs(a - b) for a, b in zip(values, numbers, strict=True)) < 0.01, "they are other values")


@check("embeddings", "token ids as input")
def embedded_ids(server: Server) -> None:
    body = server.ask(EMBEDDINGS, input=[[1, 2, 3], [4, 5]], optional=True)
    want(len(body["data"]) == 2, "two lists did not give two embeddings")
    want(body["usage"]["prompt_tokens"] == 5, f"five token ids were {body['usage']['prompt_tokens']}")


@check("embeddings", "fewer dimensions")
def embedded_dimensions(server: Server) -> None:
    found = server.ask(EMBEDDINGS, input="one", dimensions=4, optional=True)["data"][0]["embedding"]
    want(len(found) == 4, f"dimensions=4 gave {len(found)}")
