"""/v1/messages: Anthropic's shapes, raw and as the official client sees them."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from server.settings import ServerConfig
from tests.support.fake_engine import ANSWER, FakeEngine
from tests.support.live_server import Live, Serve
from tests.support.live_server import start_answering as start
from tests.support.templates import HERMES, QWEN3

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "Today's", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THINKING = {"type": "adaptive"}
_event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def connect(live: Live, api_key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{live.port}", api_key=api_key, max_retries=0)


def send(live: Live, content: Any = "Hi", **body: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return live.post(PATH, **{"model": "toy", "max_tokens": 400, "messages": messages, **body})


def events(live: Live, content: Any = "Hi", **body: Any) -> list[dict[str, Any]]:
    """All events, each checked against the official client's types."""
    response = send(live, content, stream=True, **body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        if event["type"] != "error":
            _event.validate_python(event)
        found.append(event)
    return found


def test_answer(live: Live) -> None:
    body = send(live).json()
    Message.model_validate(body)
    assert body.pop("id").startswith("msg_")
    num_prompt, num_answer = len("_user\nHi_\n_assistant\n"), len(ANSWER.encode()) + 1
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": num_answer,
        },
    }


def test_ends(live: Live) -> None:
    body = send(live, max_tokens=3).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    body = send(live, stop_sequences=["plus", "Ein"]).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "Ein")
    assert body["content"][0]["text"] == "Grüße! "
    end = events(live, stop_sequences=["Ein"])[-2]
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "Ein"}


def test_events(serve: Serve) -> None:
    live = start(serve, QWEN3, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    found = events(live, tools=[TOOL], thinking=THINKING)
    start_event, *middle, end, stop = found
    assert start_event["type"] == "message_start"
    assert start_event["message"]["content"] == []
    assert start_event["message"]["usage"]["input_tokens"] > 0
    whole = send(live, tools=[TOOL], thinking=THINKING).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Köln"}
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == whole["usage"]
    assert stop == {"type": "message_stop"}
    for index, block in enumerate(whole["content"]):
        own = [event for event in middle if event["index"] == index]
        assert own == middle[: len(own)], "one block after the other"
        del middle[: len(own)]
        assert [own[0]["type"], own[-1]["type"]] == ["content_block_start", "content_block_stop"]
        assert {event["type"] for event in own[1:-1]} == {"content_block_delta"}
        deltas = [event["delta"] for event in own[1:-1]]
        kinds = [delta.pop("type") for delta in deltas]
        joined = "".join(value for delta in deltas for value in delta.values())
        if block["type"] == "text":
            assert (set(kinds), joined) == ({"text_delta"}, block["text"])
        elif block["type"] == "thinking":
            assert (kinds.count("signature_delta"), kinds[-1]) == (1, "signature_delta")
            assert joined == block["thinking"] + block["signature"]
        else:
            assert (set(kinds), json.loads(joined)) == ({"input_json_delta"}, block["input"])
            assert own[0]["content_block"]["input"] == {}
    assert middle == []


def test_thinking_only_when_asked(serve: Serve) -> None:
    live = start(serve, QWEN3, "Four.")
    for thinking in (None, {"type": "disabled"}):
        send(live, thinking=thinking)
        assert live.prompt_text().endswith("</think>\n\n")
    live.engine.answer = "<think>\nHm.\n</think>\n\nFour."
    assert [block["type"] for block in send(live).json()["content"]] == ["text"]
    body = send(live, thinking={"type": "enabled", "budget_tokens": 1024}).json()
    assert not live.prompt_text().endswith("</think>\n\n")
    assert [block["type"] for block in body["content"]] == ["thinking", "text"]
    assert [warning.partition(":")[0] for warning in body["warnings"]] == ["thinking.budget_tokens"]


def test_blocks_as_the_template_sees_them(serve: Serve) -> None:
    live = start(serve, HERMES, "Sunny.")
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Köln"}},
            {"type": "tool_use", "id": "2", "name": "weather", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "sunny"},
            {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "no"}], "is_error": True},
            {"type": "text", "text": "So?"},
        ]},
    ]  # fmt: skip
    response = send(live, messages, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}])
    assert "warnings" not in response.json()
    calls = CALL + CALL.replace('{"city": "Köln"}', "{}")
    assert live.prompt_text() == (
        "<|im_start|>system\nBe\nbrief.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\nI look.{calls}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nError: no\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_beginning_of_an_answer_is_continued(live: Live) -> None:
    send(live, [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}])
    assert live.prompt_text().endswith("<|im_start|>assistant\nIt is")


def test_tools(serve: Serve) -> None:
    live = start(serve, HERMES, CALL + CALL)
    body = send(live, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json()
    assert [block["type"] for block in body["content"]] == ["tool_use"]
    assert '"description": "Today\'s"' in live.prompt_text()
    body = send(live, tools=[TOOL], tool_choice={"type": "none"}).json()
    assert [block["type"] for block in body["content"]] == ["text"]
    live.engine.answer = '<tool_call>{"name": "weather", "arguments": {"a": }}</tool_call>'
    body = send(live, tools=[TOOL]).json()
    assert body["content"][0]["input"] == {"INVALID_JSON": '{"a": }'}


def test_counting(live: Live) -> None:
    body: dict[str, Any] = {"model": "toy", "system": "Be.", "messages": [{"role": "user", "content": "Hi"}]}
    counted = live.post(f"{PATH}/count_tokens", **body).json()
    usage = live.post(PATH, max_tokens=3, **body).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert live.post(f"{PATH}/count_tokens", **body | {"model": "x"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].source: is required",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages[0].content[0]: must be a block"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: is required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages: must contain text",
        ),
        ({"temperature": -1}, "temperature must be"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]."),
        ({"timeout_ms": 10**400}, "timeout_ms: "),
        ({"container": "c"}, "container: is not supported yet"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort: "),
    ],
)
def test_bad_requests(live: Live, body: dict[str, Any], words: str) -> None:
    response = send(live, **body)
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["type", "error"]
    error = response.json()["error"]
    assert (response.json()["type"], error["type"]) == ("error", "invalid_request_error")
    assert error["message"].startswith(words), error


def test_errors(live: Live) -> None:
    assert send(live, model="claude").json()["error"]["type"] == "not_found_error"
    assert live.http.get(PATH).json()["type"] == "error"
    live.engine.fail_after = 2
    assert send(live).json()["error"]["type"] == "api_error"
    found = events(live)
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"


def test_keys(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("sesame",)))
    response = send(live)
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    with connect(live, "sesame") as client:
        client.messages.create(model="toy", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])
    with connect(live, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="toy", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])


def test_the_official_client(serve: Serve) -> None:
    live = start(serve, QWEN3, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    tools: Any = [TOOL]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    messages: Any = [{"role": "user", "content": "Hi"}]
    with connect(live) as client:
        with client.messages.stream(
            model="toy", max_tokens=400, messages=messages, tools=tools, thinking=thinking
        ) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "I look."
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.stop_reason == "tool_use"
        assert final.content[2].type == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "sun"}
        messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
        live.engine.answer = "Sunny."
        again = client.messages.create(model="toy", max_tokens=400, messages=messages, tools=tools, thinking=thinking)
        assert again.content[0].type == "text"
        assert "<tool_response>\nsun\n" in live.prompt_text()
        counted = client.messages.count_tokens(model="toy", messages=messages, tools=tools, thinking=thinking)
        assert counted.input_tokens == again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude", max_tokens=5, messages=messages)
        live.engine.fail_after = 2
        with (
            pytest.raises(anthropic.APIStatusError, match="engine failed"),
            client.messages.stream(model="toy", max_tokens=9, messages=messages) as stream,
        ):
            stream.get_final_message()


def test_leaving(live: Live) -> None:
    live.engine.holds_after = 3
    with connect(live) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        with client.messages.stream(model="toy", max_tokens=400, messages=messages) as stream:
            next(iter(stream))
        live.wait_idle()


@pytest.mark.parametrize(
    "system",
    [
        lambda line: f"{line}\nBe brief.",
        lambda line: [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}],
    ],
)
def test_a_changing_billing_line_is_no_part_of_the_prompt(live: Live, system: Callable[[str], Any]) -> None:
    """Claude Code's: with it no prompt would begin like the one before."""
    prompts = []
    for version in ("2.1.197.123", "2.1.197.9f0"):
        send(live, system=system(f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=sdk-cli;"))
        prompts.append(live.prompt_text())
    assert (
        prompts
        == ["<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"] * 2
    )
    send(live, system="Say x-anthropic-billing-header: once.")
    assert "x-anthropic-billing-header" in live.prompt_text(), "elsewhere it is text"


def test_threads_are_refused_as_the_client_understands(serve: Serve) -> None:
    """Its tool runner asks for a thread, and sends the whole conversation when there is none."""
    live = start(serve, HERMES, CALL)

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Today's.

        Args:
            city: where
        """
        live.engine.answer = "Sunny."
        return f"sun in {city}"

    with connect(live) as client:
        messages: Any = [{"role": "user", "content": "Weather?"}]
        runner = client.beta.messages.tool_runner(model="toy", max_tokens=200, tools=[weather], messages=messages)
        last = runner.until_done()
        assert [block.text for block in last.content if block.type == "text"] == ["Sunny."]
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.beta.messages.create(
                model="toy",
                max_tokens=5,
                messages=messages,
                thread={"type": "continue", "previous_message_id": "msg_1"},
            )
    assert CALL in live.prompt_text(), "the turn before is there"
    assert "sun in Köln" in live.prompt_text()
    error: Any = caught.value.body
    assert error["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}


STERN = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{%- endif %}{%- if loop.previtem is defined and loop.previtem.role == m.role %}{{ raise_exception('alternate') }}"
    "{%- endif %}{{ '[' + m.role + ']' + m.content }}{%- endfor %}"
)


def test_a_template_that_takes_one_system_message(serve: Serve) -> None:
    """Claude Code has some in the middle, which many models' templates refuse."""
    live = start(serve, STERN, "Hi.")
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    body = send(live, messages, system="Be brief.").json()
    assert live.prompt_text() == "[system]Be brief.[user]a\n\nb\n\nc"
    assert [each.partition(": ")[0] for each in body["warnings"]] == ["messages", "messages"]
    assert "system messages at the beginning" in body["warnings"][0]
    assert "merged" in body["warnings"][1]
    items = [{"role": "developer", "content": "x"}, {"role": "developer", "content": "y"}, *messages]
    assert live.post("/v1/responses", input=items).json()["warnings"][0].startswith("input: ")
    assert live.prompt_text() == "[system]x\n\ny[user]a\n\nb\n\nc"
    assert "warnings" not in send(live, "a", system="Be brief.").json()
    assert live.post("/v1/chat/completions", messages=messages).json()["warnings"][0].startswith("messages: ")
    assert live.prompt_text() == "[user]a\n\nb\n\nc"
    strict = start(serve, STERN, "Hi.", ServerConfig(strict=True))
    assert send(strict, messages).status_code == 400
