"""The API reference: every endpoint is described, every example works, the page needs nothing from elsewhere."""

import json
import re
from array import array
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.classifier import Classifier
from server.apis.endpoint import MODEL, Endpoint
from server.app import APIS
from server.http.auth import PROBES
from server.settings import ServerConfig
from tests.oracles.random_adapters import random_adapter, write_adapter
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, run_server, wait_until
from tests.support.templates import HERMES

ENDPOINTS = [endpoint for api in APIS for endpoint in api.endpoints]
NAME = 'org/"one"'


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of an adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    shapes = {"model.layers.0.self_attn.q_proj": (8, 8)}
    write_adapter(folder / "sql", {}, random_adapter(shapes, 2, torch.Generator().manual_seed(0)))
    return folder


@pytest.fixture(scope="module")
def described(adapters: Path) -> Iterator[Live]:
    engine = FakeEngine(template=HERMES, max_model_len=2048)
    engine.max_loras = 1
    settings = ServerConfig(lora_folder=str(adapters))
    with run_server(engine, settings, served_model_names=[NAME, MODEL]) as live:
        yield live


def test_every_endpoint_is_described(described: Live) -> None:
    schema = described.http.get("/openapi.json").json()
    there = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    assert there == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert {"summary", "tags", "responses"} <= operation.keys(), (method, path)
            assert "422" not in operation["responses"]
            in_path = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"]
            assert sorted(in_path) == sorted(name.partition(":")[0] for name in re.findall(r"{(.+?)}", path))
            assert ("security" in operation) is (path not in PROBES)
    references = re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(schema))
    assert set(references) <= schema["components"]["schemas"].keys()
    fields = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert all("description" in field for name, field in fields.items() if name != "messages")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: f"{each.method} {each.path}")
def test_examples(described: Live, adapters: Path, endpoint: Endpoint) -> None:
    schema = described.http.get("/openapi.json").json()
    operation = schema["paths"][endpoint.path][endpoint.method.lower()]
    examples = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("examples", {})
    assert examples.keys() == endpoint.requests.keys()
    described.engine.generates = endpoint.tag != "Scores"
    described.engine.classifier = (
        Classifier([array("f", [1] * 8)], ["A"], "sigmoid") if "classify" in endpoint.path else None
    )
    conversation = described.post("/v1/conversations").json()["id"]
    if "unload" in endpoint.path:
        described.post("/v1/load_lora_adapter", lora_name="sql", lora_path=str(adapters / "sql"))
    for title, example in examples.items():
        body = example["value"]
        assert body.get("model", NAME) == NAME
        path = endpoint.path.replace("{conversation_id}", conversation)
        if "lora_path" in body:
            body = body | {"lora_path": str(adapters / Path(body["lora_path"]).name)}
        response = described.post(path, **body)
        assert response.status_code == 200, (title, response.text)
        kind = response.headers["content-type"].partition(";")[0]
        documented = operation["responses"]["200"]["content"][kind]
        assert "x-quire-warnings" not in response.headers
        if body.get("stream"):
            assert set(re.findall("^event: .*", documented["example"], re.M)) <= set(
                re.findall("^event: .*", response.text, re.M)
            )
        elif kind == "text/plain":
            assert response.text == documented["example"]
        else:
            assert set(documented["schema"]["required"]) <= response.json().keys()
            if title == next(iter(examples)):
                assert_same_shape(documented["example"], response.json())
    if endpoint.method == "GET" and "{" not in endpoint.path:
        response = described.http.get(endpoint.path)
        assert response.status_code == 200
        if endpoint.answer is not None:
            assert_same_shape(endpoint.answer, response.json())


def assert_same_shape(example: Any, answer: Any) -> None:
    """Check that the answer has all fields of the example."""
    if isinstance(example, dict):
        for name, value in example.items():
            assert_same_shape(value, answer[name])
    elif isinstance(example, list) and example:
        assert_same_shape(example[0], answer[0])
    elif example is not None and answer is not None:
        assert isinstance(answer, (int, float) if isinstance(example, (int, float)) else type(example))


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        self.links += [values[name] for name in ("href", "src") if name in values]
        if "id" in values:
            assert values["id"] not in self.ids
            self.ids.add(values["id"])


def test_the_page(described: Live) -> None:
    response = described.http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    reader = Reader()
    reader.feed(response.text)
    assert not reader.tags & {"script", "style", "iframe", "img"}
    for link in reader.links:
        if link.startswith("#"):
            assert link[1:] in reader.ids, link
        else:
            assert described.http.get("/" + link).status_code == 200, link
    for endpoint in ENDPOINTS:
        assert endpoint.path in response.text
    assert "org/&quot;one&quot;" not in response.text, "it is JSON within JSON"
    assert "org/\\&quot;one\\&quot;" in response.text
    hostile = described.http.get("/docs", headers={"Host": "<script>x"})
    assert "<script>" not in hostile.text
    assert described.http.get("/redoc").status_code == 404


def test_load(described: Live, serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("k",)))
    live.engine.holds_after = 3
    assert live.http.get("/v1/load").status_code == 401
    headers = {"Authorization": "Bearer k"}
    idle = live.http.get("/load", headers=headers).json()
    assert (idle["server_load"], idle["num_free_blocks"]) == (0, 32)
    body = {"prompt": "Hi", "stream": True, "max_tokens": 300, "n": 2, "ignore_eos": True}
    with live.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        chunks = response.iter_raw()
        next(chunks)
        wait_until(lambda: all(len(tokens) == 3 for tokens in live.engine.active.values()))
        busy = live.http.get("/v1/load", headers=headers).json()
        assert busy.keys() == idle.keys()
        assert (busy["server_load"], busy["num_requests_running"], busy["num_requests_waiting"]) == (1, 2, 0)
        assert busy["kv_cache_usage"] == 2 / 32
    live.wait_idle()
    assert live.http.get("/load", headers=headers).json()["server_load"] == 0
