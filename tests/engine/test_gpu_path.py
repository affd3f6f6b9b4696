"""A step as it runs on a GPU, without one: all of it but the hardware. Triton's interpreter runs the kernels.

What only a GPU has is played: pinned memory is memory, an event has always happened, and a captured graph is its step,
run again.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernels
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.sampling_params import SamplingParams
from engine.core.structured_outputs import StructuredOutputs
from engine.engine import Engine
from engine.input_processor import InputProcessor
from engine.worker import startup
from engine.worker.cuda_graphs import DecodeGraphs
from engine.worker.model_runner import ModelRunner

pytest.importorskip("triton")

REQUESTS = {
    "greedy": ([5, 6, 7], SamplingParams(temperature=0, max_tokens=12)),
    "long prompt": (list(range(40)), SamplingParams(temperature=0, max_tokens=4)),
    "sampled": ([9] * 13, SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=1, max_tokens=10)),
    "special": ([1, 2], SamplingParams(temperature=0.8, repetition_penalty=1.3, logprobs=2, seed=2, max_tokens=6)),
    "scored": ([8, 3, 8, 3, 8], SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=2)),
    "word": ([3, 1], SamplingParams(seed=3, max_tokens=5, structured_outputs=StructuredOutputs(regex="[a-p]{4}"))),
    "word, scored": (
        [3, 2],
        SamplingParams(logprobs=1, seed=4, max_tokens=5, structured_outputs=StructuredOutputs(regex="[k-z]{4}")),
    ),
    "word, unlike": (
        [3, 3],
        SamplingParams(
            temperature=0.9,
            top_k=9,
            presence_penalty=2,
            seed=5,
            max_tokens=5,
            structured_outputs=StructuredOutputs(regex="[0-9]{4}"),
        ),
    ),
    "late": ([4] * 30, SamplingParams(temperature=0, max_tokens=5)),
}


class Replayed(DecodeGraphs):
    """Graphs whose replay is the captured step."""

    replays: ClassVar[list[int]] = []
    second_replays: ClassVar[list[int]] = []

    def __init__(self, decode: Any, filtered: Any, buffer: Tensor, sizes: list[int], progress: bool) -> None:
        self._decode, self._filtered, self._buffer, self._sizes = decode, filtered, buffer, sizes

    def run(self, size: int, packed: Tensor) -> tuple[Tensor, Tensor]:
        self.replays.append(size)
        self._buffer[: len(packed)].copy_(packed)
        self._last: tuple[Tensor, Tensor] = self._decode(self._buffer, size)
        return self._last

    def run_filtered(self, size: int) -> None:
        assert size == self.replays[-1]
        self.second_replays.append(size)
        self._filtered(*self._last)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, event = torch.empty, SimpleNamespace(record=lambda: None, synchronize=lambda: None, query=lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for module, names in kernels.BACKENDS["cuda"].items():
        for name in names:
            monkeypatch.setattr(kernels, name, getattr(importlib.import_module(module), name))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(ModelRunner, "on_gpu", property(lambda runner: True, lambda runner, value: None), raising=False)
    monkeypatch.setattr(startup, "compile_kernels", lambda runner: None)  # the interpreter would run what it launches
    monkeypatch.setattr(startup, "DecodeGraphs", Replayed)
    monkeypatch.setattr(Replayed, "replays", [])
    monkeypatch.setattr(Replayed, "second_replays", [])


def answers(model: Path, names: Iterable[str] = REQUESTS, **settings: Any) -> dict[str, list[int]]:
    config = EngineConfig(
        model=str(model), device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=24,
        block_size=8, num_gpu_blocks_override=8, **settings,
    )  # fmt: skip
    engine = Engine(config, progress=False)
    input_processor = InputProcessor.load(config)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for name in tokens:
        if name != "late":
            prompt, sampling = REQUESTS[name]
            engine.add_request(input_processor.check(EngineRequest(name, prompt, sampling)))
    steps = 0
    while engine.has_work():
        steps += 1
        if steps == 6 and "late" in tokens:
            engine.add_request(EngineRequest("late", *REQUESTS["late"]))
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    engine.close()
    return tokens


def test_tokens_are_those_of_the_cpu(tiny_model: Path, request: pytest.FixtureRequest) -> None:
    expected = answers(tiny_model)
    request.getfixturevalue("gpu")
    assert answers(tiny_model) == expected
    assert set(Replayed.replays) >= {1, 2, 4}
    assert set(Replayed.second_replays) >= {2, 4}


def test_tokens_over_an_fp8_cache(tiny_model: Path, request: pytest.FixtureRequest) -> None:
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    names = ["greedy", "long prompt"]
    expected = answers(tiny_model, names, **settings)
    assert expected != answers(tiny_model, names)
    request.getfixturevalue("gpu")
    request.getfixturevalue("exact_float8")
    assert answers(tiny_model, names, **settings) == expected
