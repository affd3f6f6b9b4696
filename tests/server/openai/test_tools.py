"""Tools and reasoning over HTTP: what goes into the prompt and what comes out, whole and streamed."""

import json
from typing import Any

import openai
import pytest

from server.settings import ServerConfig
from tests.support.fake_engine import GrammarEngine, make_tokenizer
from tests.support.live_server import Live, Serve
from tests.support.live_server import start_answering as start
from tests.support.templates import HERMES, LLAMA3, MISTRAL, QWEN3, THINKER
from tests.support.tool_templates import SHAPES

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "time"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\nFour."


def streamed(live: Live, **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the deltas make up, and the chunks."""
    lines = live.chat(stream=True, **body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    message: dict[str, Any] = {"calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    message[name] = message.get(name, "") + value
                    continue
                (call,) = value
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    assert call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                else:
                    assert list(call) == ["index", "function"]
                    assert list(call["function"]) == ["arguments"]
                message["calls"][call["index"]][1] += call["function"]["arguments"]
    return message, chunks


FORMS = [
    (HERMES, f"I look.\n{CALL}\n{CALL}", "I look.", 2),
    (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}]', None, 1),
    (LLAMA3, '{"name": "weather", "parameters": {"city": "Köln"}}', None, 1),
]


@pytest.mark.parametrize(("template", "answer", "content", "num_calls"), FORMS, ids=["hermes", "mistral", "llama3"])
def test_calls(serve: Serve, template: str, answer: str, content: str | None, num_calls: int) -> None:
    live = start(serve, template, answer)
    choice = live.chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == content
    assert len(message["tool_calls"]) == num_calls
    assert len({call["id"] for call in message["tool_calls"]}) == num_calls
    for call in message["tool_calls"]:
        assert call["type"] == "function"
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    parts, chunks = streamed(live, tools=TOOLS)
    assert parts["calls"] == [["weather", '{"city": "Köln"}']] * num_calls
    assert parts["content"] == (content or "")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert len(chunks) > 15 * num_calls, "the arguments are streamed as they come"
    # The call and its result go back into the prompt.
    messages = [
        {"role": "user", "content": "Weather?"},
        message | {"tool_calls": message["tool_calls"][:1]},
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"},
    ]
    assert live.post("/v1/chat/completions", messages=messages, tools=TOOLS).status_code == 200
    assert '"city": "Köln"' in live.prompt_text()
    assert "sunny" in live.prompt_text()


def test_what_the_template_is_shown(serve: Serve) -> None:
    live = start(serve, HERMES, "Hi")
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": True, "x-note": [1]}, "cache": {}}  # type: ignore[dict-item]
    response = live.chat(tools=[tool])
    assert "warnings" not in response.json(), "the template may use what the server does not know"
    assert json.dumps(tool, ensure_ascii=False) in live.prompt_text()


def test_choices_of_tools(serve: Serve) -> None:
    live = start(serve, HERMES, f"Hi {CALL}{CALL}")
    choice = live.chat(tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == f"Hi {CALL}{CALL}"
    assert choice["finish_reason"] == "stop"
    choice = live.chat(tools=TOOLS, tool_choice="auto", parallel_tool_calls=False).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert len(streamed(live, tools=TOOLS, parallel_tool_calls=False)[0]["calls"]) == 1
    assert live.chat().json()["choices"][0]["message"]["content"] == f"Hi {CALL}{CALL}", "without tools all is content"
    choice = live.chat(tools=TOOLS, max_tokens=30).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_auto_can_be_turned_off(serve: Serve) -> None:
    live = start(serve, HERMES, CALL, ServerConfig(enable_auto_tool_choice=False))
    error = live.chat(tools=TOOLS).json()["error"]
    assert (error["code"], error["param"]) == (400, "tool_choice")
    live = start(serve, HERMES, CALL, ServerConfig(tool_call_parser="none"))
    answer = live.chat(tools=TOOLS).json()
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["warnings"][0].startswith("tools: the server parses no tool calls, so the answer is text")
    live = start(serve, THINKER, CALL, ServerConfig(tool_call_parser="hermes", reasoning_parser="none"))
    assert live.chat(tools=TOOLS).json()["choices"][0]["message"]["tool_calls"]


def test_an_unknown_format(serve: Serve) -> None:
    called = '[{"name": "weather", "arguments": {"city": "Köln"}}]'
    live = start(serve, THINKER, called, ServerConfig(reasoning_parser="none"))
    answer = live.chat(tools=TOOLS).json()
    assert answer["choices"][0]["message"]["content"] == called
    assert "has no known tool call format, so the answer is text" in answer["warnings"][0]
    answer = live.chat(tools=TOOLS, tool_choice="required").json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"city": "Köln"}')
    assert "so the answer is a list of JSON objects" in answer["warnings"][0]
    live = start(serve, THINKER, called, ServerConfig(strict=True))
    assert live.chat(tools=TOOLS).json()["error"]["param"] == "tools"


def test_one_call_where_the_template_takes_no_more(serve: Serve) -> None:
    call = '{"name": "weather", "parameters": {}}'
    live = start(serve, LLAMA3, f"{call}; {call}")
    assert len(live.chat(tools=TOOLS).json()["choices"][0]["message"]["tool_calls"]) == 1


def test_ids_that_the_template_would_refuse(serve: Serve) -> None:
    live = start(serve, MISTRAL, "Hi")
    messages = [
        {"role": "assistant", "tool_calls": [{"id": "call_1234", "function": {"name": "time", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "call_1234", "content": "noon"},
        {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "function": {"name": "time", "arguments": None}}]},
    ]
    assert live.post("/v1/chat/completions", messages=messages).status_code == 200
    text = live.prompt_text()
    short = text.partition('"id": "')[2][:9]
    assert f'"call_id": "{short}"' in text
    assert '"id": "abcdefghi"' in text
    assert '"arguments": {}' in text


def test_marks_that_are_special_tokens(serve: Serve) -> None:
    live = start(serve, MISTRAL, '[TOOL_CALLS][{"name": "time", "arguments": {}}]')
    live.engine.tokenizer = make_tokenizer(MISTRAL, ["[TOOL_CALLS]"])
    assert live.chat(tools=TOOLS).json()["choices"][0]["message"]["tool_calls"]
    assert live.chat().json()["choices"][0]["message"]["content"] == '[{"name": "time", "arguments": {}}]'


def test_reasoning(serve: Serve) -> None:
    for template, answer in ((QWEN3, THOUGHT), (THINKER, THOUGHT.removeprefix("<think>\n"))):
        live = start(serve, template, answer)
        body = live.chat().json()
        message = body["choices"][0]["message"]
        assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Four.", "Hm.", "Hm.")
        thought = answer.encode().index(b"</think>") + len("</think>")
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
        parts, chunks = streamed(live, stream_options={"include_usage": True})
        assert (parts["content"], parts["reasoning"], parts["reasoning_content"]) == ("Four.", "Hm.", "Hm.")
        assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
        parts, _ = streamed(live, include_reasoning=False)
        assert (parts["content"], "reasoning" in parts) == ("Four.", False)


def test_reasoning_then_calls(serve: Serve) -> None:
    live = start(serve, QWEN3, f"<think>\n{CALL}? Yes.\n</think>\n\n{CALL}")
    message = live.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["reasoning"] == f"{CALL}? Yes."
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1
    history = [{"role": "user", "content": "a"}, message, {"role": "tool", "content": "b", "tool_call_id": "1"}]
    assert live.post("/v1/chat/completions", messages=history).status_code == 200


def test_thoughts_that_never_end(serve: Serve) -> None:
    live = start(serve, THINKER, "Hm, let me see")
    message = live.chat(max_tokens=10).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("", "Hm, let me")


@pytest.mark.parametrize(
    ("body", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_reasoning_is_the_templates_matter(serve: Serve, body: dict[str, Any], thinks: bool) -> None:
    live = start(serve, QWEN3, "Four.")
    response = live.chat(**body).json()
    assert live.prompt_text().endswith("</think>\n\n") is not thinks
    assert "warnings" not in response
    assert response["choices"][0]["message"]["content"] == "Four."


def test_a_template_that_knows_no_reasoning(live: Live) -> None:
    body = live.chat(reasoning_effort="low", enable_thinking=True).json()
    assert [warning.partition(":")[0] for warning in body["warnings"]] == ["reasoning_effort", "enable_thinking"]
    assert "completion_tokens_details" not in body["usage"]


def test_the_official_client(serve: Serve) -> None:
    live = start(serve, QWEN3, f"{THOUGHT} I look.\n{CALL}\n{CALL}")
    messages: Any = [{"role": "user", "content": "Hi"}]
    tools: Any = TOOLS
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model="toy", messages=messages, tools=tools) as stream,
    ):
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Four. I look."
    assert choice.message.tool_calls is not None
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Köln"}] * 2


@pytest.mark.parametrize("cut", [{"max_tokens": 54}], ids=str)
def test_a_cut_call_is_reported_as_what_it_is(serve: Serve, cut: dict[str, Any]) -> None:
    live = start(serve, HERMES, CALL)
    (choice,) = live.chat(tools=TOOLS, **cut).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert call["function"]["name"] == "weather"
    assert '{"city": "Köln"}'.startswith(call["function"]["arguments"])
    message, chunks = streamed(live, tools=TOOLS, **cut)
    assert message["calls"] == [["weather", call["function"]["arguments"]]]
    assert message["content"] == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    response = live.post("/v1/messages", model="toy", messages=[{"role": "user", "content": "a"}],
                         tools=[{"name": "weather", "input_schema": {"type": "object"}}],
                         max_tokens=cut.get("max_tokens", 100), stop_sequences=cut.get("stop", [])).json()  # fmt: skip
    assert (response["stop_reason"], response["stop_sequence"]) == ("max_tokens", None)
    assert [block["type"] for block in response["content"]] == ["tool_use"]
    tools = [{"type": "function", **WEATHER["function"]}]  # type: ignore[dict-item]
    options = {"max_output_tokens": cut["max_tokens"]} if "max_tokens" in cut else cut
    body = live.post("/v1/responses", input="a", tools=tools, **options).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in body["output"]] == [("function_call", "incomplete")]


def test_a_call_is_whole_when_a_stop_string_follows_it(serve: Serve) -> None:
    live = start(serve, HERMES, CALL)
    (choice,) = live.chat(tools=TOOLS, stop=["</tool_call>"]).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'


@pytest.mark.parametrize(
    ("length", "tool_choice"), [(5, "auto"), (11, "auto"), (12, "auto"), (20, "auto"), (1, "required")]
)
def test_the_mark_of_a_cut_call_is_no_content(serve: Serve, length: int, tool_choice: str) -> None:
    live = start(serve, HERMES, CALL)
    (choice,) = live.chat(tools=TOOLS, tool_choice=tool_choice, max_tokens=length).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"] or "") == ("length", "")
    assert "tool_calls" not in choice["message"]


def test_odd_tools(serve: Serve) -> None:
    """One odd tool fails no request; each change is named."""
    live = start(serve, HERMES, "Hi")
    odd = [
        {"type": "function", "function": {"name": "a", "parameters": []}},
        {"type": "function", "function": {"name": "b", "parameters": {"type": "string"}}},
        {"type": "function", "function": {"name": "c", "parameters": {"properties": {"x": None}, "required": None}}},
    ]
    for choice in ("auto", "required"):
        response = live.chat(tools=[*odd, *TOOLS], tool_choice=choice)
        assert response.status_code == 200
        warnings = response.json()["warnings"]
        assert [each.partition(":")[0] for each in warnings] == ["tools[0]", "tools[1]", "tools[2]", "tools[2]"]
    assert '"name": "a", "parameters": {}' in live.prompt_text()
    live = start(serve, HERMES, "Hi", ServerConfig(strict=True))
    assert live.chat(tools=odd).json()["error"]["param"] == "tools[0]"


def test_templates_that_read_optional_fields(serve: Serve) -> None:
    read = "{{ 'is ' + t.function.description }}{{ t.function.parameters.properties | length }}"
    source = "{% for t in tools or [] %}" + read + "{% endfor %}"
    live = start(serve, source + HERMES, "Hi")
    response = live.chat(tools=[{"type": "function", "function": {"name": "f", "description": None}}])
    assert response.status_code == 200
    assert "optional fields of tools" in response.json()["warnings"][0]
    assert "warnings" not in live.chat(tools=[TOOLS[0]]).json()


# As the tool templates of Hermes 2 and 3 and of Command R write types; the last branch has no end for null.
PYTHON_TYPES = """
{%- macro python_type(spec) -%}
{%- if spec.type == "string" -%}str{%- elif spec.type == "array" -%}List[{{ python_type(spec["items"]) }}]
{%- elif spec.type == "object" -%}Dict[{{ python_type(spec.additionalProperties) }}]
{%- elif spec.type is iterable -%}Union[{% for t in spec.type %}{{ python_type({"type": t}) }}{% endfor %}]
{%- endif -%}
{%- endmacro -%}
{%- for t in tools or [] %}{% for name, spec in t.function.parameters.properties|items -%}
{{ name }}: {{ python_type(spec) }}{{ "" + spec.description }}
{% endfor %}{% endfor -%}
"""


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"type": ["string", "null"], "description": "d"}, "x: strd\n"),
        ({"type": "null"}, "x: Union[]"),
        ({"type": "array", "items": {"type": ["null", "string"]}}, "x: List[str]"),
        ({"type": "array", "items": True}, "x: List[Union[]]"),
        ({"type": "object", "properties": {}}, "x: Dict[Union[]]"),
        (True, "x: Union[]"),
    ],
)
def test_templates_that_read_few_forms_of_schemas(schema: Any, shown: str, serve: Serve) -> None:
    live = start(serve, PYTHON_TYPES + HERMES, "Hi")
    parameters = {"type": "object", "properties": {"x": schema}}
    response = live.chat(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert response.status_code == 200, response.text
    assert shown in live.prompt_text()


def test_an_answer_that_begins_inside_the_mark_of_a_call(serve: Serve) -> None:
    """Functionary's prompts end in >>>, so that its answers begin with the name of a tool."""
    live = serve(GrammarEngine(), ServerConfig(tool_call_parser="functionary_v32"))
    live.engine.answer = 'weather\n{"city": "Rome"}'
    for choice in ("auto", "required"):
        (found,) = live.chat(tools=TOOLS, tool_choice=choice, max_tokens=60).json()["choices"]
        (call,) = found["message"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"city": "Rome"}'), choice


RECIPIENTS = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '[assistant]' }}
{%- if m.content %}{{- '>>>all\\n' + m.content }}{%- endif %}
{%- for c in m.tool_calls or [] %}{{- '>>>' + c.function.name + '\\n' + c.function.arguments }}{%- endfor %}<|end|>
{%- else %}{{- '[' + m.role + ']' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- for t in tools or [] %}{{- t.function.name }}{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]>>>' }}{%- endif %}"""


def test_answers_of_parts_for_recipients(serve: Serve) -> None:
    """Functionary 3.2: what it writes to `all` is content, and every other part is a call."""
    text = "all\nOne moment.\n"
    live = start(serve, RECIPIENTS, f'{text}>>>weather\n{{"city": "Rome"}}>>>time\n{{}}')
    answer = live.chat(tools=TOOLS).json()
    message = answer["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert (message["content"], calls) == ("One moment.", [("weather", '{"city": "Rome"}'), ("time", "{}")])
    live.engine.answer = text
    for options in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        assert live.chat(**options).json()["choices"][0]["message"]["content"] == "One moment.\n"


@pytest.mark.parametrize("shape", SHAPES)
def test_formats_that_are_not_listed(serve: Serve, shape: str) -> None:
    source, text = SHAPES[shape]
    properties = {"x": {"type": "string"}, "n": {"type": "integer"}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name in ("f", "g")
    ]
    live = start(serve, source, f"Well. {text}")
    answer = live.chat(tools=tools).json()
    assert "warnings" not in answer
    (choice,) = answer["choices"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("f", {"x": "a b", "n": 3}),
        ("g", {"x": "c"}),
    ]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Well.", "tool_calls")
    parts, _ = streamed(live, tools=tools)
    assert parts["content"] == "Well."
    assert [tuple(call) for call in parts["calls"]] == calls
