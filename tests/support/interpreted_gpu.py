"""A GPU without the hardware: Triton's interpreter runs the kernels of a step.

Its device is an accelerator that does all work at once, and whose graphs are the captured work, done again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pytest
import torch

import kernels
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.params.structured import StructuredOutputs
from engine.engine import Engine
from engine.processing.input_processor import InputProcessor
from engine.setup import options
from engine.worker import startup
from engine.worker.device import CpuDevice, Graph, Memory
from kernels import reference
from tests.support.quick_interpreter import quicken

R = TypeVar("R")
REQUESTS = {
    "greedy": ([5, 6, 7], SamplingParams(temperature=0, max_tokens=9)),
    "long prompt": (list(range(40)), SamplingParams(temperature=0, max_tokens=4)),
    "sampled": ([9] * 13, SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=1, max_tokens=7)),
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
    "late": ([4] * 30, SamplingParams(temperature=0.9, logprobs=1, seed=6, max_tokens=5)),
}


@dataclass
class Replayed:
    """A graph whose replay is the captured work, done again."""

    work: Callable[[], Any]
    result: Any
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        for captured, again in zip(_tensors(self.result), _tensors(self.work()), strict=True):
            captured.copy_(again)


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """Tensors that captured work has returned: one, several, or None."""
    return (result,) if isinstance(result, torch.Tensor) else result or ()


@dataclass(frozen=True)
class InterpretedGPU(CpuDevice):
    """An accelerator whose memory is the CPU's, whose work is done when it is queued."""

    is_accelerator = True
    graphs: ClassVar[list[Replayed]] = []

    def memory(self) -> Memory:
        return Memory(total=1 << 30, free=1 << 29, used=0, peak=1 << 20)

    def capture(self, work: Callable[[], R], share_memory_with: Graph | None = None) -> tuple[Graph, R]:
        graph = Replayed(work, work())
        self.graphs.append(graph)
        return graph, graph.result


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, what would run on a GPU is interpreted."""
    quicken()
    for name in " ".join(kernels.BACKENDS["cpu"].values()).split():
        monkeypatch.setattr(kernels, name, getattr(reference, name))
    for module, names in kernels.BACKENDS["cuda"].items():
        for name in names.split():
            monkeypatch.setattr(kernels, name, getattr(importlib.import_module(module), name))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(options, "find_device", lambda name: InterpretedGPU())
    monkeypatch.setattr(startup, "compile_kernels", lambda *_: None)  # the interpreter would run what it launches
    monkeypatch.setattr(InterpretedGPU, "graphs", [])


def answers(
    model: Path,
    names: Iterable[str] = REQUESTS,
    begin: Callable[[Engine], None] = lambda engine: None,
    /,
    **settings: Any,
) -> dict[str, list[int]]:
    """The tokens of each request, and where it wants log-probabilities the ranks of these and the most likely tokens.

    `begin`: called with the engine before the first request.
    """
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 8, "max_model_len": 64}
    config = EngineConfig(model=str(model), device="cpu", dtype="float32", block_size=8, **few | settings)
    engine = Engine(config)
    begin(engine)
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
            for each in output.logprobs or ():
                tokens[output.request_id] += [each.rank, *each.top_ids]
    engine.close()
    return tokens
