"""Ollama's API, as its own client and its desktop tools speak it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from engine.models.families import read_spec
from engine.processing.stored_weights import StoredWeights
from server.apis.ollama.handler import written_count
from server.settings import ServerConfig
from tests.support.fake_engine import ANSWER, FakeEngine, GrammarEngine, embedding_of, make_tokenizer
from tests.support.live_server import Live, run_server
from tests.support.templates import HERMES
from tests.support.tiny_model import write_model

HELLO = [{"role": "user", "content": "Hi"}]
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def client(live: Live) -> Iterator[ollama.Client]:
    with ollama.Client(f"http://127.0.0.1:{live.port}") as client:
        yield client


@pytest.fixture(scope="module")
def calling() -> Iterator[Live]:
    """A model that calls a tool."""
    with run_server(FakeEngine(template=HERMES)) as live:
        live.engine.answer = CALL
        yield live


def prompt_of(live: Live) -> str:
    assert live.engine.tokenizer is not None
    return live.engine.tokenizer.decode(live.engine.requests[-1][1], False)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat(live: Live, client: ollama.Client) -> None:
    answer = client.chat("toy:latest", [{"role": "system", "content": "Be brief."}, *HELLO])
    assert answer.model == "toy:latest"
    assert (answer.message.role, answer.message.content, answer.message.thinking) == ("assistant", ANSWER, None)
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count == len(make_tokenizer().encode(ANSWER)) + 1
    assert answer.prompt_eval_count == len(live.engine.requests[-1][1])
    assert answer.total_duration is not None
    assert answer.eval_duration is not None
    assert answer.total_duration >= answer.eval_duration > 0
    assert "system\nBe brief." in prompt_of(live)


def test_a_stream_is_lines_of_json(live: Live) -> None:
    response = live.post("/api/chat", model="toy", messages=HELLO)
    *first, last = lines(response)
    assert "".join(line["message"]["content"] for line in first) == ANSWER
    assert len(first) > 10
    assert {line["done"] for line in first} == {False}
    assert {line["created_at"][-1] for line in first} == {"Z"}
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["done_reason"] == "stop"
    assert last["eval_count"] == live.engine.ended[live.engine.requests[-1][0]]


def test_lines_of_text_are_written_as_all_others() -> None:
    name = 'org/100%s "x"'
    with run_server(FakeEngine(), served_model_names=[name]) as named:
        for path, said in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "Hi"})):
            plain = lines(named.post(path, model=name, **said))
            detailed = lines(named.post(path, model=name, **said, logprobs=True))
            for line in detailed:
                line.pop("logprobs", None)
            for line in (*plain, *detailed):
                assert line.pop("created_at")
            texts = [line.get("response", line.get("message", {}).get("content")) for line in plain]
            assert "".join(texts) == ANSWER
            assert plain[0].keys() == detailed[0].keys()
            assert {str({**line, "response": "", "message": ""}) for line in plain[:-1]} == {
                str({**line, "response": "", "message": ""}) for line in detailed[:-1]
            }
            assert plain[0]["model"] == name


def test_the_client_reads_streams(client: ollama.Client) -> None:
    parts = list(client.generate("toy", "Hi", stream=True))
    assert "".join(part.response or "" for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_options(live: Live, client: ollama.Client) -> None:
    options = {"num_predict": 5, "temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4, "num_ctx": 4096,
               "repeat_penalty": 1.5, "repeat_last_n": 64, "stop": ["never"], "num_gpu": 1, "mirostat": 0}  # fmt: skip
    answer = client.generate("toy", "Hi", options=options, keep_alive="5m")
    assert (answer.done_reason, answer.eval_count) == ("length", 5)
    sampling = live.engine.requests[-1][2]
    found = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed)
    assert found == (0, 3, 0.5, 0.1, 4)
    assert (sampling.repetition_penalty, sampling.stop_strings) == (1.5, ["never"])
    client.generate("toy", "Hi", options={"num_predict": -1, "seed": -1})
    assert live.engine.requests[-1][2].max_tokens == 512 - len(live.engine.requests[-1][1])
    assert live.engine.requests[-1][2].seed is None


def test_what_has_no_effect_is_named(live: Live) -> None:
    body = {"model": "toy", "prompt": "Hi", "options": {"mirostat": 2, "num_ctx": 8}, "shift": True}
    answer = live.post("/api/generate", **body, stream=False).json()
    assert answer["warnings"] == ["shift: has no effect here", "options.mirostat: has no effect here"]
    assert lines(live.post("/api/generate", **body))[-1]["warnings"] == answer["warnings"]


def test_a_prompt_is_a_conversation_unless_it_is_raw(live: Live, client: ollama.Client) -> None:
    client.generate("toy", "Hi", system="Be brief.")
    assert prompt_of(live) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = client.generate("toy", "Once upon", raw=True)
    assert (prompt_of(live), answer.response) == ("Once upon", ANSWER)


def test_without_a_chat_template_a_prompt_is_continued(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(template=None))
    assert live.post("/api/generate", model="toy", prompt="Hi", system="S", stream=False).json()["response"] == ANSWER
    assert prompt_of(live) == "S\n\nHi"
    refused = live.post("/api/chat", model="toy", messages=HELLO)
    assert (refused.status_code, "no chat template" in refused.json()["error"]) == (400, True)


def test_log_probabilities(client: ollama.Client) -> None:
    answer = client.chat("toy", HELLO, logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert answer.logprobs is not None
    assert [len(each.top_logprobs or ()) for each in answer.logprobs] == [2, 2, 2]
    parts = list(client.generate("toy", "Hi", stream=True, logprobs=True, options={"num_predict": 3}))
    assert sum(len(part.logprobs or ()) for part in parts) == 3


def test_thinking(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(template=THINKS))
    live.engine.answer = "<think>Hm.</think>Yes."
    with ollama.Client(f"http://127.0.0.1:{live.port}") as client:
        answer = client.chat("toy", HELLO, think=True)
        assert (answer.message.thinking, answer.message.content) == ("Hm.", "Yes.")
        parts = list(client.chat("toy", HELLO, think=True, stream=True))
        assert "".join(part.message.thinking or "" for part in parts) == "Hm."
        assert "".join(part.message.content or "" for part in parts) == "Yes."
        generated = client.generate("toy", "Hi", think=True)
        assert (generated.thinking, generated.response) == ("Hm.", "Yes.")
        live.engine.answer = "No."
        assert client.chat("toy", HELLO, think=False).message.content == "No."
        assert prompt_of(live).endswith("</think>\n\n")
        assert "thinking" in (client.show("toy").capabilities or [])


def test_tools(calling: Live) -> None:
    with ollama.Client(f"http://127.0.0.1:{calling.port}") as client:
        answer = client.chat("toy", HELLO, tools=[WEATHER])
        parts = list(client.chat("toy", HELLO, tools=[WEATHER], stream=True))
    for message in (answer.message, next(part.message for part in parts if part.message.tool_calls)):
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    assert answer.message.content == "Let me see."
    assert "".join(part.message.content or "" for part in parts) == "Let me see."
    assert sum(len(part.message.tool_calls or ()) for part in parts) == 1
    assert answer.done_reason == parts[-1].done_reason == "stop"


def test_a_call_that_is_cut_is_none(calling: Live) -> None:
    num_predict = len(make_tokenizer().encode(CALL)) - 20
    for stream in (False, True):
        body = {"messages": HELLO, "tools": [WEATHER], "options": {"num_predict": num_predict}, "stream": stream}
        response = calling.post("/api/chat", model="toy", **body)
        for line in response.text.splitlines():
            assert "tool_calls" not in json.loads(line)["message"]
        assert json.loads(response.text.splitlines()[-1])["done_reason"] == "length"


@pytest.mark.parametrize("arguments", [r'{"city": "\ud800"}', '{"city": NaN}', '{"city": 1e999}'])
@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_no_answer_could_hold(serve: Callable[..., Live], arguments: str, stream: bool) -> None:
    """Models write what JSON forbids. Anthropic's clients get objects, too."""
    live = serve(FakeEngine(template=HERMES, max_model_len=2048))
    for call in ('{"name": "weather", "arguments": %s}', '{"arguments": %s, "name": "weather"}'):
        live.engine.answer = f"<tool_call>\n{call % arguments}\n</tool_call>"
        response = live.post("/api/chat", model="toy", messages=HELLO, tools=[WEATHER], stream=stream)
        last = json.loads(response.text.splitlines()[-1])
        assert (last["done"], last["done_reason"]) == (True, "stop")
        tool = {"name": "weather", "input_schema": {"type": "object"}}
        body = {"model": "toy", "max_tokens": 500, "messages": HELLO, "tools": [tool], "stream": stream}
        assert '"error"' not in live.post("/v1/messages", **body).text
        tools = [{"type": "function", "function": WEATHER["function"]}]
        assert '"error"' not in live.chat(tools=tools, stream=stream, max_tokens=500).text


def test_results_of_tools_answer_the_calls_before_them(serve: Callable[..., Live]) -> None:
    template = (
        "<tool_call>{% for m in messages %}{{ m.role }}"
        "{% for c in m.tool_calls or [] %} {{ c.id }}:{{ c.function.arguments.n }}"
        "{% endfor %}{% if m.role == 'tool' %} {{ m.tool_call_id }}={{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    live = serve(FakeEngine(template=template))
    calls = [{"function": {"name": name, "arguments": {"n": n}}} for n, name in enumerate("aba")]
    results = [{"role": "tool", "tool_name": name, "content": name * 2} for name in "aab"]
    body = {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}, *results]}
    live.post("/api/chat", model="toy", **body, stream=False).raise_for_status()
    *_, first, second, third, _ = prompt_of(live).split("\n")
    assert (first, second, third) == ("tool call_1_0=aa", "tool call_1_2=aa", "tool call_1_1=bb")


@pytest.mark.parametrize("format", ["json", WEATHER["function"]["parameters"]])  # type: ignore[index]
def test_format(serve: Callable[..., Live], format: Any) -> None:
    live = serve(GrammarEngine())
    live.engine.answer = '{"city": "Oslo"}'
    for path, more in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "Hi"})):
        body = live.post(path, model="toy", **more, format=format, stream=False, options={"seed": 1}).json()
        text = body["message"]["content"] if "message" in body else body["response"]
        assert isinstance(json.loads(text), dict)
        if format != "json":
            assert "city" in json.loads(text)


def test_embeddings(live: Live, client: ollama.Client) -> None:
    tokenizer = make_tokenizer()
    found = client.embed("toy", ["abc", "d"])
    for text, vector in zip(["abc", "d"], found.embeddings, strict=True):
        _, pooling, _ = live.engine.embedded[0]
        assert list(vector) == pytest.approx(embedding_of(tokenizer.encode(text), pooling), abs=1e-6)
    assert found.prompt_eval_count == 4
    assert len(client.embed("toy", "abc", dimensions=3).embeddings[0]) == 3
    assert list(client.embed("toy", []).embeddings) == []
    client.embed("toy", "x" * 2000)
    assert len(live.engine.embedded[-1][0]) == 512, "truncated to the context"
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed("toy", "x" * 2000, truncate=False)
    old = client.embeddings("toy", "abc").embedding
    assert sum(value * value for value in old) != pytest.approx(1, abs=0.01)


def test_what_is_served(live: Live, client: ollama.Client) -> None:
    (tag,) = client.list().models
    assert tag.model == "toy:latest"
    (running,) = client.ps().models
    assert (running.model, running.context_length) == ("toy:latest", 512)
    shown = client.show(tag.model)
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo == {"general.architecture": "toy", "toy.context_length": 512}
    assert live.post("/api/show", name="toy").status_code == 200
    live.engine.generates = False
    assert client.show("toy").capabilities == ["embedding"]
    version = live.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "what VS Code asks for"


def test_a_model_is_loaded_by_an_empty_request(live: Live, client: ollama.Client) -> None:
    assert client.generate("toy").done_reason == "load"
    answer = live.post("/api/chat", model="toy", keep_alive=0)
    assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "load")
    assert live.post("/api/chat", model="other").status_code == 404
    assert not live.engine.requests


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat", {"model": "other", "messages": HELLO}, 404, "does not exist"),
        ("chat", {"messages": HELLO}, 400, "model: is required"),
        ("chat", {"messages": "Hi"}, 400, "messages: "),
        (
            "chat",
            {"messages": [{**HELLO[0], "images": ["aGk="]}]},
            400,
            "reads text only",
        ),
        ("generate", {"prompt": "Hi", "images": ["aGk="]}, 400, "reads text only"),
        ("generate", {"prompt": "Hi", "suffix": "x"}, 400, "suffix: is not supported yet"),
        ("generate", {"prompt": "Hi", "context": [1]}, 400, "context: is not supported yet"),
        ("generate", {"prompt": "Hi", "options": {"temperature": -1}}, 400, "options.temperature must be"),
        ("generate", {"prompt": "Hi", "options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty must be"),
        ("generate", {"prompt": "Hi", "format": "xml"}, 400, 'format: must be "json" or a JSON schema'),
        ("generate", {"prompt": "Hi", "format": {"type": "none such"}}, 400, "format: "),
        ("generate", {"prompt": "Hi", "think": "deeply"}, 400, "think: must be"),
        ("generate", {"prompt": "x" * 600}, 400, "maximum context length"),
        ("embed", {"input": 5}, 400, "input: must be"),
        ("pull", {"model": "llama3"}, 501, "does not manage models"),
        ("delete", {"model": "toy"}, 501, "does not manage models"),
    ],
)
def test_errors_are_a_text(live: Live, path: str, body: dict[str, Any], status: int, message: str) -> None:
    named = body if "model" in body or message.startswith("model") else {"model": "toy", **body}
    response = live.post(f"/api/{path}", **named)
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert message in response.json()["error"]


def test_models_cannot_be_removed(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not manage models") as caught:
        client.delete("toy")
    assert caught.value.status_code == 501


def test_an_error_ends_a_stream(live: Live, client: ollama.Client) -> None:
    live.engine.fail_after = 3
    with pytest.raises(ollama.ResponseError, match="the engine failed on this request"):
        list(client.chat("toy", HELLO, stream=True))


def test_a_client_that_hangs_up_ends_its_request(live: Live, client: ollama.Client) -> None:
    live.engine.holds_after = 3
    stream = client.chat("toy", HELLO, stream=True)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    live.wait_idle()
    (tokens,) = live.engine.ended.values()
    assert tokens < len(ANSWER)


def test_keys_guard_it(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("sesame",)))
    for path in ("tags", "ps", "version"):
        assert live.http.get(f"/api/{path}").status_code == 401
    assert live.post("/api/chat", model="toy", messages=HELLO).json() == {"error": "Unauthorized"}
    with ollama.Client(f"http://127.0.0.1:{live.port}", headers={"Authorization": "Bearer sesame"}) as client:
        assert client.chat("toy", HELLO).message.content == ANSWER


def test_a_proxy_may_serve_the_other_apis_below_api(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(root_path="/api"))
    assert live.post("/v1/chat/completions").json()["error"]["type"] == "BadRequestError"


def test_what_curl_sends_without_a_header_is_json(live: Live) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "toy", "messages": HELLO, "stream": False})
    answer = live.http.post("/api/chat", content=body, headers=form).json()
    assert answer["message"]["content"] == ANSWER
    browser = {**form, "Origin": f"http://127.0.0.1:{live.port}"}
    assert live.http.post("/api/chat", content=body, headers=browser).status_code == 400
    assert live.http.post("/v1/chat/completions", content=body, headers=form).status_code == 400


def test_figures_of_the_weights(serve: Callable[..., Live], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    engine = FakeEngine()
    engine.weights = StoredWeights(folder, read_spec(folder, {}), device="cpu")
    live = serve(engine)
    size = (folder / "model.safetensors").stat().st_size
    (tag,), (running,) = (live.http.get(f"/api/{path}").json()["models"] for path in ("tags", "ps"))
    shown = live.post("/api/show", model="toy").json()
    assert (tag["size"], running["size"], running["size_vram"]) == (size, size, 0)
    for details in (tag["details"], running["details"], shown["details"]):
        found = [details[name] for name in ("format", "parameter_size", "quantization_level")]
        assert found == ["safetensors", "93.25K", "F32"]
    assert shown["model_info"]["general.parameter_count"] == engine.weights.num_parameters


@pytest.mark.parametrize(("number", "text"), [(8_030_261_248, "8.0B"), (134_515_008, "134.52M"), (999, "1.00K")])
def test_numbers_of_parameters(number: int, text: str) -> None:
    assert written_count(number) == text
