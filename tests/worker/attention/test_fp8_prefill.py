"""Choice of the steps that prefill over upcast copies of an e4m3 cache's pages, and how much memory they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from benchmarks.model_shapes import model_folder
from engine.models.families import read_spec
from engine.models.spec import ModelSpec
from engine.models.wide_pages import WidePages
from engine.worker.attention.fp8_prefill import MOST_BYTES, Fp8PrefillAttention, scratch_bytes, upcast_layers
from engine.worker.attention.group_attention import AttentionStep, GroupAttention, Prefills
from engine.worker.attention.layer_attention import layer_attention
from engine.worker.device import CpuDevice
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions
from kernels.data.widening import WIDE_PAGE


@dataclass(frozen=True, slots=True)
class Hopper(CpuDevice):
    capability = (9, 0)  # type: ignore[assignment]


OPTIONS = RunnerOptions(
    device=Hopper(), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, max_model_len=131072, max_num_seqs=1024,
    max_num_batched_tokens=8192,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def spec_of(name: str, folder: Path) -> ModelSpec:
    return read_spec(Path(model_folder(name, folder)))


def attentions_of(spec: ModelSpec, options: RunnerOptions = OPTIONS) -> list[GroupAttention]:
    """Return the step data's owner of each cache group."""
    found = layer_attention(spec, KVCacheLayout.of_model(spec, options), options)
    return sorted(dict.fromkeys(found), key=lambda each: each.index)


def step(num_tokens: int, num_groups: int) -> AttentionStep:
    none = torch.empty(0, dtype=torch.int32)
    slots = torch.zeros(num_groups, num_tokens, dtype=torch.int64)
    return AttentionStep(0, none, none, none, None, torch.empty(num_groups, 0, 0), slots)


def widened(attentions: list[GroupAttention], query_lens: list[int], context_lens: list[int]) -> list[int]:
    """Return the number of upcast pages of each cache group."""
    prefills = Prefills(query_lens, context_lens, lambda tensor: tensor)
    found = [each.metadata(step(sum(query_lens), len(attentions)), prefills).prefill_kv for each in attentions]
    return [len(pages.pages) if isinstance(pages, WidePages) else 0 for pages in found]


def test_long_prompts_are_upcast(folder: Path) -> None:
    attentions = attentions_of(spec_of("llama-3.1-8b", folder))
    assert widened(attentions, [8192], [8192]) == [64]
    assert widened(attentions, [2, 8190], [3, 32000]) == [1 + 250]
    assert widened(attentions, [256] * 32, [256] * 32) == [0]
    assert widened(attentions, [16], [32000]) == [0]
    assert widened(attentions_of(spec_of("gpt-oss-20b", folder)), [8192], [8192]) == [64, 64]


def test_contexts_are_upcast_as_far_as_scratch_memory_goes(folder: Path) -> None:
    spec = spec_of("llama-3.1-8b", folder)
    options = replace(OPTIONS, max_model_len=1 << 20)
    attentions = attentions_of(spec, options)
    assert scratch_of(spec, options) == MOST_BYTES
    most = MOST_BYTES // (2 * 8 * 128 * 2)
    assert widened(attentions, [8192], [most]) == [most // WIDE_PAGE]
    assert widened(attentions, [8192], [most + 1]) == [0]
    few = replace(OPTIONS, max_model_len=8192, max_num_seqs=2)
    assert scratch_of(spec, few) == 2 * 8192 * (2 * 8 * 128 * 2), "no step has more"


def scratch_of(spec: ModelSpec, options: RunnerOptions) -> int:
    return scratch_bytes(upcast_layers(spec, KVCacheLayout.of_model(spec, options), options))


@pytest.mark.parametrize("max_model_len", [2000, 5000, 131072, 1 << 20])
def test_the_fullest_step_is_upcast_and_full(folder: Path, max_model_len: int) -> None:
    """So the peak of memory use is measured, and all kernels are compiled, at start-up."""
    for name in ("llama-3.1-8b", "gemma-3-12b"):
        attentions = attentions_of(spec_of(name, folder), replace(OPTIONS, max_model_len=max_model_len))
        seen = [0] * len(attentions)
        for query_lens, context_lens in (step for each in attentions for step in each.fullest_steps):
            assert OPTIONS.max_num_batched_tokens * 0.99 < sum(query_lens) <= OPTIONS.max_num_batched_tokens
            assert max(context_lens) < max_model_len
            pages = widened(attentions, query_lens, context_lens)
            seen = [a + b for a, b in zip(seen, pages, strict=True)]
        assert all(seen)


def test_layers_with_a_window_upcast_what_it_shows(folder: Path) -> None:
    spec = spec_of("gemma-3-12b", folder)
    groups = KVCacheLayout.of_model(spec, OPTIONS).groups
    found = widened(attentions_of(spec), [4096], [32768])
    assert found == [256 if not group.window else 32 + 8 for group in groups]


def test_what_never_upcasts(folder: Path) -> None:
    spec = spec_of("llama-3.1-8b", folder)
    assert not upcasts(spec, replace(OPTIONS, kv_dtype=torch.bfloat16))
    assert not upcasts(spec, replace(OPTIONS, device=CpuDevice()))
    assert not upcasts(spec, replace(OPTIONS, max_model_len=256)), "its prompts are short"
    assert not upcasts(spec_of("glm-4.7-flash", folder), OPTIONS), "it caches latents"


def upcasts(spec: ModelSpec, options: RunnerOptions) -> bool:
    return any(isinstance(each, Fp8PrefillAttention) for each in attentions_of(spec, options))
