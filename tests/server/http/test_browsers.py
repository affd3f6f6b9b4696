"""Pages of other sites: names that lead here, requests that browsers send unasked, frames."""

import pytest

from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, Serve

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5:80", "localhost", "LOCALHOST:8000", "localhost."),
        *(
            "gpu1",
            "GPU1:8000",
            "gpu1.corp.example",
            "gpu1.local",
            "gpu1.lan:8000",
            "host.docker.internal",
            "a.localhost:1",
        ),
        "",
    ],
)
def test_addresses_and_names_of_this_machine_are_ours(host: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.http.browsers.gethostname", lambda: "GPU1.corp.example")
    live = serve(FakeEngine(), ServerConfig())
    assert live.http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example."),
        *(
            "xlocal.evil",
            "evil.example/.local",
            "evil.example?.local",
            "a@evil.example",
            "local.",
            "quire",
            "router:8000",
            "quire.default.svc.cluster.local",
            "gpu1.lan",
            "printer.local",
            "corp.internal",
            "é.example",
            "1.2.3",
            "[",
            "[local]",
        ),
    ],
)
def test_other_names_are_refused(host: str, live: Live) -> None:
    headers = {b"Host": host.encode()}
    for path in ("/v1/models", "/", "/docs", "/metrics"):
        response = live.http.get(path, headers=headers)
        assert response.status_code == 403, path
        assert "--allowed-hosts" in response.json()["error"]["message"]
    own = {**headers, b"Origin": b"http://" + host.encode()}  # of a page under that name
    assert live.http.post(COMPLETIONS, json={"prompt": "Hi"}, headers=own).status_code == 403
    assert live.http.get("/health", headers=headers).status_code == 200, "probes may call it what they like"
    assert live.http.get("/static/../v1/models", headers=headers).status_code in (200, 403)


def test_the_first_refused_name_is_logged_with_the_option(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    live = serve(FakeEngine(), ServerConfig())
    for host in ("gpu-7", "gpu-8"):
        message = live.http.get("/v1/models", headers={"Host": f"{host}:8000"}).json()["error"]["message"]
        assert f"--allowed-hosts {host}" in message
    (logged,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert "--allowed-hosts gpu-7," in logged


def test_further_names(serve: Serve) -> None:
    live = serve(
        FakeEngine(), ServerConfig(allowed_hosts=("LLM.example.org", "*.corp.example"), host="gpu.example.net")
    )
    for host in ("llm.example.org:443", "a.corp.example", "a.b.corp.example", "localhost", "gpu.example.net"):
        assert live.http.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("example.org", "corp.example", "acorp.example", "llm.example.org.evil.example"):
        assert live.http.get("/v1/models", headers={"Host": host}).status_code == 403, host
    anything = serve(FakeEngine(), ServerConfig(allowed_hosts=("*",)))
    assert anything.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 200


def test_with_keys_any_name_will_do(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("sesame",)))
    headers = {"Authorization": "Bearer sesame", "Host": "llm.example.org", "Origin": "https://other.example"}
    assert live.http.post(COMPLETIONS, json={"prompt": "Hi"}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_pages_of_other_sites_cannot_send_requests(headers: dict[str, str], live: Live) -> None:
    """Send requests that browsers send without asking the server first."""
    for kind in ({"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}, {}):
        response = live.http.post(COMPLETIONS, content='{"prompt": "Hi"}', headers={**headers, **kind})
        assert response.status_code == 403
        assert "--allowed-origins" in response.json()["error"]["message"]
    for path in ("/v1/requests/x/abort", "/ping", "/tokenize"):
        assert live.http.post(path, headers=headers).status_code == 403
    assert live.engine.requests == []


def test_bodies_of_other_types_are_refused_without_an_origin_too(live: Live) -> None:
    for kind in ({"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}, {}):
        assert live.http.post(COMPLETIONS, content='{"prompt": "Hi"}', headers=kind).status_code == 400


def test_own_pages_and_allowed_ones_may(live: Live, serve: Serve) -> None:
    own = f"http://127.0.0.1:{live.port}"
    for headers in (
        {"Origin": own},
        {"Origin": own, "Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "chrome-extension://abc", "Sec-Fetch-Site": "none"},
    ):
        assert live.http.post(COMPLETIONS, json={"prompt": "Hi"}, headers=headers).status_code == 200, headers
    for origins in (("https://app.example",), ("*",)):
        opened = serve(FakeEngine(), ServerConfig(allowed_origins=origins))
        headers = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
        assert opened.http.post(COMPLETIONS, json={"prompt": "Hi"}, headers=headers).status_code == 200


def test_headers_for_browsers(live: Live) -> None:
    streamed = {"prompt": "Hi", "stream": True}
    for response in (
        live.http.get("/"),
        live.http.get("/static/js/app.js"),
        live.http.get("/nothing"),
        live.http.post(COMPLETIONS, json=streamed),
    ):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["content-security-policy"] == "frame-ancestors 'none'"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["referrer-policy"] == "no-referrer"


def test_browsers_ask_whether_the_page_has_changed(live: Live) -> None:
    for path in ("/", "/static/js/app.js"):
        answer = live.http.get(path)
        assert answer.headers["cache-control"] == "no-cache"
        again = live.http.get("/static/js/app.js", headers={"If-None-Match": answer.headers["etag"]})
        assert again.headers["cache-control"] == "no-cache"
    assert again.status_code == 304
