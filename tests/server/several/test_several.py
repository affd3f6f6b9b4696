"""Several models behind one port: loaded when they are asked for, asleep while others need their place."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from engine import ConfigError, EngineConfig, ModelError
from server.observability.readiness import Readiness
from server.observability.server_metrics import ServerMetrics
from server.settings import ServerConfig
from server.several import pool as pools
from server.several.front import Front
from server.several.keep_alive import seconds_of
from server.several.pool import ModelPool, configs_of
from tests.support.fake_engine import FakeEngine

CONFIG = EngineConfig(model="a")


class LaunchedEngine(FakeEngine):
    """Stands in for `AsyncEngine`."""

    launched: ClassVar[list["LaunchedEngine"]] = []
    failure: Exception | None = None  # of the next load
    loads: ClassVar[asyncio.Event]  # set: engines become ready
    summary = "a summary"

    @classmethod
    def launch(cls, config: EngineConfig) -> "LaunchedEngine":
        engine = cls()
        engine.config, engine.is_closed, engine.levels = config, False, []
        engine.model_name = config.served_model_name[0]
        engine.answer = f"I am {config.model}"
        cls.launched.append(engine)
        return engine

    async def ready(self) -> None:
        await asyncio.sleep(0)
        await LaunchedEngine.loads.wait()
        if LaunchedEngine.failure is not None:
            failure, LaunchedEngine.failure = LaunchedEngine.failure, None
            raise failure

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        assert abort or not self.active, "a model with requests is put to sleep"
        await super().sleep(level, abort=abort)
        self.levels.append(level)

    def abort_all(self) -> None:
        self.aborted.update(self.active)

    def close(self) -> None:
        self.is_closed = True

    config: EngineConfig
    is_closed: bool
    levels: list[int]


class Served:
    """A pool, its front as an HTTP client, and its engines by model."""

    def __init__(self, pool: ModelPool, http: httpx.AsyncClient) -> None:
        self.pool, self.http = pool, http

    @property
    def awake(self) -> list[str]:
        return [each.names[0] for each in self.pool.models if each.is_awake]

    def engine(self, name: str) -> LaunchedEngine:
        found = self.pool.find(name)
        assert found is not None
        assert isinstance(found.engine, LaunchedEngine)
        return found.engine

    async def ask(self, model: str | None = None, **more: Any) -> httpx.Response:
        body = {"prompt": "Hi", "max_tokens": 3, **({} if model is None else {"model": model}), **more}
        return await self.http.post("/v1/completions", json=body)

    async def names(self) -> list[str]:
        return [card["id"] for card in (await self.http.get("/v1/models")).json()["data"]]


def run(
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[Served], Awaitable[None]],
    models: str = "abc",
    config: EngineConfig = CONFIG,
    **settings: Any,
) -> None:
    """Run a test with a server of these models."""
    monkeypatch.setattr(pools, "AsyncEngine", LaunchedEngine)
    LaunchedEngine.launched, LaunchedEngine.failure = [], None
    server_config = ServerConfig(**settings)

    async def main() -> None:
        LaunchedEngine.loads = asyncio.Event()
        LaunchedEngine.loads.set()
        pool = ModelPool(configs_of(config, server_config, models[1:]), server_config)
        await pool.ready()
        try:
            async with pool.opened(Readiness(pool), ServerMetrics(pool)):
                app = Front(pool, server_config)
                transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)  # type: ignore[arg-type]
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                    await test(Served(pool, http))
        finally:
            pool.close()
        assert all(each.is_closed for each in LaunchedEngine.launched)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_models_are_loaded_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        assert await served.names() == ["a", "b", "c"]
        assert [each.model_name for each in LaunchedEngine.launched] == ["a"]
        card = (await served.http.get("/v1/models/b")).json()
        assert (card["id"], card["root"], card["max_model_len"]) == ("b", "b", None)
        for name in "abca":
            answer = (await served.ask(name)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, f"I am {name}"[:3])
            assert served.awake == [name]
        assert [each.model_name for each in LaunchedEngine.launched] == ["a", "b", "c"], "one that sleeps is kept"
        assert served.engine("a").levels == [1]
        assert (await served.http.get("/v1/models/b")).json()["max_model_len"] == 512
        assert (await served.ask()).json()["model"] == "a", "the first one, if none is named"
        unknown = await served.ask("nope")
        assert unknown.status_code == 404
        assert "Served here: a, b, c." in unknown.json()["error"]["message"]
        assert (await served.http.get("/v1/models/nope")).status_code == 404
        assert served.awake == ["a"]
        assert (await served.http.get("/readyz")).json()["phase"] == "ready"

    run(monkeypatch, test)


def test_as_many_as_told_are_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        for name, awake in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc")):
            assert (await served.ask(name)).status_code == 200
            assert "".join(served.awake) == awake, "the least recently used one sleeps"
        assert [each.config.gpu_memory_utilization for each in LaunchedEngine.launched] == [0.25, 0.5, 0.5]
        assert served.engine("a").levels == [2]

    config = replace(CONFIG, gpu_memory_utilization=0.5)
    run(monkeypatch, test, config=config, max_loaded_models=2, sleep_level=2)


def test_a_model_with_requests_is_waited_for_and_no_model_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        a = served.engine("a")
        a.holds = True
        first = asyncio.create_task(served.ask("a", max_tokens=50))
        await until(lambda: bool(a.active))
        second = asyncio.create_task(served.ask("b"))
        await until(lambda: served.pool.models[0].is_leaving)
        third = asyncio.create_task(served.ask("a"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(a.active) == 1, "it waits behind the other model"
        assert len(LaunchedEngine.launched) == 1
        a.holds = False
        await a.abort(next(iter(a.active)))
        assert (await first).json()["choices"][0]["finish_reason"] == "abort"
        assert (await second).json()["model"] == "b"
        assert (await third).json()["model"] == "a"
        assert served.awake == ["a"]
        assert (a.levels, served.engine("b").levels) == ([1], [1])

    run(monkeypatch, test)


def test_a_deadline_covers_the_wait_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        a = served.engine("a")
        a.holds = True
        first = asyncio.create_task(served.ask("a", max_tokens=50))
        await until(lambda: bool(a.active))
        late = await served.ask("b", timeout_ms=1)
        assert (late.status_code, late.json()["error"]["param"]) == (504, "timeout_ms")
        await until(lambda: not served.pool.models[0].is_leaving)
        second = asyncio.create_task(served.ask("a"))
        await until(lambda: len(a.active) == 2)  # nothing waits for its place any more
        assert len(LaunchedEngine.launched) == 1
        a.holds = False
        for each in list(a.active):
            await a.abort(each)
        await asyncio.gather(first, second)
        LaunchedEngine.loads.clear()
        assert (await served.ask("b", timeout_ms=1)).status_code == 504
        LaunchedEngine.loads.set()
        await until(lambda: served.awake == ["b"])  # what has begun to load is loaded
        assert not any(each.num_active or each.is_leaving for each in served.pool.models)
        assert (await served.ask("b", timeout_ms=60_000)).status_code == 200

    run(monkeypatch, test)


def test_many_requests_for_all_models_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        names = [*"abcabcbacbca"] * 5
        answers = await asyncio.gather(*(served.ask(name) for name in names))
        assert [each.json()["model"] for each in answers] == names
        assert len(served.awake) == 1
        assert not any(each.num_active or each.is_leaving for each in served.pool.models)

    run(monkeypatch, test)


def test_a_model_that_cannot_be_loaded_or_woken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        LaunchedEngine.failure = ModelError("b has no weights")
        failed = await served.ask("b")
        assert (failed.status_code, failed.json()["error"]["message"]) == (503, "b has no weights")
        assert LaunchedEngine.launched[1].is_closed
        assert (await served.ask("b")).status_code == 200, "it is tried again"
        served.engine("a").cannot_sleep = "too little free memory to wake up"
        failed = await served.http.post(
            "/v1/messages", json={"model": "a", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
        )
        assert failed.status_code == 503
        assert failed.json()["type"] == "error", "in the format of the path's API"
        served.engine("a").cannot_sleep = ""
        assert (await served.ask("a")).status_code == 200
        served.engine("a").states.enter("dead", reason="it was killed")
        assert (await served.ask("a")).status_code == 200, "a lost engine is started again"
        assert [each.model_name for each in LaunchedEngine.launched] == ["a", "b", "b", "a"]
        served.engine("a").cannot_sleep = "it is busy"
        failed = await served.ask("b")
        assert (failed.status_code, failed.json()["error"]["message"]) == (503, "it is busy")
        assert served.awake == ["a"]

    run(monkeypatch, test)


def test_ollamas_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        async def generate(**fields: Any) -> dict[str, Any]:
            body = {"model": "b:latest", "stream": False, "options": {"num_predict": 2}, **fields}
            return (await served.http.post("/api/generate", json=body)).json()

        async def running() -> list[tuple[str, str]]:
            models = (await served.http.get("/api/ps")).json()["models"]
            return [(each["name"], each["expires_at"][:4]) for each in models]

        listed = (await served.http.get("/api/tags")).json()["models"]
        assert [each["name"] for each in listed] == ["a:latest", "b:latest", "c:latest"]
        assert await running() == [("a:latest", "2318")]
        assert (await generate(prompt="Hi", keep_alive="-1m"))["done_reason"] == "length"
        assert await running() == [("b:latest", "2318")]
        await generate(prompt="Hi", keep_alive="24h")
        [(name, year)] = await running()
        assert (name, year != "2318") == ("b:latest", True)
        assert (await generate(keep_alive=0))["done_reason"] == "unload"
        await until(lambda: not served.awake)
        assert await running() == []
        assert (await served.http.get("/readyz")).status_code == 200, "requests wake it up"
        assert (await generate(prompt="Hi", keep_alive=0))["response"]
        await until(lambda: not served.awake)
        wrong = await served.http.post("/api/chat", json={"model": "b", "messages": [], "keep_alive": "soon"})
        assert (wrong.status_code, wrong.json()) == (
            400,
            {"error": 'keep_alive: must be seconds or a duration such as "5m"'},
        )
        unknown = await served.http.post("/api/generate", json={"model": "x", "prompt": "Hi", "keep_alive": 0})
        assert unknown.status_code == 404
        assert not served.awake, "an unknown name wakes no model"

    run(monkeypatch, test)


def test_a_model_sleeps_after_a_time_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        await served.ask("b")
        await until(lambda: not served.awake)
        assert served.engine("b").levels == [1]
        assert (await served.ask("b")).status_code == 200

    run(monkeypatch, test, model_keep_alive=0.01)


def test_what_works_while_a_model_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        await served.ask("b")
        counted = await served.http.post("/tokenize", json={"model": "a", "prompt": "Hi"})
        assert counted.json()["count"] > 0
        assert served.awake == ["b"]
        assert (await served.http.post("/sleep?model=b&level=2")).status_code == 200
        assert served.awake == []
        assert (await served.http.post("/wake_up?model=a")).status_code == 200
        assert served.awake == ["a"]
        assert (await served.http.post("/wake_up?model=b")).status_code == 200
        assert served.awake == ["b"], "not more than one"

    run(monkeypatch, test)


def test_what_is_asked_for_by_an_id_is_found_whatever_model_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        ids = {}
        for name in "ab":
            made = await served.http.post("/v1/responses", json={"model": name, "input": "Hi", "max_output_tokens": 20})
            assert made.status_code == 200, made.text
            ids[name] = made.json()["id"]
        for name, response_id in ids.items():
            found = (await served.http.get(f"/v1/responses/{response_id}")).json()
            assert (found["id"], found["model"]) == (response_id, name)
            assert (await served.http.get(f"/requests/{response_id}")).json()["model"] == name
        assert (await served.http.get("/v1/responses/resp_none")).status_code == 404
        b = served.engine("b")
        b.holds = True
        held = asyncio.create_task(served.ask("b"))
        await until(lambda: bool(b.active))
        running = (await served.http.get("/requests")).json()["data"][0]["id"]
        assert (await served.http.post(f"/v1/requests/{running}/abort")).json()["aborted"]
        assert (await held).json()["choices"][0]["finish_reason"] == "abort"

    run(monkeypatch, test)


def test_metrics_of_all_models_have_each_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        for name in "aab":
            await served.ask(name)
        text = (await served.http.get("/metrics")).text
        types = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types))
        samples = [line.rpartition(" ")[0] for line in text.splitlines() if line and line[0] != "#"]
        assert len(samples) == len(set(samples))
        for name, count in (("a", 2), ("b", 1)):
            assert (
                f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{name}"}} {count}.0'
                in text
            )
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 3.0' in text

    run(monkeypatch, test)


def test_who_has_no_key_or_another_page_wakes_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def keyless(served: Served) -> None:
        assert (await served.ask("b")).status_code == 401
        assert served.awake == ["a"]
        served.http.headers["Authorization"] = "Bearer secret"
        assert (await served.ask("b")).status_code == 200
        assert served.awake == ["b"]

    run(monkeypatch, keyless, api_key=("secret",))

    async def elsewhere(served: Served) -> None:
        served.http.headers["Origin"] = "https://elsewhere.example"
        assert (await served.ask("b")).status_code == 403
        assert served.awake == ["a"]

    run(monkeypatch, elsewhere)


def test_bodies_that_are_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        for content in (b"{", b"[]", b"", b'{"model": 5, "prompt": "Hi"}', b"\xff"):
            answer = await served.http.post(
                "/v1/completions", content=content, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 400, answer.text
        large = await served.ask("b", prompt="x" * 100_000)
        assert large.status_code == 400
        assert served.awake == ["b"], "its model says what is too long"

    run(monkeypatch, test)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"served_model_name": ("x",)}, "one name for each of 2 models, got 1"),
        ({"served_model_name": ("x", "x")}, "two models have the name 'x'"),
        ({"tensor_parallel_size": 2}, "sleep_level 1 needs models on one device"),
    ],
)
def test_settings_that_do_not_fit_several_models(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        configs_of(replace(CONFIG, **change), ServerConfig(sleep_level=1), ["b"])


def test_each_model_has_its_name_and_its_files() -> None:
    configs = configs_of(replace(CONFIG, prefix_cache_file="cache"), ServerConfig(), ["org/b"])
    assert [(each.model, each.served_model_name, each.prefix_cache_file) for each in configs] == [
        ("a", ("a",), "cache.0"),
        ("org/b", ("org/b",), "cache.1"),
    ]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((0, 0), (5, 5), (-1, -1), (2.5, 2.5), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("-1", -1), ("-5m", -1)),
        *(("0", 0), ("10", 10), ("", None), ("5x", None), ("m", None), (True, None), ([], None), (float("nan"), None)),
    ],
)
def test_durations_as_ollama_writes_them(value: object, seconds: float | None) -> None:
    assert seconds_of(value) == seconds
