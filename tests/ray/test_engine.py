"""An engine whose ranks are actors of a Ray cluster, through HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import LLM, SamplingParams
from engine.worker.parallel.launcher import LaunchError
from engine.worker.parallel.ray_launcher import RayLauncher
from tests.support.served import metric, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = "Once upon a time"
LONG_PROMPT = "A small cat lived in a house by the sea, and every morning it looked for fish. " * 4
FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "512", "--num-gpu-blocks-override", "64")


def streamed(url: str, max_tokens: int = 24, prompt: str = PROMPT) -> Iterator[str]:
    """The server-sent events of an answer."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        assert response.status_code == 200
        yield from (line for line in response.iter_lines() if line.startswith("data: "))


def text_of(events: Iterator[str]) -> str:
    *events_, done = events
    assert done == "data: [DONE]"
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events_)


def rank_actors() -> list[int]:
    """The pids of ranks that are actors."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if file.read_bytes().startswith(b"ray::RankActor"):
                found.append(int(file.parent.name))
    return found


def wait_for_their_end() -> None:
    deadline = time.monotonic() + 120
    while rank_actors():
        assert time.monotonic() < deadline, "an actor is left"
        time.sleep(0.5)


@pytest.mark.parametrize("size", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_ranks_on_two_nodes_and_a_lost_one(cluster: Any, demo_model: Path, size: str) -> None:
    alone = LLM(str(demo_model), device="cpu", dtype="float32", max_model_len=512, num_gpu_blocks_override=64)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    expected = alone.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text
    alone.close()
    with serve(demo_model, *FLAGS, size, "2", "--distributed-executor-backend", "ray") as url:
        assert text_of(streamed(url)) == expected
        (pid,) = rank_actors()
        events = streamed(url, max_tokens=450)
        next(events)
        os.kill(pid, signal.SIGKILL)
        assert any("error" in event for event in events), "it had begun"
        deadline = time.monotonic() + 240
        while httpx.get(f"{url}/health", timeout=60).status_code != 200 or not metric(
            url, "quire:engine_restarts_total"
        ):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert text_of(streamed(url)) == expected, "after the restart"
    wait_for_their_end()


def test_prefix_cache_files_of_two_nodes(cluster: Any, demo_model: Path, tmp_path: Path) -> None:
    ranks = "--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"
    texts, hits = [], []
    for _ in range(2):
        with serve(demo_model, *FLAGS, *ranks, "--prefix-cache-file", str(tmp_path / "cache")) as url:
            texts.append(text_of(streamed(url, prompt=LONG_PROMPT)))
            hits.append(metric(url, "vllm:prefix_cache_hits_total"))
        wait_for_their_end()
    assert texts[0] == texts[1]
    assert hits[0] == 0 < hits[1]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache.rank0", "cache.rank1"]


def test_a_cluster_without_a_gpu(cluster: Any, tiny_model: Path) -> None:
    with pytest.raises(LaunchError, match="this node of the Ray cluster has no GPU"):
        RayLauncher(2, "cuda", tiny_model)


def test_a_model_that_is_not_on_every_node(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"a rank cannot start on its node of the Ray cluster: .*/absent: there is no such"
    ):
        RayLauncher(2, "cpu", tmp_path / "absent")
    wait_for_their_end()
