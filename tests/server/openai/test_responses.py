"""/v1/responses: items, events, kept responses; raw, and as the official client sees it."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from server.settings import ServerConfig
from tests.support.fake_engine import ANSWER, FakeEngine
from tests.support.live_server import Live, Serve
from tests.support.live_server import start_answering as start
from tests.support.templates import HERMES, QWEN3

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events(live: Live, **body: Any) -> list[dict[str, Any]]:
    """All events, each checked against the official client's types."""
    response = live.post(PATH, stream=True, **body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for number, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        assert event["sequence_number"] == number
        _event.validate_python(event)
        found.append(event)
    return found


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(item) for name, item in value.items() if name not in hidden}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def test_answer(live: Live) -> None:
    body = live.post(PATH, input="Hi", model="toy", max_output_tokens=400, metadata={"a": "b"}).json()
    Response.model_validate(body)
    assert body["id"].startswith("resp_")
    assert body["status"] == "completed"
    (item,) = body["output"]
    assert without_ids(item) == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}],
    }
    num_prompt, num_answer = len("_user\nHi_\n_assistant\n"), len(ANSWER.encode()) + 1
    assert body["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": num_answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_answer,
    }
    assert (body["metadata"], body["max_output_tokens"], body["store"]) == ({"a": "b"}, 400, True)


def test_events(serve: Serve) -> None:
    live = start(serve, QWEN3, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    found = events(live, input="Hi", tools=[TOOL])
    names = [event["type"].removeprefix("response.") for event in found]
    deltas = ["reasoning_text.delta", "output_text.delta", "function_call_arguments.delta"]
    once = [name for number, name in enumerate(names) if name not in deltas or names[number - 1] != name]
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    text = {name: "".join(e["delta"] for e in found if e["type"] == f"response.{name}") for name in deltas}
    assert text == dict(zip(deltas, ("Hm.", "I look.", '{"city": "Köln"}'), strict=True))
    final = found[-1]["response"]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == final["output"]
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>\nHm.\n</think>")
    assert live.http.get(f"{PATH}/{final['id']}").json() == final
    whole = live.post(PATH, input="Hi", tools=[TOOL]).json()
    assert without_ids(whole) == without_ids(final)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["output"][2]["arguments"] == '{"city": "Köln"}'


@pytest.mark.parametrize(
    ("answer", "max_tokens", "kinds"),
    [
        ("", 400, ["message"]),
        ("<think>\nHm.\n</think>", 400, ["reasoning", "message"]),
        ("<think>\nHm.", 10, ["reasoning"]),
        ("<tool_call>", 3, ["message"]),
        (CALL, 400, ["function_call"]),
    ],
)
def test_an_answer_without_text_is_a_message(serve: Serve, answer: str, max_tokens: int, kinds: list[str]) -> None:
    live = start(serve, QWEN3, answer)
    body = {"input": "Hi", "tools": [TOOL], "max_output_tokens": max_tokens}
    found = events(live, **body)
    final = found[-1]["response"]
    assert [item["type"] for item in final["output"]] == kinds
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == final["output"]
    assert without_ids(live.post(PATH, **body).json()) == without_ids(final)
    live.post(PATH, input="And?", previous_response_id=final["id"])
    assert "Hi<|im_end|>\n<|im_start|>assistant\n" in live.prompt_text(), "no two user messages in a row"


def test_incomplete(live: Live) -> None:
    body = live.post(PATH, input="Hi", max_output_tokens=3).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    found = events(live, input="Hi", max_output_tokens=3)
    assert found[-1]["type"] == "response.incomplete"


def test_failure(live: Live) -> None:
    live.engine.fail_after = 3
    found = events(live, input="Hi")
    assert found[-1]["type"] == "response.failed"
    failed = found[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "engine failed" in failed["error"]["message"]
    assert live.http.get(f"{PATH}/{failed['id']}").status_code == 404
    assert live.post(PATH, input="Hi").status_code == 500


def test_logprobs(live: Live) -> None:
    body = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4}
    (item,) = live.post(PATH, **body).json()["output"]
    logprobs = item["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["G", "r", "\ufffd", "\ufffd"]
    assert len(logprobs[0]["top_logprobs"]) == 2
    deltas = [event for event in events(live, **body) if event["type"] == "response.output_text.delta"]
    assert deltas[0]["logprobs"] == logprobs[:1]


def test_items_as_the_template_sees_them(serve: Serve) -> None:
    live = start(serve, HERMES, "Sunny.")
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Köln"}'},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
    ]  # fmt: skip
    body = live.post(PATH, input=items, instructions="You know the weather.").json()
    assert body["instructions"] == "You know the weather."
    calls = CALL + CALL.replace('{"city": "Köln"}', "{}")
    assert live.prompt_text() == (
        "<|im_start|>system\nYou know the weather.<|im_end|>\n<|im_start|>system\nbe brief<|im_end|>\n"
        f"<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nI look.{calls}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_going_on_from_a_response(serve: Serve) -> None:
    live = start(serve, HERMES, CALL)
    first = live.post(PATH, input="Weather?", tools=[TOOL], instructions="Old words.").json()
    call = first["output"][0]
    assert (call["type"], call["name"]) == ("function_call", "weather")
    live.engine.answer = "Sunny."
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    second = live.post(PATH, input=[result], previous_response_id=first["id"], instructions="New words.").json()
    assert second["previous_response_id"] == first["id"]
    assert live.prompt_text() == (
        f"<|im_start|>system\nNew words.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    live.http.delete(f"{PATH}/{first['id']}")
    third = live.post(PATH, input="And?", previous_response_id=second["id"])
    assert third.status_code == 200, "what came before a deleted response is part of what follows it"
    assert "<|im_start|>assistant\nSunny.<|im_end|>\n<|im_start|>user\nAnd?" in live.prompt_text()
    live.post(
        PATH, input=[{"type": "item_reference", "id": second["output"][0]["id"]}, {"role": "user", "content": "x"}]
    )
    assert live.prompt_text().startswith("<|im_start|>assistant\nSunny.<|im_end|>\n<|im_start|>user\nx")
    twice = live.post(PATH, input=[{"type": "item_reference", "id": second["output"][0]["id"]}] * 2)
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "input[1].id"), "few words, much text"
    gone = live.post(PATH, input=[{"type": "item_reference", "id": call["id"]}])
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "input[0].id")


def test_kept_responses(live: Live) -> None:
    items = [{"role": "user", "content": word} for word in "abc"]
    body = live.post(PATH, input=items, max_output_tokens=2).json()
    path = f"{PATH}/{body['id']}"
    assert live.http.get(path).json() == body
    page = live.http.get(f"{path}/input_items", params={"limit": 2, "order": "asc"}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["a", "b"]
    assert page["has_more"] is True
    page = live.http.get(f"{path}/input_items", params={"order": "asc", "after": page["last_id"]}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["c"]
    assert page["has_more"] is False
    error = live.http.get(f"{path}/input_items", params={"limit": 0}).json()["error"]
    assert (error["code"], error["param"]) == (400, "limit")
    assert live.http.delete(path).json() == {"id": body["id"], "object": "response", "deleted": True}
    for response in (live.http.get(path), live.http.delete(path), live.http.get(f"{path}/input_items")):
        assert response.status_code == 404
    response = live.post(PATH, input="a", previous_response_id=body["id"])
    assert (response.status_code, response.json()["error"]["param"]) == (404, "previous_response_id")
    body = live.post(PATH, input="a", store=False, max_output_tokens=2).json()
    assert body["store"] is False
    assert live.http.get(f"{PATH}/{body['id']}").status_code == 404


def test_the_store_is_bounded(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(max_stored_responses=2))
    ids = [live.post(PATH, input=word, max_output_tokens=1).json()["id"] for word in "ab"]
    assert live.http.get(f"{PATH}/{ids[0]}").status_code == 200
    ids.append(live.post(PATH, input="c", max_output_tokens=1).json()["id"])
    assert [live.http.get(f"{PATH}/{each}").status_code for each in ids] == [200, 404, 200]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", ["required"]),
        ({"input": []}, "input", ["must not be empty"]),
        ({"input": ""}, None, []),
        ({"input": [{"type": "robot_call"}]}, "input[0]", ["function"]),
        ({"input": ["a"]}, "input[0]", ["message"]),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", ["'robot'"]),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", ["image parts"]),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", ["at least 1"]),
        ({"input": "a", "temperature": -1}, "temperature", ["[0, 2]"]),
        ({"input": "a", "temperature": "hot"}, "temperature", ["'hot'"]),
        ({"input": "a", "background": True, "store": False}, "background", ["requires store"]),
        ({"input": "a", "conversation": "c", "previous_response_id": "r"}, "conversation", ["previous_response_id"]),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", ["not supported yet"]),
        ({"input": "a", "tools": [{"type": "robot"}]}, "tools[0]", ["'function'"]),
        (
            {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]},
            "tools[0].tools[0]",
            [],
        ),
        ({"input": "a", "tools": [{"type": ["robot"]}]}, "tools[0]", ["'function'"]),
        (
            {
                "input": "a",
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": []}]},
            },
            "tool_choice",
            ["must be"],
        ),
        (
            {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            ["requires tools"],
        ),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", ["requires tools"]),
        ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort", ["'huge'"]),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", ["'xml'"]),
        ({"input": "x" * 600}, "input", ["512 tokens"]),
    ],
)
def test_bad_requests(live: Live, body: dict[str, Any], param: str | None, words: list[str]) -> None:
    response = live.post(PATH, **body)
    if param is None:
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"].startswith(param), error
    for word in words:
        assert word in error["message"]
    assert "messages" not in error["message"], "in the words of this API"


def test_no_such_model(live: Live) -> None:
    response = live.post(PATH, input="a", model="gpt")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


def test_what_is_ignored_is_said(live: Live) -> None:
    body = {"input": "a", "colour": 1, "truncation": "auto", "include": ["file_search_call.results"]}
    response = live.post(PATH, **body)
    names = [warning.partition(":")[0] for warning in response.json()["warnings"]]
    assert names == ["colour", "truncation", "include"]
    assert json.loads(response.headers["x-quire-warnings"]) == response.json()["warnings"]
    assert events(live, **body)[-1]["response"]["warnings"] == response.json()["warnings"]


def test_counting(live: Live) -> None:
    counted = live.post(f"{PATH}/input_tokens", input="Hi", instructions="Be.").json()
    assert counted["input_tokens"] == live.post(PATH, input="Hi", instructions="Be.").json()["usage"]["input_tokens"]
    assert live.post(f"{PATH}/input_tokens", input="Hi", model="x").status_code == 404


def test_the_official_client(client: openai.OpenAI, live: Live) -> None:
    response = client.responses.create(model="toy", input="Hi", temperature=0.5)
    assert (response.output_text, response.temperature) == (ANSWER, 0.5)
    again = client.responses.create(
        model="toy",
        input=[{"role": "user", "content": "Hi"}, *response.output, {"role": "user", "content": "And?"}],  # type: ignore[list-item]
    )
    assert again.status == "completed"
    assert "warnings" not in again.model_dump()
    assert f"<|im_start|>assistant\n{ANSWER}<|im_end|>\n<|im_start|>user\nAnd?" in live.prompt_text()
    assert client.responses.retrieve(response.id).output_text == ANSWER
    assert [item.type for item in client.responses.input_items.list(response.id)] == ["message"]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_the_official_clients_stream(serve: Serve) -> None:
    live = start(serve, QWEN3, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}{CALL}")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="none", max_retries=0) as client:
        tools: Any = [TOOL]
        with client.responses.stream(model="toy", input="Hi", tools=tools) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text == "I look."
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
        live.engine.fail_after = 2
        failed = list(client.responses.create(model="toy", input="Hi", stream=True))
        assert failed[-1].type == "response.failed"


def test_leaving_and_aborting(live: Live) -> None:
    live.engine.holds_after = 3
    body = {"input": "Hi", "stream": True, "request_id": "mine"}
    with live.http.stream("POST", PATH, json=body) as response:
        next(response.iter_raw())
    live.wait_idle()
    assert live.http.get(f"{PATH}/resp_mine").status_code == 404, "it was never finished"
    with live.http.stream("POST", PATH, json=body | {"request_id": "other"}) as response:
        chunks = response.iter_raw()
        next(chunks)
        assert live.http.post("/v1/requests/resp_other/abort").status_code == 200
        assert b"response.incomplete" in b"".join(chunks)
