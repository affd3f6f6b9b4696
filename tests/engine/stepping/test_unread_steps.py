"""Pipelines of any depth: what the CPU writes for a step stays as it is until the device has read it.

A CPU runs each step at once. So the device's delay is emulated: one runner holds all stages, and what the last stage
would do with a step happens only when the engine reads that step, the latest time at which a GPU may do it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.config import EngineConfig
from engine.core.batch import SchedulerOutput, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.params.structured import StructuredOutputs
from engine.engine import Engine
from engine.processing.input_processor import InputProcessor
from engine.worker.input_batch import PackedStep
from engine.worker.model_runner import ModelRunner
from engine.worker.startup import build_runner
from engine.worker.step_handle import StepHandle


class Unread:
    """A launched step of which the device does the rest when it is read."""

    has_ended = device_waited = False
    wait_seconds = 0.0

    def __init__(self, handle: StepHandle, late: Callable[[], None]) -> None:
        self._handle, self._late = handle, late
        self.guided, self.masks = handle.guided, handle.masks

    def sample(self, deferred: Any = ()) -> None:
        """Queue the sampling: nothing runs yet."""

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        self._late()
        if self._handle.guided:
            self._handle.sample()
        return self._handle.read()


def make_engine(
    model: Path, num_stages: int, late: Callable[[ModelRunner], Callable[[], None]], **settings: Any
) -> Engine:
    """`late`: called when a step has been launched; returns what the device does before the rest of the step."""

    def build(folder: Path, spec: Any, options: Any, *, progress: Any) -> ModelRunner:
        runner = build_runner(folder, spec, options, progress=progress)
        launch = runner.launch
        runner.launch = lambda output: Unread(launch(output), late(runner))  # type: ignore[assignment, return-value]
        return runner

    config = EngineConfig(
        model=str(model), device="cpu", dtype="float32", max_model_len=256, num_gpu_blocks_override=256,
        pipeline_parallel_size=num_stages, enforce_eager=True, **settings,
    )  # fmt: skip
    return Engine(config, build_runner=build)  # type: ignore[arg-type]


def device_tensors(runner: ModelRunner) -> list[Tensor]:
    """Tensors that the device itself writes in the order of its queue: a step that runs late sees its own."""
    step = runner.forward.step
    values = [getattr(owner, field.name) for owner in (step, step.samples) for field in fields(owner)]
    return [runner.sampler._mask_of, *(value for value in values if isinstance(value, Tensor))]


@pytest.mark.parametrize("num_stages", [1, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
def test_masks_stay_until_the_device_has_read_them(demo_model: Path, num_stages: int) -> None:
    def late(runner: ModelRunner) -> Callable[[], None]:
        saved = [tensor.clone() for tensor in device_tensors(runner)]

        def restore() -> None:
            for tensor, value in zip(device_tensors(runner), saved, strict=True):
                tensor.copy_(value)

        return restore

    engine = make_engine(demo_model, num_stages, late, max_num_seqs=16)
    processor = InputProcessor.load(EngineConfig(model=str(demo_model), device="cpu", max_model_len=256))
    patterns = {letter: f"{letter}{{24}}" for letter in "abcdefgh"}
    for letter, pattern in patterns.items():
        params = SamplingParams(
            temperature=0, max_tokens=40, structured_outputs=StructuredOutputs(regex=pattern),
            presence_penalty=0.5 * (letter in "gh"),  # a group of its own, with masks of its own
        )  # fmt: skip
        engine.add_request(processor.check(EngineRequest(letter, processor.encode("Once upon"), params)))
    tokens: dict[str, list[int]] = {letter: [] for letter in patterns}
    while engine.has_work():
        for output in engine.step():
            assert not output.error
            tokens[output.request_id] += output.new_token_ids
    assert processor.tokenizer is not None
    ends = processor.eos_token_ids
    for letter, pattern in patterns.items():
        text = processor.tokenizer.decode([token for token in tokens[letter] if token not in ends])
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("num_stages", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 5, 8))])
def test_packed_steps_stay_until_the_device_has_read_them(demo_model: Path, num_stages: int) -> None:
    packed: list[PackedStep] = []
    stayed: list[bool] = []

    def late(runner: ModelRunner) -> Callable[[], None]:
        buffer = packed[-1].packed
        content = buffer.clone()

        return lambda: stayed.append(buffer.equal(content))

    engine = make_engine(demo_model, num_stages, late, max_num_seqs=32)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    pack = runner.batch.pack

    def packing(*arguments: Any) -> PackedStep:
        packed.append(pack(*arguments))
        return packed[-1]

    runner.batch.pack = packing  # type: ignore[method-assign, assignment]
    for i in range(24):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        engine.add_request(EngineRequest(str(i), [i + 3] * 5, params))
    most_in_flight = 0
    while engine.has_work():
        engine.step()
        most_in_flight = max(most_in_flight, len(engine.in_flight))
    assert most_in_flight == max(num_stages - 1, 1)
    assert len(stayed) >= 12
    assert all(stayed)
