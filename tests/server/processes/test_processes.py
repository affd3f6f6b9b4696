"""Several API processes behind one port, with an engine without a model: what they share, what a killed one costs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.micro.server_path import STEP_SECONDS
from benchmarks.model_shapes import add_tokenizer, model_folder
from benchmarks.processes import free_port, wait_until_ready

MOST = 8  # requests at a time
ROOT = Path(__file__).resolve().parents[3]
KEYS = """
admin: {key: the-admin-key-of-this-test, admin: true}
user: the-user-key-of-this-test
limited: {key: the-limited-key-of-this-test, requests_per_minute: 3}
"""


@dataclass
class Server:
    """A server of two API processes."""

    url: str
    process: "subprocess.Popen[bytes]"
    temporary: Path  # the server's folder for temporary files

    def client(self, key: str = "user") -> httpx.Client:
        """A client with connections of its own."""
        return httpx.Client(
            base_url=self.url, timeout=120, headers={"Authorization": f"Bearer the-{key}-key-of-this-test"}
        )

    def ask(self, method: str, path: str, key: str = "user", **more: Any) -> httpx.Response:
        """Ask over a new connection, which may reach either process."""
        with self.client(key) as http:
            return http.request(method, path, **more)

    def complete(self, key: str = "user", **body: Any) -> httpx.Response:
        return self.ask("POST", "/v1/completions", key, json={"prompt": [300, 301], "max_tokens": 3, **body})

    def metric(self, name: str, key: str = "admin") -> float:
        text = self.ask("GET", "/metrics", key).text
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def api_pids(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(each) for each in children if b"api_process" in Path(f"/proc/{each}/cmdline").read_bytes()]

    def wait_idle(self) -> None:
        wait_until(lambda: self.ask("GET", "/load").json()["server_load"] == 0)


def wait_until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("processes")
    model = model_folder("llama-100m", folder)
    add_tokenizer(model)
    (folder / "keys.yaml").write_text(KEYS)
    (folder / "keys.yaml").chmod(0o600)
    port = free_port()
    command = [sys.executable, "-P", "-m", "benchmarks.micro.server_path", "server", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--device", "cpu", "--max-model-len", "4096", "--api-server-count", "2"]
    command += ["--api-key-file", str(folder / "keys.yaml"), "--max-num-seqs", str(MOST), "--max-num-queued-reqs", "0"]
    command += ["--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}"]
    environment = {**os.environ, STEP_SECONDS: "0.01", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    (temporary := folder / "tmp").mkdir()
    process = subprocess.Popen(command, env=environment | {"TMPDIR": str(temporary)})
    try:
        assert wait_until_ready(process, port, time.time() + 200)
        server = Server(f"http://127.0.0.1:{port}", process, temporary)
        wait_until(lambda: len(server.api_pids()) == 2)
        yield server
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def streams(server: Server, num: int, **body: Any) -> Iterator[list[httpx.Response]]:
    """Streams of long answers, each over a connection of its own."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(num):
            http = stack.enter_context(server.client())
            asked = {"prompt": [300], "max_tokens": 4000, "ignore_eos": True, "stream": True, **body}
            found.append(stack.enter_context(http.stream("POST", "/v1/completions", json=asked)))
        yield found
    server.wait_idle()


def events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def test_any_process_tells_of_all_requests(server: Server) -> None:
    before = server.metric("vllm:request_success_total")
    tokens = server.metric("quire:key_generation_tokens_total", "user") if before else 0
    ids = [server.complete().json()["id"] for _ in range(10)]
    records = [server.ask("GET", f"/requests/{each}").json() for each in ids]
    assert [record["id"] for record in records] == ids
    assert all(record["status"] == "finished" for record in records)
    listed = [each["id"] for each in server.ask("GET", "/requests").json()["data"]]
    assert listed[:10] == ids[::-1]
    assert server.ask("GET", f"/requests/{ids[0]}", "limited").status_code == 404, "another key's"
    assert server.metric("vllm:request_success_total") == before + 10
    assert server.metric("quire:key_generation_tokens_total", "user") == tokens + 30
    assert 'key="user"' not in server.ask("GET", "/metrics", "limited").text
    names = set(re.findall(r'quire:process_open_fds\{process="(\w+)"\}', server.ask("GET", "/metrics", "admin").text))
    assert names == {"api", "api_0", "api_1", "engine"}


def test_limits_hold_for_all_processes_together(server: Server) -> None:
    with streams(server, MOST) as running:
        assert [each.status_code for each in running] == [200] * MOST
        assert [server.complete().status_code for _ in range(4)] == [503] * 4
        assert server.ask("GET", "/load").json()["server_load"] == MOST
    assert server.complete().status_code == 200
    statuses = [server.complete("limited").status_code for _ in range(6)]
    assert statuses == [200] * 3 + [429] * 3
    headers = server.complete("limited").headers
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", "0")


def test_requests_are_aborted_over_any_connection(server: Server) -> None:
    with streams(server, MOST) as running:
        read = [events(each) for each in running]
        ids = [next(each)["id"] for each in read]
        assert {server.ask("POST", f"/v1/requests/{each}/abort").status_code for each in ids} == {200}
        reasons = [[event["choices"][0]["finish_reason"] for event in each][-1] for each in read]
        assert reasons == ["abort"] * MOST
    assert server.ask("POST", f"/v1/requests/{ids[0]}/abort").status_code == 404


def test_what_is_stored_is_found_over_any_connection(server: Server) -> None:
    body = {"model": "", "input": "Hello", "max_output_tokens": 4}
    first = server.ask("POST", "/v1/responses", json=body)
    assert first.status_code == 200, first.text
    stored = first.json()
    found = [server.ask("GET", f"/v1/responses/{stored['id']}").json() for _ in range(6)]
    assert [each["output"] for each in found] == [stored["output"]] * 6
    body |= {"previous_response_id": stored["id"], "stream": True}
    assert "response.incomplete" in server.ask("POST", "/v1/responses", json=body).text
    assert server.ask("POST", "/v1/completions", json={"prompt": 1}).status_code == 400
    assert server.ask("GET", "/v1/models", "none").status_code == 401
    assert server.ask("POST", "/v1/completions", "none", json={}).status_code == 401


def test_a_killed_process_costs_its_own_streams(server: Server) -> None:
    finished = server.metric("vllm:request_success_total")
    with streams(server, MOST) as running:
        read = [events(each) for each in running]
        for each in read:
            next(each)
        killed, other = server.api_pids()
        os.kill(killed, signal.SIGKILL)
        alive = 0
        for each in read:
            try:
                for _ in range(400):  # more than what was under way
                    next(each)
                alive += 1
            except (httpx.TransportError, StopIteration):
                pass
        wait_until(lambda: len(server.api_pids()) == 2)
        wait_until(lambda: not list(server.temporary.iterdir()))
        assert other in server.api_pids()
        assert server.ask("GET", "/load").json()["server_load"] == alive, "the engine has forgotten the others"
    assert {server.complete().status_code for _ in range(6)} == {200}
    assert server.metric("vllm:request_success_total") >= finished + 6, "counters never decrease"


def test_a_signal_lets_requests_finish(server: Server) -> None:
    """The last test: it stops the server."""
    with contextlib.ExitStack() as stack:
        read = []
        for _ in range(MOST):
            http = stack.enter_context(server.client())
            asked = {"prompt": [300], "max_tokens": 200, "ignore_eos": True, "stream": True}
            read.append(events(stack.enter_context(http.stream("POST", "/v1/completions", json=asked))))
        for each in read:
            next(each)
        server.process.send_signal(signal.SIGTERM)
        assert [[event["choices"][0]["finish_reason"] for event in each][-1] for each in read] == ["length"] * MOST
    assert server.process.wait(60) == 0
