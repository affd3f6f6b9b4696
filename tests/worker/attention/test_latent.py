"""Choice of the steps that expand latents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.model_shapes import model_folder
from engine.core.kv.cache_groups import FULL
from engine.models.families import read_spec
from engine.models.spec import LatentSpec, ModelSpec
from engine.worker.attention.latent import LatentGroupAttention, can_expand, is_worth_expanding
from engine.worker.device import CpuDevice
from engine.worker.options import RunnerOptions


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(Path(model_folder("glm-4.7-flash", tmp_path_factory.mktemp("models"))))


def mixer_of(spec: ModelSpec) -> LatentSpec:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, LatentSpec)
    return mixer


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "expected"),
    [
        ([2048], [2048], True),
        ([100] * 40, [100] * 40, True),  # pages are almost full
        ([512], [8192], True),
        ([2048, 2], [2048, 100], True),
        ([33] * 40, [33] * 40, False),  # pages are half empty
        ([64], [8192], False),  # each position is projected for few queries
        ([2] * 40, [4000] * 40, False),
    ],
)
def test_steps_with_many_queries_for_each_position_are_worth_it(
    spec: ModelSpec, query_lens: list[int], context_lens: list[int], expected: bool
) -> None:
    assert is_worth_expanding(mixer_of(spec), query_lens, context_lens) is expected


def options(device: CpuDevice) -> RunnerOptions:
    return RunnerOptions(
        device=device, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, max_model_len=100000, max_num_seqs=8,
        max_num_batched_tokens=1000,
    )  # fmt: skip


class Accelerator(CpuDevice):
    is_accelerator = True


def attention_of(spec: ModelSpec, device: CpuDevice) -> LatentGroupAttention:
    return LatentGroupAttention(mixer_of(spec), 0, FULL, options(device))


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))


def test_a_step_expands_so_many_positions_at_most(spec: ModelSpec) -> None:
    expander = attention_of(spec, CpuDevice())
    assert expander.max_positions == 3968  # whole pages
    assert expander.expands([1000], [3968])
    assert not expander.expands([1000], [3969])
    assert not expander.expands([], [])
    assert expander.fullest_steps == [([1000], [3968])]
    unlike = LatentGroupAttention(replace(mixer_of(spec), value_dim=264), 0, FULL, options(CpuDevice()))
    assert not unlike.expands([1000], [1000])
    assert not unlike.fullest_steps


def test_a_gpu_computes_few_queries_over_latents(spec: ModelSpec) -> None:
    """Launching more kernels would take longer."""
    on_cpu, on_gpu = attention_of(spec, CpuDevice()), attention_of(spec, Accelerator())
    assert on_cpu.expands([192], [192])
    assert not on_gpu.expands([192], [192])
    assert on_gpu.expands([192] * 3, [192] * 3)


def test_heads_that_plain_attention_does_not_compute(spec: ModelSpec) -> None:
    mixer = mixer_of(spec)
    assert can_expand(mixer)
    assert can_expand(replace(mixer, plain_dim=128, value_dim=128))
    assert not can_expand(replace(mixer, value_dim=264)), "values are wider than keys"
    assert not can_expand(replace(mixer, plain_dim=256))
