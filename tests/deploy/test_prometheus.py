"""Prometheus's own view of what is shipped for it: it takes the configuration, and every query of the dashboard has
data.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.cli.serve import listen
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live

DEPLOY = Path(__file__).resolve().parents[2] / "configs" / "deploy"
PANELS = [
    panel for panel in json.loads((DEPLOY / "grafana" / "quire.json").read_text())["panels"] if panel["type"] != "row"
]
ALERTS = re.findall(r"^        expr: (.+)$", (DEPLOY / "prometheus" / "alerts.yml").read_text(), re.MULTILINE)

needs = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs Debian's package prometheus"
)


def test_every_panel_has_a_query_and_corners_of_its_own() -> None:
    assert len(PANELS) > 12
    assert all(panel["targets"] for panel in PANELS)
    corners = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS]
    assert len(set(corners)) == len(corners)


@needs
@pytest.mark.parametrize("what", ["rules alerts.yml", "config prometheus.yml"])
def test_promtool_accepts(what: str) -> None:
    kind, file = what.split()
    done = subprocess.run(
        ["promtool", "check", kind, DEPLOY / "prometheus" / file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[Live], httpx.Client]]:
    """Starts a Prometheus that scrapes a server, five times a second."""
    started = []

    def start(live: Live) -> httpx.Client:
        job = {
            "job_name": "quire",
            "scrape_interval": "200ms",
            "scrape_timeout": "200ms",
            "static_configs": [{"targets": [f"127.0.0.1:{live.port}"]}],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))
        with listen(ServerConfig(host="127.0.0.1", port=0)) as listener:
            port = listener.getsockname()[1]
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60)

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


def query(client: httpx.Client, expression: str) -> list[Any]:
    """The series of the answer that are numbers; none while Prometheus does not answer yet."""
    try:
        answer = client.get("/query", params={"query": expression})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.status_code == 200, (expression, answer.text)
    found: list[Any] = answer.json()["data"]["result"]
    return [series for series in found if series["value"][1] != "NaN"]


def wait_for(client: httpx.Client, expression: str) -> None:
    deadline = time.monotonic() + 60
    while not query(client, expression):
        assert time.monotonic() < deadline, expression
        time.sleep(0.1)


@needs
@pytest.mark.heavy
def test_every_query_of_the_dashboard_has_data(
    serve: Callable[..., Live], prometheus: Callable[[Live], httpx.Client]
) -> None:
    live = serve(FakeEngine())
    live.complete(max_tokens=3)
    with prometheus(live) as client:
        wait_for(client, "vllm:generation_tokens_total > 0")
        for _ in range(3):
            live.chat(max_tokens=5)
        live.complete("x" * 600)  # refused
        wait_for(client, "increase(vllm:request_success_total{finished_reason='length'}[1m]) > 0")
        for panel in PANELS:
            for target in panel["targets"]:
                expression = target["expr"].replace("$model_name", ".*").replace("$__rate_interval", "1m")
                # Rates need what was measured between two scrapes.
                wait_for(client, expression.replace("$__range", "1m"))
        for expression in ALERTS:
            query(client, expression)  # none is wrong
        assert len(ALERTS) > 8
