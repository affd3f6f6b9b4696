"""Required forms of answers, over HTTP: a model that knows nothing obeys; what cannot be had is refused by name."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pydantic
import pytest

from server.settings import ServerConfig
from tests.support.fake_engine import GrammarEngine
from tests.support.live_server import Live, Serve, run_server
from tests.support.schemas import SUPPORTED, UNSUPPORTED
from tests.support.templates import HERMES, LLAMA3, MISTRAL, QWEN3, THINKER

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "Hi"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
            "$defs": {"city": {"enum": ["Rome", "Köln"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama3": LLAMA3, "mistral_args": MISTRAL + "[ARGS]", "qwen3": QWEN3}


@pytest.fixture(scope="module")
def hermes() -> Iterator[Live]:
    with run_server(GrammarEngine(template=HERMES)) as live:
        yield live


def format_of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def content(live: Live, path: str, body: dict[str, Any]) -> str:
    response = live.post(path, **body)
    assert response.status_code == 200, response.text
    assert "warnings" not in response.json()
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    text: str = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return text


ASKED: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ({"response_format": format_of(PERSON, strict=True, description="A person")}, lambda text: valid(text, PERSON)),
    ({"response_format": format_of(PERSON)}, lambda text: valid(text, PERSON)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, lambda text: valid(text, {})),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, lambda text: valid(text, PERSON)),
    ({"response_format": {"type": "text"}, "guided_json": json.dumps(PERSON)}, lambda text: valid(text, PERSON)),
    ({"structured_outputs": {"json": PERSON}}, lambda text: valid(text, PERSON)),
    ({"structured_outputs": {"json": {}}}, lambda text: valid(text, {})),
    ({"response_format": {"type": "json_object", "schema": {}}}, lambda text: valid(text, {})),
    ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
    ({"structured_outputs": {"regex": "[ab]{3}", "whitespace_pattern": None}}, lambda text: set(text) <= {*"ab"}),
    ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
    ({"structured_outputs": {"grammar": 'start: "<" /[a-c]/ ">"'}}, lambda text: text in ("<a>", "<b>", "<c>")),
    ({"guided_regex": r"\d\d"}, lambda text: len(text) == 2 and text.isdigit()),
    ({"guided_choice": ["one"]}, lambda text: text == "one"),
    ({"guided_grammar": 'root ::= "a" | "b"', "guided_decoding_backend": "auto"}, lambda text: text in "ab"),
]


def valid(text: str, schema: Any) -> bool:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return True


@pytest.mark.parametrize(("body", "obeys"), ASKED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_whatever_is_asked(hermes: Live, path: str, body: dict[str, Any], obeys: Callable[[str], bool]) -> None:
    start: dict[str, Any] = {"messages": ASK} if path == CHAT else {"prompt": "Hi"}
    for seed in range(4):
        asked = start | body | {"seed": seed, "max_tokens": 4000}
        text = content(hermes, path, asked)
        assert obeys(text), text
        lines = hermes.post(path, **asked, stream=True).text.split("\n\n")
        choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        pieces = [choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "") for choice in choices]
        assert "".join(pieces) == text
        assert choices[-1]["finish_reason"] == "stop"


def test_several_answers(hermes: Live) -> None:
    body = hermes.chat(response_format=format_of(PERSON), n=4, max_tokens=1000, seed=1).json()
    assert len({choice["message"]["content"] for choice in body["choices"]}) > 1
    assert all(valid(choice["message"]["content"], PERSON) for choice in body["choices"])
    body = hermes.complete(["a", "b"], guided_choice=["yes", "no"], max_tokens=10).json()
    assert all(choice["text"] in ("yes", "no") for choice in body["choices"])


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": format_of({"not": {"multipleOf": 3}})}, "response_format", ["response_format: ", "not"]),
        ({"response_format": format_of({"type": "no type"})}, "response_format", ["type"]),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["is required"]),
        ({"response_format": {"type": "xml"}}, "response_format.type", ["json_schema"]),
        ({"response_format": format_of([1])}, "response_format.json_schema.schema", ["dictionary"]),
        ({"guided_json": {"multipleOf": 1e-7}}, "guided_json", ["guided_json: multipleOf"]),
        ({"guided_json": "{"}, "guided_json", ["not valid JSON"]),
        ({"guided_json": 3}, "guided_json", ["a JSON schema"]),
        ({"guided_regex": "(?=a)"}, "guided_regex", ["guided_regex: look-ahead"]),
        ({"guided_regex": ""}, "guided_regex", ["guided_regex must not be empty"]),
        ({"guided_choice": []}, "guided_choice", ["guided_choice must not be empty"]),
        ({"guided_grammar": "start: x"}, "guided_grammar", ["guided_grammar: ", "unknown name"]),
        ({"guided_grammar": '{"grammars": []}'}, "guided_grammar", ["begins with a rule"]),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", ["unclosed group"]),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", ["regex, choice"]),
        ({"structured_outputs": {}}, "structured_outputs", ["got none"]),
        ({"structured_outputs": {"regex": "a", "structural_tag": "{}"}}, "structured_outputs.structural_tag", ["not"]),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace", ["not supported"]),
        ({"guided_json": {"type": "null"}, "guided_regex": "a"}, "guided_regex", ["together with guided_json"]),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs",
         ["together with response_format"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_refused(hermes: Live, path: str, body: dict[str, Any], param: str, words: list[str]) -> None:
    start: dict[str, Any] = {"messages": ASK} if path == CHAT else {"prompt": "Hi"}
    response = hermes.post(path, **start, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert len(error["message"]) < 600


# All of them are tried where grammars are made, in tests/structured/test_json_schema.py; here, a few on their way.
FEW_SUPPORTED = list(SUPPORTED)[:: len(SUPPORTED) // 5][:5]
FEW_UNSUPPORTED = list(UNSUPPORTED)[:: len(UNSUPPORTED) // 5][:5]


@pytest.mark.parametrize("name", FEW_SUPPORTED)
def test_supported_schemas(hermes: Live, name: str) -> None:
    response = hermes.complete(guided_json=json.dumps(SUPPORTED[name]), max_tokens=1)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("word", "schema"), [(word, UNSUPPORTED[word][0]) for word in FEW_UNSUPPORTED])
def test_unsupported_schemas(hermes: Live, word: str, schema: Any) -> None:
    given = schema if isinstance(schema, str) else json.dumps(schema)
    response = hermes.complete(guided_json=given, max_tokens=1)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


# ---- thoughts ----


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("template", [QWEN3, THINKER], ids=["qwen3", "thinker"])
def test_a_model_thinks_freely_before_it_obeys(serve: Serve, template: str, special: tuple[str, ...]) -> None:
    live = serve(GrammarEngine(template=template, special=special))
    live.engine.answer = ("<think>\n" if template is QWEN3 else "") + 'Is it {"name"? Or <tool_call>.\n</think>\n\n{"'
    message = live.chat(response_format=format_of(PERSON), max_tokens=2000).json()["choices"][0]["message"]
    assert message["reasoning"] == 'Is it {"name"? Or <tool_call>.'
    assert valid(message["content"], PERSON)
    live.engine.answer = "</think>no"
    if template is QWEN3:
        for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
            message = live.chat(response_format=format_of(PERSON), max_tokens=2000, **off).json()["choices"][0][
                "message"
            ]
            assert valid(message["content"], PERSON)
            assert message["reasoning"] is None


def test_thoughts_before_a_forced_call(serve: Serve) -> None:
    live = serve(GrammarEngine(template=QWEN3))
    live.engine.answer = "<think>Weather? <tool_call></think>\n\n"
    for choice in ("required", NAMED):
        message = live.chat(tools=[WEATHER], tool_choice=choice, max_tokens=2000).json()["choices"][0]["message"]
        assert message["reasoning"] == "Weather? <tool_call>"
        assert valid_calls(message) >= 1


# ---- tools ----


def valid_calls(message: dict[str, Any]) -> int:
    """Count the calls, which must all obey their schema."""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.loads(function["arguments"])
        if function["name"] == "weather":
            jsonschema.validate(arguments, WEATHER["function"]["parameters"])  # type: ignore[call-overload, index]
            assert arguments.keys() <= {"city", "days"}
        else:
            assert (function["name"], arguments) == ("time", {})
    return len(message.get("tool_calls") or ())


def specials(name: str) -> list[tuple[str, ...]]:
    return {"mistral": [(), ("[TOOL_CALLS]",)], "mistral_args": [("[TOOL_CALLS]", "[ARGS]")]}.get(  # type: ignore[return-value]
        name, [(), ("<tool_call>", "</tool_call>", "<|python_tag|>")]
    )


CASES = [(name, special) for name in TEMPLATES for special in specials(name)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}{'-special' * bool(case[1])}")
def family(request: pytest.FixtureRequest) -> Iterator[Live]:
    name, special = request.param
    with run_server(GrammarEngine(template=TEMPLATES[name], special=special)) as live:
        yield live


def ask(live: Live, **body: Any) -> dict[str, Any]:
    response = live.chat(tools=[WEATHER, TIME], max_tokens=3000, **body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def wants(live: Live, answer: str) -> None:
    """Let the model begin with this, after a thought if it thinks."""
    thinks = live.engine.tokenizer.chat_template == QWEN3  # type: ignore[union-attr]
    live.engine.answer = "<think>Hm.</think>" * thinks + answer


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls(family: Live, choice: Any) -> None:
    wants(family, "I had rather not.")
    most = 0
    for seed in range(8):
        found = ask(family, tool_choice=choice, seed=seed)
        assert found["finish_reason"] == "tool_calls", found
        message = found["message"]
        assert message["content"] is None
        assert valid_calls(message) >= 1
        most = max(most, len(message["tool_calls"]))
        if choice is NAMED:
            assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert most == 1 or choice == "required"
    subset = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "time"}}]}}
    assert {c["function"]["name"] for c in ask(family, tool_choice=subset)["message"]["tool_calls"]} == {"time"}


def test_calls_begun_freely(family: Live) -> None:
    template = family.engine.tokenizer.chat_template  # type: ignore[union-attr]
    marks = {LLAMA3: "<|python_tag|>", HERMES: "<tool_call>", QWEN3: "<tool_call>"}
    wants(family, "Let me look.\n" + marks.get(template, "[TOOL_CALLS]"))  # type: ignore[arg-type]
    for seed in range(6):
        found = ask(family, seed=seed)
        assert found["message"]["content"] == "Let me look."
        assert valid_calls(found["message"]) >= 1
        assert len(ask(family, seed=seed, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
        assert (
            len(ask(family, seed=seed, tool_choice="required", parallel_tool_calls=False)["message"]["tool_calls"]) == 1
        )
    wants(family, "Just <text>, {no} [calls].")
    message = ask(family, seed=1)["message"]
    assert message["content"].startswith("Just <text>, {no} [calls].")


def test_bare_objects(serve: Serve) -> None:
    live = serve(GrammarEngine(template=LLAMA3.replace("single tool-calls", "calls")))
    for head in ('{"name": "weather", "parameters": ', '\n{"type":"function","name":"weather","parameters":'):
        live.engine.answer = head
        message = ask(live)["message"]
        assert valid_calls(message) >= 1
    live.engine.answer = '{"name": "John", "age": 3}'
    assert ask(live)["message"]["content"].startswith('{"name": "John", "age": 3}')


def test_streamed_calls(family: Live) -> None:
    wants(family, "")
    lines = family.chat(tools=[WEATHER, TIME], tool_choice=NAMED, seed=3, max_tokens=3000, stream=True).text
    deltas = [json.loads(line[6:])["choices"][0] for line in lines.split("\n\n") if line.startswith("data: {")]
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for part in delta["delta"].get("tool_calls") or ():
            if "id" in part:
                calls.append({"function": {"name": part["function"]["name"], "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    assert valid_calls({"tool_calls": calls}) >= 1
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert len([delta for delta in deltas if delta["delta"].get("tool_calls")]) > 3


def test_unknown_formats_are_named(hermes: Live, serve: Serve) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": "klingon"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = hermes.chat(response_format=asked, max_tokens=3000).json()
    assert body["warnings"] == ["response_format: the format 'klingon' is not enforced: it is an annotation"]
    tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
    response = hermes.chat(tools=[tool], tool_choice="required", max_tokens=3000)
    expected = ["tools[0]: the arguments of a: the format 'klingon' is not enforced: it is an annotation"]
    assert response.json()["warnings"] == json.loads(response.headers["X-Quire-Warnings"]) == expected
    strict = serve(GrammarEngine(template=HERMES), ServerConfig(strict=True))
    error = strict.chat(response_format=asked).json()["error"]
    assert (error["code"], error["param"]) == (400, "response_format")


STRANGE = {"type": "object", "properties": {"x": {"type": "string", "not": {"multipleOf": 3}}}}


def test_tools_whose_schema_cannot_be_enforced(hermes: Live, serve: Serve) -> None:
    strange = {"type": "function", "function": {"name": "strange", "parameters": STRANGE}}
    strict = {"type": "function", "function": {**strange["function"], "strict": True}}  # type: ignore[dict-item]
    hermes.engine.answer = '<tool_call>\n{"name": "strange", "arguments": '
    body = hermes.chat(tools=[WEATHER, strange], max_tokens=3000).json()
    (warning,) = body["warnings"]
    assert warning == "tools[1]: the arguments of strange: not is not enforced"
    (call, *_) = body["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), STRANGE | {"properties": {"x": {"type": "string"}}})
    for asked in (
        {"tools": [WEATHER, strict]},
        {"tools": [WEATHER, strange], "tool_choice": "required"},
        {"tools": [WEATHER, strange], "tool_choice": {"type": "function", "function": {"name": "strange"}}},
    ):
        error = hermes.chat(**asked).json()["error"]  # type: ignore[arg-type]
        assert (error["code"], error["param"]) == (400, "tools[1]")
        assert error["message"].startswith("tools[1]: the schema of strange: ")
        assert "not" in error["message"]
    assert hermes.chat(tools=[WEATHER, strange], tool_choice=NAMED, max_tokens=3000).status_code == 200
    beyond = {**strange["function"], "parameters": {"$ref": "https://example.com/schema"}}  # type: ignore[dict-item]
    body = hermes.chat(tools=[WEATHER, {"type": "function", "function": beyond}], max_tokens=3000).json()
    assert body["warnings"][0].startswith(
        "tools[1]: the schema of strange is not enforced, its arguments may be any object: "
    )
    live = serve(GrammarEngine(template=HERMES), ServerConfig(strict=True))
    assert live.chat(tools=[WEATHER, strange]).json()["error"]["param"] == "tools[1]"
    text = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    (warning,) = hermes.chat(tools=[text], max_tokens=3000).json()["warnings"]
    assert warning.startswith("tools[0]: f: parameters: the type must be")


def test_content_by_a_schema_or_calls(hermes: Live, serve: Serve) -> None:
    hermes.engine.answer = "{"
    message = ask(hermes, response_format=format_of(PERSON))["message"]
    assert valid(message["content"], PERSON)
    hermes.engine.answer = "<tool_call>"
    message = ask(hermes, response_format=format_of(PERSON))["message"]
    assert valid_calls(message) >= 1
    assert ask(hermes, response_format=format_of(PERSON), tool_choice="required")["finish_reason"] == "tool_calls"
    hermes.engine.answer = "<tool_call>"
    assert valid(ask(hermes, response_format=format_of(PERSON), tool_choice="none")["message"]["content"], PERSON)
    live = serve(GrammarEngine(template=LLAMA3))
    error = live.chat(tools=[TIME], response_format={"type": "json_object"}).json()["error"]
    assert error["param"] == "response_format"


def test_many_tools_are_bounded(serve: Serve) -> None:
    hermes = serve(GrammarEngine(template=HERMES, max_model_len=10**7))
    hermes.engine.answer = "Hi"
    tool = {"type": "object", "properties": {"x": {"type": "string"}}}
    for number, status in ((120, 200), (600, 400)):
        tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": tool}} for i in range(number)]
        assert hermes.chat(tools=tools).status_code == status
    large = {"type": "object", "properties": {"x": {"type": "integer"}}, "x-y": "y" * 90_000}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": large}} for i in range(20)]
    assert hermes.chat(tools=tools).json()["error"]["code"] == 400


# ---- priority ----


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_priority_reaches_the_engine(hermes: Live, path: str) -> None:
    hermes.engine.priorities.clear()
    start: dict[str, Any] = {"messages": ASK} if path == CHAT else {"prompt": "Hi"}
    for priority in (-5, None, 7):
        assert hermes.post(path, **start, max_tokens=1, priority=priority).status_code == 200
    assert hermes.engine.priorities == [-5, 0, 7]
    assert hermes.post(path, **start, priority="high").json()["error"]["param"] == "priority"


# ---- the other APIs, and the official clients ----


def test_responses(hermes: Live) -> None:
    body = {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}}
    found = hermes.post(RESPONSES, **body).json()
    assert valid(found["output"][0]["content"][0]["text"], PERSON)
    assert found["text"]["format"]["schema"] == PERSON
    body["text"] = {"format": {"type": "json_object"}}
    assert isinstance(json.loads(hermes.post(RESPONSES, **body).json()["output"][0]["content"][0]["text"]), dict)
    body["text"] = {"format": {"type": "json_schema", "name": "bad", "schema": {"not": {"multipleOf": 3}}}}
    error = hermes.post(RESPONSES, **body).json()["error"]
    assert (error["code"], error["param"]) == (400, "text.format")
    assert error["message"].startswith("text.format: ")
    tools = [{"type": "function", **WEATHER["function"]}]  # type: ignore[dict-item]
    for choice in ("required", {"type": "function", "name": "weather"}):
        (call, *_) = hermes.post(RESPONSES, input="Hi", tools=tools, tool_choice=choice).json()["output"]
        assert (call["type"], call["name"]) == ("function_call", "weather")
        assert json.loads(call["arguments"])["city"] in ("Rome", "Köln")


def test_messages(hermes: Live) -> None:
    start: dict[str, Any] = {"model": "toy", "max_tokens": 3000, "messages": ASK}
    format = {"type": "json_schema", "schema": PERSON}
    for asked in ({"output_config": {"format": format}}, {"output_format": format}):
        found = hermes.post(MESSAGES, **start, **asked).json()
        assert valid(found["content"][0]["text"], PERSON)
    bad = {"format": {"type": "json_schema", "schema": {"not": {"multipleOf": 3}}}}
    response = hermes.post(MESSAGES, **start, output_config=bad)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("output_config.format: ")
    tools = [{"name": "strange", "input_schema": STRANGE, "strict": True}]
    assert "not" in hermes.post(MESSAGES, **start, tools=tools).json()["error"]["message"]


class City(pydantic.BaseModel):
    name: Literal["Rome", "Köln"]
    zip: int = pydantic.Field(ge=0, le=99999)


class Travel(pydantic.BaseModel):
    cities: list[City] = pydantic.Field(max_length=2)
    by: Literal["car", "train"] | None


class Trip(pydantic.BaseModel):  # Anthropic's client keeps bounds to itself and sends the rest
    to: Literal["Rome", "Köln"]
    by: Literal["car", "train"] | None


@pytest.fixture
def client(hermes: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{hermes.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_parses(client: openai.OpenAI, hermes: Live) -> None:
    hermes.engine.answer = ""
    messages: Any = ASK
    for seed in range(4):
        chat = client.chat.completions.parse(model="toy", messages=messages, response_format=Travel, seed=seed)
        assert isinstance(chat.choices[0].message.parsed, Travel)
        response = client.responses.parse(model="toy", input="Hi", text_format=Travel, extra_body={"seed": seed})
        assert isinstance(response.output_parsed, Travel)
    with client.chat.completions.stream(model="toy", messages=messages, response_format=Travel) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Travel)
    assert "content.done" in kinds
    with pytest.raises(openai.BadRequestError, match="not"):
        client.chat.completions.create(
            model="toy",
            messages=messages,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"multipleOf": 3}}}},
        )


def test_the_official_client_calls_tools(client: openai.OpenAI, hermes: Live) -> None:
    messages: Any = ASK
    tools: Any = [openai.pydantic_function_tool(Travel)]
    for answer, choice in (
        ("", "required"),
        ("", {"type": "function", "function": {"name": "Travel"}}),
        ("<tool_call>", "auto"),
    ):
        hermes.engine.answer = answer
        asked: Any = {"model": "toy", "messages": messages, "tools": tools, "tool_choice": choice}
        found = client.chat.completions.parse(**asked).choices[0].message.tool_calls
        assert found
        assert isinstance(found[0].function.parsed_arguments, Travel)
        with client.chat.completions.stream(**asked) as stream:
            events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert isinstance(events[0].parsed_arguments, Travel)


def test_anthropics_client(hermes: Live) -> None:
    hermes.engine.answer = ""
    tools: Any = [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}]  # type: ignore[index]
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{hermes.port}", api_key="none", max_retries=0) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            asked: Any = {"model": "toy", "max_tokens": 2000, "messages": ASK, "tools": tools, "tool_choice": choice}
            message = client.messages.create(**asked)
            assert message.stop_reason == "tool_use"
            block: Any = message.content[0]
            assert block.input["city"] in ("Rome", "Köln")
            with client.messages.stream(**asked) as stream:
                final: Any = stream.get_final_message().content[0]
            assert final.input["city"] in ("Rome", "Köln")
        start: Any = {"model": "toy", "max_tokens": 2000, "messages": ASK}
        assert isinstance(client.messages.parse(**start, output_format=Trip).parsed_output, Trip)
