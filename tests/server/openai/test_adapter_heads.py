"""Adapters with a classifier's head over HTTP: the model generates text, and each of them labels or scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from engine.core.params.pooling import PoolingParams
from server.app import create_app
from server.settings import ServerConfig
from tests.oracles.random_adapters import random_adapter, write_adapter
from tests.support.fake_engine import HIDDEN_SIZE, FakeEngine, embedding_of

HEAD = torch.linspace(-1, 1, 3 * HIDDEN_SIZE).reshape(3, HIDDEN_SIZE)
ROWS = {"plain": 0, "relevant": 1, "topics": 3}  # name of an adapter → labels


def write(folder: Path, num_labels: int, **tensors: torch.Tensor) -> None:
    """Write an adapter with a head of so many labels; 0: without one."""
    tensors |= random_adapter({"model.layers.0.self_attn.q_proj": (8, 8)}, 2, torch.Generator().manual_seed(0))
    write_adapter(folder, {}, tensors | ({"score.weight": HEAD[:num_labels]} if num_labels else {}))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[TestClient, FakeEngine]]:
    """A model with three adapters that has none when it starts: they are found in the folder of adapters."""
    for name, count in ROWS.items():
        write(tmp_path / "adapters" / name, count)
    keys = tmp_path / "keys"
    keys.write_text("alice: a\nbob: {key: b, adapters: [relevant]}\n")
    engine = FakeEngine()
    engine.max_loras = 4
    settings = ServerConfig(lora_folder=str(tmp_path / "adapters"), api_key_file=str(keys))
    with TestClient(create_app(engine, settings), base_url="http://127.0.0.1") as client:
        client.headers["Authorization"] = "Bearer a"
        yield client, engine


def post(client: TestClient, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def logits(engine: FakeEngine, count: int) -> list[torch.Tensor]:
    """Return the logits of the newest prompts, in their order, by all rows of the head."""
    newest = engine.embedded[-count:]
    return [HEAD @ torch.tensor(embedding_of(prompt, PoolingParams(normalize=False))) for prompt, *_ in newest]


def test_labels(server: tuple[TestClient, FakeEngine]) -> None:
    client, engine = server
    for path in ("/classify", "/v1/classify"):
        body = post(client, path, model="topics", input=["abc", "xyz"])
        assert body["model"] == "topics"
        for found, expected in zip(body["data"], logits(engine, 2), strict=True):
            assert found["probs"] == pytest.approx(expected.softmax(0).tolist(), abs=1e-6)
            assert found["label"] == f"LABEL_{int(expected.argmax())}"
    assert engine.adapters == ["topics"] * 4
    [bare] = post(client, "/pooling", model="topics", input="abc", use_activation=False)["data"]
    assert bare["data"] == pytest.approx(logits(engine, 1)[0].tolist(), abs=1e-6)


def test_scores(server: tuple[TestClient, FakeEngine]) -> None:
    client, engine = server
    scores = post(client, "/v1/score", model="relevant", text_1="q", text_2=["abc", "xyz"])["data"]
    expected = [each[0].sigmoid().item() for each in logits(engine, 2)]
    assert [each["score"] for each in scores] == pytest.approx(expected, abs=1e-6)
    ranked = post(client, "/v1/rerank", model="relevant", query="q", documents=["abc", "xyz"])["results"]
    assert [each["relevance_score"] for each in ranked] == pytest.approx(sorted(expected, reverse=True), abs=1e-6)
    assert set(engine.adapters) == {"relevant"}


@pytest.mark.parametrize(
    ("path", "model", "status", "reason"),
    [
        ("/v1/classify", "toy", 400, "`toy` is no classifier"),
        ("/v1/classify", None, 400, "`toy` is no classifier"),
        ("/v1/classify", "plain", 400, "`plain` is no classifier"),
        ("/v1/classify", "other", 404, "`other` does not exist"),
        ("/v1/completions", "topics", 400, "`topics` is published for classification and generates no text"),
        ("/v1/score", "topics", 400, "`topics` has 3 labels"),
        ("/v1/score", "plain", 400, "`plain` generates text"),
    ],
)
def test_what_an_adapter_cannot_do(
    server: tuple[TestClient, FakeEngine], path: str, model: str | None, status: int, reason: str
) -> None:
    fields = {"text_1": "q", "text_2": "abc"} if "score" in path else {"prompt": "q"}
    fields = {"input": "abc"} if "classify" in path else fields
    body = post(server[0], path, status, model=model, **fields)
    assert reason in body["error"]["message"]
    assert server[1].adapters == []


def test_a_key_without_the_right_finds_no_adapter(server: tuple[TestClient, FakeEngine]) -> None:
    client, _ = server
    post(client, "/v1/classify", model="topics", input="abc")
    client.headers["Authorization"] = "Bearer b"
    post(client, "/v1/classify", model="relevant", input="abc")
    for path, fields in (("/v1/classify", {"input": "abc"}), ("/pooling", {"input": "abc"})):
        assert "`topics` does not exist" in post(client, path, 404, model="topics", **fields)["error"]["message"]


def test_a_head_of_another_model_is_refused(server: tuple[TestClient, FakeEngine], tmp_path: Path) -> None:
    client, _ = server
    write(tmp_path / "adapters" / "wide", 0, **{"score.weight": torch.ones(2, HIDDEN_SIZE + 1)})
    body = post(client, "/v1/classify", 400, model="wide", input="abc")
    assert "the adapter 'wide' cannot be used" in body["error"]["message"]
    assert f"the hidden size {HIDDEN_SIZE}" in body["error"]["message"]
