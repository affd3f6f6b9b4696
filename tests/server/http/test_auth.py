"""Keys over HTTP: what they guard, how they are brought, and what belongs to each."""

import json
from base64 import b64encode
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.http.api_keys import hashed
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, Serve

OPEN = ("/", "/health", "/livez", "/ping", "/readyz", "/static/js/app.js")
A, B = {"Authorization": "Bearer key of a"}, {"Authorization": "Bearer key of b"}


def basic(credentials: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(credentials.encode()).decode()}


@pytest.fixture
def shared(serve: Serve, tmp_path: Path) -> Live:
    """A server that two callers use."""
    file = tmp_path / "keys.yaml"
    file.write_text(f"a: {hashed('key of a')}\nb: {hashed('key of b')}\n")
    return serve(FakeEngine(), ServerConfig(api_key_file=str(file)))


def test_everything_but_probes_and_the_chat_page_is_guarded(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("sesame",)))
    schema = live.http.get("/openapi.json", headers={"Authorization": "Bearer sesame"}).json()
    paths = {(method, path) for path, methods in schema["paths"].items() for method in methods}
    paths |= {("get", path) for path in ("/docs", "/openapi.json", "/v1", "/v1/nothing", "/nothing", "/staticx")}
    for method, path in sorted(paths):
        response = live.http.request(method, path)
        if path in OPEN:
            assert response.status_code == 200, path
        else:
            assert response.status_code == 401, path
            assert "401" in schema["paths"].get(path, {}).get(method, {}).get("responses", ["401"]), path
    for path in OPEN:
        assert live.http.get(path).status_code == 200, path
    assert live.http.get("/v1/nothing").json() == {"error": "Unauthorized"}


def test_how_keys_are_brought(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("sesame", "grüße")))
    for key in (b"Bearer sesame", b"bearer  sesame", "Bearer grüße".encode()):
        assert live.http.get("/v1/models", headers={b"Authorization": key}).status_code == 200
    assert live.http.get("/v1/models", headers={"x-api-key": "sesame"}).status_code == 200
    for value in ("Bearer wrong", "Bearer", "sesame", "Basic sesame", "Basic", "Digest sesame"):
        assert live.http.get("/v1/models", headers={"Authorization": value}).status_code == 401, value


def test_browsers_open_pages_with_the_key_as_password(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("sesame", "grüße")))
    for path in ("/docs", "/openapi.json", "/metrics"):
        assert live.http.get(path).headers["www-authenticate"].startswith("Basic ")
        for credentials in (":sesame", "me:sesame", "me:grüße", "sesame:"):
            assert live.http.get(path, headers=basic(credentials)).status_code == 200
        for credentials in (":wrong", ":", "sesame:wrong"):
            assert live.http.get(path, headers=basic(credentials)).status_code == 401
    assert live.http.get("/v1/models").headers["www-authenticate"] == "Bearer", "no dialog over the chat page"
    read = live.http.get("/metrics", headers={"Sec-Fetch-Mode": "cors"})
    assert read.headers["www-authenticate"] == "Bearer", "nor when its panel reads the metrics"


def test_a_password_that_browsers_send_on_their_own_changes_nothing(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("sesame",)))
    assert live.http.post("/v1/requests/x/abort", headers=basic(":sesame")).status_code == 401
    assert live.http.delete("/v1/responses/x", headers=basic(":sesame")).status_code == 401


def test_open_metrics(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("sesame",), open_metrics=True))
    assert live.http.get("/metrics").status_code == 200
    assert live.http.get("/metricsx").status_code == live.http.get("/load").status_code == 401


def test_root_path_does_not_open_the_api(serve: Serve) -> None:
    for root in ("/api", "/v", "/v1", "/v1/", "/static", "/health"):
        live = serve(FakeEngine(), ServerConfig(api_key=("sesame",), root_path=root))
        assert live.http.get("/v1/models").status_code == 401
        assert live.http.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200
        for path in (
            "//v1/models",
            "/V1/models",
            root + "/v1/models",
            "/static/../v1/models",
            "/static/..%2fv1/models",
        ):
            assert live.http.get(path).status_code in (401, 404), (root, path)


def test_where_keys_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerConfig().read_keys() is None
    monkeypatch.setenv("VLLM_API_KEY", "from the environment")
    keys = ServerConfig().read_keys()
    assert keys is not None
    caller = keys.find(b"from the environment")
    assert caller is not None
    assert (caller.name, caller.may_prioritise, caller.is_admin) == ("key-1", True, True)
    given = ServerConfig(api_key=("a", hashed("b"))).read_keys()
    assert given is not None
    assert given.find(b"from the environment") is None
    assert (found := given.find(b"a")) is not None
    assert not found.is_admin, "one of several"
    assert [given.find(key) is not None for key in (b"a", b"b", hashed("b").encode(), b"")] == [
        True,
        True,
        False,
        False,
    ]
    for keys_given in (("a", ""), ("sha256:12",), (" a",)):
        with pytest.raises(ConfigError, match="api_key"):
            ServerConfig(api_key=keys_given)
    assert "sesame" not in repr(ServerConfig(api_key=("sesame",)))


def test_requests_belong_to_the_key_that_sent_them(shared: Live) -> None:
    body = {"prompt": "Hi", "stream": True, "ignore_eos": True, "max_tokens": 400, "request_id": "mine"}
    abort = "/v1/requests/cmpl-mine/abort"
    shared.engine.holds_after = 3
    with shared.http.stream("POST", "/v1/completions", json=body, headers=A) as first:
        chunks = first.iter_raw()
        next(chunks)
        assert shared.http.post(abort, headers=B).status_code == 404
        assert shared.http.post("/v1/completions", json=body, headers=A).status_code == 400, "its id is taken"
        with shared.http.stream("POST", "/v1/completions", json=body, headers=B) as second:
            others = second.iter_raw()
            next(others)
            assert second.status_code == 200, "the id of another key's request is free"
            assert shared.http.post(abort, headers=A).status_code == 200
            assert b'"finish_reason":"abort"' in b"".join(chunks)
            assert len(shared.engine.active) == 1, "the other request goes on"
    shared.wait_idle()


def test_responses_belong_to_the_key_that_made_them(shared: Live) -> None:
    def create(who: dict[str, str], **body: object) -> dict[str, str]:
        response = shared.http.post("/v1/responses", json={"max_output_tokens": 1, **body}, headers=who)
        return response.json() | {"code": str(response.status_code)}

    made = create(A, input="secret of a", request_id="mine")
    path = f"/v1/responses/{made['id']}"
    item = json.loads(json.dumps(made["output"]))[0]["id"]
    for response in (
        shared.http.get(path, headers=B),
        shared.http.get(f"{path}/input_items", headers=B),
        shared.http.delete(path, headers=B),
    ):
        assert response.status_code == 404
        assert "secret" not in response.text
    assert create(B, input="x", previous_response_id=made["id"])["code"] == "404"
    assert create(B, input=[{"type": "item_reference", "id": item}])["code"] == "404"
    counted = {"input": "x", "previous_response_id": made["id"]}
    assert shared.http.post("/v1/responses/input_tokens", json=counted, headers=B).status_code == 404
    assert create(B, input="of b", request_id="mine")["id"] == made["id"]
    assert "secret of a" in shared.http.get(f"{path}/input_items", headers=A).text, "nothing was overwritten"
    assert "secret" not in shared.http.get(f"{path}/input_items", headers=B).text
    assert create(A, input=[{"type": "item_reference", "id": item}])["code"] == "200"
