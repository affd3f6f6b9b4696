"""The Ray Serve application: streaming, from one replica to two, and one that is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.processes import free_port
from engine import LLM, SamplingParams
from engine.replicas.engine_process import ENGINE_MODULE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE = 240.0  # seconds that Ray may take for anything


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


@pytest.fixture(scope="module")
def url(cluster: Any, demo_model: Path) -> Iterator[str]:
    """An application of one model, which takes one core of a node for each of its replicas."""
    import ray
    from ray import serve

    from server.deploy_ray import build_openai_app

    port = free_port()
    config = {
        "model_loading_config": {"model_id": "demo", "model_source": str(demo_model)},
        "engine_kwargs": {"device": "cpu", "max_num_seqs": 2, "max_model_len": 2048, "num_gpu_blocks_override": 256},
        "deployment_config": {
            "autoscaling_config": {
                "min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "metrics_interval_s": 1,
                "look_back_period_s": 2,
            },
        },
    }  # fmt: skip
    ray.init(address=cluster.address)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": [config]}), name="llm")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def num_replicas(state: str = "RUNNING") -> int:
    from ray import serve

    replicas = serve.status().applications["llm"].deployments["LLMServer:demo"].replica_states
    return int(replicas.get(state, 0))


def engine_pids() -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
            parent = int((file.parent / "stat").read_text().rpartition(")")[2].split()[1])
            is_ours = b"LLMServer" in Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            continue
        if ENGINE_MODULE.encode() in words and is_ours:
            found.append(int(file.parent.name))
    return found


def streamed(url: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    body = {
        "model": "demo", "prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def test_a_stream_is_the_models(url: str, demo_model: Path) -> None:
    alone = LLM(str(demo_model), device="cpu", max_model_len=512, num_gpu_blocks_override=64)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    expected = alone.generate(["Once upon a time"], params, use_tqdm=False)[0].outputs[0].text
    alone.close()
    events = list(streamed(url, 24))
    assert len(events) > 4
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert [each["id"] for each in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]] == ["demo"]
    assert httpx.get(f"{url}/readyz", timeout=60).status_code == 200
    assert "<title>" in httpx.get(url, timeout=60).text, "the chat page"


def test_requests_that_wait_bring_a_second_replica(url: str) -> None:
    is_enough = threading.Event()

    def ask() -> None:
        while not is_enough.is_set():
            for _ in streamed(url, 1500):
                pass

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: num_replicas() == 2, "there is one replica for eight requests, of which two run")
    finally:
        is_enough.set()
        for thread in threads:
            thread.join()
    assert len(engine_pids()) == 2


def test_an_engine_and_a_replica_are_lost(url: str) -> None:
    events = streamed(url, 1900)
    next(events)
    for pid in engine_pids():
        os.kill(pid, signal.SIGKILL)
    assert any("error" in event for event in events), "it had begun"
    assert list(streamed(url, 8)), "the engines are started again"

    events = streamed(url, 1900)
    next(events)
    for pid in engine_pids():
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
    assert any("error" in event for event in events), "the replica was lost with it"
    until(lambda: httpx.get(f"{url}/readyz", timeout=PATIENCE).status_code == 200, "Ray Serve starts others")
    assert list(streamed(url, 8))
