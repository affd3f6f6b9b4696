"""Which steps prefill over wide copies of an e4m3 cache's pages, and how much memory they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from benchmarks.model_shapes import model_folder
from engine.models.attention import AttentionMetadata
from engine.models.families import read_spec
from engine.models.spec import ModelSpec
from engine.worker.attention.fp8_prefill import MOST_BYTES, CacheWidener
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


def widener_of(spec: ModelSpec, options: RunnerOptions = OPTIONS) -> CacheWidener | None:
    return CacheWidener.of_model(spec, KVCacheLayout.of_model(spec, options), options)


def metadata(num_tokens: int) -> AttentionMetadata:
    none = torch.empty(0, dtype=torch.int32)
    return AttentionMetadata(0, none, none, none, none, torch.zeros(num_tokens, dtype=torch.int64))


def widened(widener: CacheWidener, query_lens: list[int], context_lens: list[int], num_groups: int) -> list[int]:
    """Widened pages of each cache group."""
    groups = widener.prepared([metadata(sum(query_lens))] * num_groups, query_lens, context_lens)
    return [0 if group.wide_pages is None else len(group.wide_pages.pages) for group in groups]


def test_long_prompts_are_widened(folder: Path) -> None:
    widener = widener_of(spec_of("llama-3.1-8b", folder))
    assert widener is not None
    assert widened(widener, [8192], [8192], 1) == [64]
    assert widened(widener, [2, 8190], [3, 32000], 1) == [1 + 250]
    assert widened(widener, [256] * 32, [256] * 32, 1) == [0]
    assert widened(widener, [16], [32000], 1) == [0]
    narrow = widener_of(spec_of("gpt-oss-20b", folder))
    assert narrow is not None
    assert widened(narrow, [8192], [8192], 2) == [64, 64]


def test_contexts_are_widened_as_far_as_scratch_memory_goes(folder: Path) -> None:
    spec = spec_of("llama-3.1-8b", folder)
    widener = widener_of(spec, replace(OPTIONS, max_model_len=1 << 20))
    assert widener is not None
    assert widener.scratch_bytes == MOST_BYTES
    most = MOST_BYTES // (2 * 8 * 128 * 2)
    assert widened(widener, [8192], [most], 1) == [most // WIDE_PAGE]
    assert widened(widener, [8192], [most + 1], 1) == [0]
    few = widener_of(spec, replace(OPTIONS, max_model_len=8192, max_num_seqs=2))
    assert few is not None
    assert few.scratch_bytes == 2 * 8192 * (2 * 8 * 128 * 2), "no step has more"


@pytest.mark.parametrize("max_model_len", [2000, 5000, 131072, 1 << 20])
def test_the_fullest_step_is_widened_and_full(folder: Path, max_model_len: int) -> None:
    """So the peak of memory use is measured, and all kernels are compiled, at start-up."""
    for name in ("llama-3.1-8b", "gemma-3-12b"):
        spec = spec_of(name, folder)
        options = replace(OPTIONS, max_model_len=max_model_len)
        num_groups = len(KVCacheLayout.of_model(spec, options).groups)
        widener = widener_of(spec, options)
        assert widener is not None
        seen = [0] * num_groups
        for query_lens, context_lens in widener.fullest_steps:
            assert OPTIONS.max_num_batched_tokens * 0.99 < sum(query_lens) <= OPTIONS.max_num_batched_tokens
            assert max(context_lens) < max_model_len
            pages = widened(widener, query_lens, context_lens, num_groups)
            seen = [a + b for a, b in zip(seen, pages, strict=True)]
        assert all(seen)


def test_layers_with_a_window_widen_what_it_shows(folder: Path) -> None:
    spec = spec_of("gemma-3-12b", folder)
    groups = KVCacheLayout.of_model(spec, OPTIONS).groups
    widener = widener_of(spec)
    assert widener is not None
    found = widened(widener, [4096], [32768], len(groups))
    assert found == [256 if not group.window else 32 + 8 for group in groups]


def test_what_never_widens(folder: Path) -> None:
    spec = spec_of("llama-3.1-8b", folder)
    assert widener_of(spec, replace(OPTIONS, kv_dtype=torch.bfloat16)) is None
    assert widener_of(spec, replace(OPTIONS, device=CpuDevice())) is None
    assert widener_of(spec, replace(OPTIONS, max_model_len=256)) is None, "its prompts are short"
    assert widener_of(spec_of("glm-4.7-flash", folder)) is None, "it caches latents"
