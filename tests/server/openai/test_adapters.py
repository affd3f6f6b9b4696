"""LoRA adapters over HTTP: their names, how they are loaded and by whom, and which one the engine gets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from engine import Adapter, ConfigError
from server.app import create_app
from server.cli.serve import check_adapters
from server.settings import LoraModule, ServerConfig
from tests.oracles.random_adapters import random_adapter, write_adapter
from tests.support.fake_engine import FakeEngine

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two adapters, "sql" and "poems"."""
    for name in ("sql", "poems"):
        write_adapter(tmp_path / "adapters" / name, {}, random_adapter(SHAPES, 2, torch.Generator().manual_seed(0)))
    return tmp_path / "adapters"


@contextmanager
def served(**settings: Any) -> Iterator[tuple[TestClient, FakeEngine]]:
    engine = FakeEngine()
    engine.max_loras = 4
    with TestClient(create_app(engine, ServerConfig(**settings)), base_url="http://127.0.0.1") as client:
        yield client, engine


def complete(client: TestClient, model: str, **headers: str) -> Any:
    body = {"model": model, "prompt": "Hi", "max_tokens": 3}
    return client.post("/v1/completions", json=body, headers=headers)


def load(client: TestClient, name: str, path: Path | str, *, key: str = "", **fields: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return client.post("/v1/load_lora_adapter", json=body, headers=headers)


def message(response: Any) -> str:
    found: str = response.json()["error"]["message"]
    return found


def test_configured_adapters_are_models_of_their_own(folder: Path) -> None:
    modules = (
        f"sql={folder / 'sql'}",
        json.dumps({"name": "p", "path": str(folder / "poems"), "base_model_name": "b"}),
    )
    with served(lora_modules=modules) as (client, engine):
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("toy", None), ("sql", "toy"), ("p", "b")]
        assert client.get("/v1/models/sql").json()["parent"] == "toy"
        for name, adapter in (("sql", "sql"), ("toy", None), ("p", "p")):
            response = complete(client, name)
            assert response.status_code == 200
            assert response.json()["model"] == name
            assert engine.adapters[-1] == adapter
        response = complete(client, "other")
        assert response.status_code == 404
        assert "Served here: toy, sql, p." in message(response)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "stream": False}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_every_api_takes_an_adapter_as_model(folder: Path, path: str, body: dict[str, Any]) -> None:
    with served(lora_modules=(f"sql={folder / 'sql'}",)) as (client, engine):
        response = client.post(path, json={"model": "sql", **body})
        assert response.status_code == 200, response.text
        assert engine.adapters in ([], ["sql"])
        assert bool(engine.adapters) == ("token" not in path)


def test_metrics_name_the_adapters_in_use(folder: Path) -> None:
    def look(client: TestClient) -> str:
        lines = client.get("/metrics").text.splitlines()
        [line] = [each for each in lines if each.startswith("vllm:lora_requests_info{")]
        return line.partition("}")[0]

    names = [f"{name}={folder / name}" for name in ("sql", "poems")]
    with served(lora_modules=tuple(names)) as (client, engine):
        before = look(client)
        assert before.endswith('max_lora="4",running_lora_adapters="",waiting_lora_adapters=""')
        engine.holds = True
        body = {"model": "sql", "prompt": "Hi", "request_id": "held"}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.post, "/v1/completions", json=body)
            while look(client) == before:
                pass
            assert 'running_lora_adapters="",waiting_lora_adapters="sql"' in look(client)
            assert client.post("/v1/requests/cmpl-held/abort").status_code == 200
            assert answer.result().status_code == 200
        assert look(client) == before


def test_ollama_lists_adapters(folder: Path) -> None:
    with served(lora_modules=(f"sql={folder / 'sql'}",)) as (client, engine):
        assert [each["name"] for each in client.get("/api/tags").json()["models"]] == ["toy:latest", "sql:latest"]
        body = {"model": "sql:latest", "prompt": "Hi", "stream": False}
        assert client.post("/api/generate", json=body).status_code == 200
        assert engine.adapters == ["sql"]


def test_adapters_come_and_go(folder: Path) -> None:
    with served(api_key=("secret",)) as (client, _):
        key = {"Authorization": "Bearer secret"}
        response = load(client, "a", folder / "sql", key="secret")
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert complete(client, "a", **key).status_code == 200
        response = load(client, "a", folder / "poems", key="secret")
        assert response.status_code == 400
        assert "an adapter named 'a' is loaded already" in message(response)
        assert load(client, "a", folder / "poems", key="secret", load_inplace=True).status_code == 200
        response = client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=key)
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        assert complete(client, "a", **key).status_code == 404
        response = client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=key)
        assert response.status_code == 404
        assert "no adapter is named 'a'" in message(response)


def test_a_key_sees_only_its_adapters(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: {key: a, adapters: [sql]}\nbob: {key: b, adapters: []}\ncarol: c\n")
    modules = tuple(f"{name}={folder / name}" for name in ("sql", "poems"))
    may = {"a": ["toy", "sql"], "b": ["toy"], "c": ["toy", "sql", "poems"]}
    with served(api_key_file=str(keys), lora_modules=modules) as (client, _):
        for key, names in may.items():
            headers = {"Authorization": f"Bearer {key}"}
            assert [card["id"] for card in client.get("/v1/models", headers=headers).json()["data"]] == names
            tags = client.get("/api/tags", headers=headers).json()["models"]
            assert [each["name"].removesuffix(":latest") for each in tags] == names
            for name in may["c"]:
                response = complete(client, name, **headers)
                assert response.status_code == (200 if name in names else 404)
                assert client.get(f"/v1/models/{name}", headers=headers).status_code == response.status_code
                body = {"model": name, "prompt": "Hi"}
                assert client.post("/tokenize", json=body, headers=headers).status_code == response.status_code
                if name not in names:
                    assert f"Served here: {', '.join(names)}." in message(response)


def test_a_key_does_not_load_an_adapter_of_the_folder_that_it_may_not_use(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: {key: a, adapters: [sql]}\n")
    headers = {"Authorization": "Bearer a"}
    with served(api_key_file=str(keys), lora_folder=str(folder)) as (client, engine):
        assert complete(client, "poems", **headers).status_code == 404
        assert complete(client, "sql", **headers).status_code == 200
        assert engine.adapters == ["sql"]


def test_only_admins_load_and_unload(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: alices-key\nroot: {key: roots-key, admin: true}\n")
    with served(api_key_file=str(keys)) as (client, _):
        response = load(client, "a", folder / "sql", key="alices-key")
        assert response.status_code == 403
        assert "loading an adapter requires a key with `admin: true`" in message(response)
        assert load(client, "a", folder / "sql", key="roots-key").status_code == 200
        headers = {"Authorization": "Bearer alices-key"}
        assert complete(client, "a", **headers).status_code == 200
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=headers).status_code == 403


def test_a_server_without_keys_loads_from_its_folder_alone(folder: Path, tmp_path: Path) -> None:
    with served() as (client, _):
        response = load(client, "a", folder / "sql")
        assert response.status_code == 403
        assert "--lora-folder" in message(response)
    (folder / "away").symlink_to(tmp_path)
    with served(lora_folder=str(folder)) as (client, _):
        assert load(client, "a", folder / "sql").status_code == 200
        assert load(client, "b", "poems").status_code == 200
        for path in ("../adapters", "..", ".", "/etc", "away", "x\0y", str(tmp_path)):
            response = load(client, "c", path)
            assert response.status_code == 403, path
            assert "must lie in the folder" in message(response)


def test_an_adapter_of_the_folder_is_loaded_by_its_first_request(folder: Path) -> None:
    with served(lora_folder=str(folder)) as (client, engine):
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["toy"]
        for name in ("nothing", "..", "../adapters/sql", "sql/../sql", "."):
            assert complete(client, name).status_code == 404
        assert complete(client, "sql").status_code == 200
        assert engine.adapters == ["sql"]
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["toy", "sql"]


def _damaged(folder: Path) -> None:
    (folder / "sql" / "adapter_config.json").write_text('{"peft_type": "VERA"}')


def _missing(folder: Path) -> None:
    (folder / "sql" / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "reason"), [(_damaged, "'peft_type' is 'VERA'"), (_missing, "holds no adapter_model")]
)
def test_adapters_that_are_no_use_get_one_line(folder: Path, harm: Callable[[Path], None], reason: str) -> None:
    harm(folder)
    with served(lora_folder=str(folder)) as (client, _):
        for response in (load(client, "a", "sql"), complete(client, "sql")):
            assert response.status_code == 400
            assert reason in message(response)
            assert "\n" not in message(response)
    engine = FakeEngine()
    app = create_app(engine, ServerConfig(lora_modules=(f"a={folder / 'sql'}",)))

    async def start() -> None:
        async with app.router.lifespan_context(app):
            pass

    with pytest.raises(ConfigError, match=reason):
        asyncio.run(start())


@pytest.mark.parametrize("name", ["", "toy", "/x", "a" * 300])
def test_names_that_no_adapter_can_have(folder: Path, name: str) -> None:
    with served(lora_folder=str(folder)) as (client, _):
        response = load(client, name, "sql")
        assert response.status_code == 400
        assert "lora_name" in message(response)


def test_two_configured_adapters_have_different_names(folder: Path) -> None:
    for modules in ((f"a={folder / 'sql'}", f"a={folder / 'poems'}"), (f"toy={folder / 'sql'}",)):
        with pytest.raises(ConfigError, match="is in use already"), served(lora_modules=modules):
            pass


def test_a_server_without_adapters_says_so(folder: Path) -> None:
    with served(lora_folder=str(folder)) as (client, engine):
        engine.max_loras = 0
        response = load(client, "a", "sql")
        assert response.status_code == 400
        assert "--enable-lora" in message(response)


def test_an_engine_that_is_gone_loads_nothing(folder: Path) -> None:
    with served(lora_folder=str(folder)) as (client, engine):
        engine.states.enter("dead", reason="it was killed")
        assert load(client, "a", "sql").status_code == 503


@pytest.mark.parametrize("text", ["sql", "=x", "a=", '{"name": "a"}', '{"name": "a", "path": 1}', '{"a": 1}', "{"])
def test_lora_modules_name_a_folder(text: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules must be NAME=PATH"):
        ServerConfig(lora_modules=(text,))


def test_lora_modules_are_read() -> None:
    assert LoraModule.read("a=/b=c") == LoraModule("a", "/b=c")
    assert LoraModule.read('{"name": "a", "path": "b", "base_model_name": "c"}') == LoraModule("a", "b", "c")


def test_the_folder_must_exist_and_adapters_be_served(folder: Path) -> None:
    from engine import EngineConfig

    with pytest.raises(ConfigError, match="lora_folder must be a folder"):
        ServerConfig(lora_folder=str(folder / "nothing"))
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        check_adapters(EngineConfig(model="x"), ServerConfig(lora_modules=("a=b",)))
    with pytest.raises(ConfigError, match="lora_folder needs enable_lora"):
        check_adapters(EngineConfig(model="x"), ServerConfig(lora_folder=str(folder)))


def test_a_deadline_covers_the_wait_for_an_adapter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_load = threading.Event()
    find = FakeEngine.load_adapter

    async def load_adapter(self: FakeEngine, name: str, path: str) -> Adapter:
        await asyncio.to_thread(may_load.wait, 60)
        return await find(self, name, path)

    monkeypatch.setattr(FakeEngine, "load_adapter", load_adapter)
    with served(lora_folder=str(folder)) as (client, _):
        body = {"model": "sql", "prompt": "Hi", "max_tokens": 3}
        late = client.post("/v1/completions", json={**body, "timeout_ms": 1})
        assert (late.status_code, late.json()["error"]["param"]) == (504, "timeout_ms")
        may_load.set()  # what has begun to load is loaded, for the next one
        assert client.post("/v1/completions", json=body).json()["model"] == "sql"
