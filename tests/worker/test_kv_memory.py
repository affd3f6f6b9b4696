"""The KV cache's memory: how layers share blocks, and zeros that cost a CPU memory only once they are written."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.worker.device import CpuDevice, Memory
from engine.worker.kv_cache import (
    GRAPH_RESERVE,
    CachedLayer,
    KVCacheLayout,
    KVCacheTooSmallError,
    blocks_that_fit,
)
from engine.worker.options import RunnerOptions
from engine.worker.sampling.token_history import TokenHistory
from tests.support.kv_tensors import allocate_kv

CPU = CpuDevice()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_are_zeros_and_keep_what_is_written(dtype: torch.dtype) -> None:
    layout = KVCacheLayout.of([0, 0], num_kv_heads=3, head_dim=8, block_size=16, dtype=dtype)
    layers = allocate_kv(layout, 5, CPU)
    assert [(tuple(layer.shape), layer.dtype) for layer in layers] == [((2, 5, 3, 16, 8), dtype)] * 2
    assert not any(layer.float().any() for layer in layers)
    layers[0][1, 4] = 1
    assert layers[0].float().sum() == 3 * 16 * 8
    assert not layers[1].float().any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_blocks_that_nobody_wrote_take_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    layout = KVCacheLayout.of([0, 0], num_kv_heads=4, head_dim=64, block_size=16, dtype=torch.float32)
    before = resident()
    layers = allocate_kv(layout, (1 << 30) // layout.block_bytes, CPU)
    assert sum(layer.nbytes for layer in layers) == 1 << 30
    assert resident() - before < 1 << 28


def layout_of(windows: list[int], block_size: int = 16) -> KVCacheLayout:
    return KVCacheLayout.of(windows, num_kv_heads=2, head_dim=8, block_size=block_size, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("windows", "groups", "num_slots"),
    [
        ([0] * 5, [0], 5),
        ([64] * 5, [64], 5),
        ([64, 0] * 6, [64, 0], 6),  # as Gemma 2 and gpt-oss
        (([64] * 3 + [0]) * 3, [64, 0, 64, 64], 3),  # as Cohere 2
        (([512] * 5 + [0]) * 4 + [512] * 2, [512, 0, *[512] * 5], 4),  # as Gemma 3 1B: 28 slots for 26 layers
        ([8, 16, 0], [8, 16, 0], 1),
    ],
)
def test_layers_share_blocks_of_one_size(windows: list[int], groups: list[int], num_slots: int) -> None:
    layout = layout_of(windows)
    assert layout.num_slots == num_slots
    assert sorted(group.window for group in layout.groups) == sorted(groups)
    assert [layout.groups[group].window for group in layout.group_of] == windows
    slots = list(zip(layout.group_of, layout.slot_of, strict=True))
    assert len(set(slots)) == len(windows), "two layers write the same part of a block"
    assert max(layout.slot_of) < num_slots
    assert len(layout.groups) * num_slots <= 1.15 * len(windows)
    layers = allocate_kv(layout, 2, CPU)
    assert sum(layer.nbytes for layer in {id(layer): layer for layer in layers}.values()) == 2 * layout.block_bytes


def test_narrow_layers_share_a_slot() -> None:
    """Layers as in Gemma 4: heads of two sizes, layers that read the cache of another."""
    narrow, wide = CachedLayer(64, 2, 8), CachedLayer(0, 4, 8)
    layers, sources = [narrow, narrow, wide, narrow, narrow, wide], [None, None, None, None, 3, 2]
    layout = KVCacheLayout.of_layers(layers, sources, block_size=4, dtype=torch.bfloat16)
    assert (len(layout.groups), layout.num_slots) == (3, 1)
    assert layout.group_of == (0, 0, 1, 2, 2, 1)
    assert layout.block_bytes == 2 * 4 * 32 * 2
    kv_cache = allocate_kv(layout, 5, CPU)
    assert [kv.shape[2:] for kv in kv_cache] == [(layer.num_kv_heads, 4, 8) for layer in layers]
    assert kv_cache[4] is kv_cache[3]
    assert kv_cache[5] is kv_cache[2]
    for index in (0, 1):
        kv_cache[index][:, 3] = index + 1
    assert kv_cache[0][:, 3].eq(1).all(), "layers of one group never meet"
    (slot,) = layout.slots(kv_cache)
    assert slot.shape == (2, 5, layout.block_bytes // 2)
    assert slot.view(torch.bfloat16)[:, 3].ne(0).all(), "and fill the block between them"
    assert not slot[:, [0, 1, 2, 4]].any()


def test_half_a_window_nearly_doubles_what_fits() -> None:
    """32k tokens, half of the layers with a window of 1k, once their prompts are computed in chunks of 2k."""
    full, half = layout_of([0] * 32), layout_of([0, 1024] * 16)
    num_tokens, chunk = 32768, 2048
    per_token = full.block_bytes * full.most_blocks(num_tokens, chunk)
    assert per_token / (half.block_bytes * half.most_blocks(num_tokens, chunk)) >= 1.8


def options_of(max_model_len: int, **more: Any) -> RunnerOptions:
    limits = {"max_model_len": max_model_len, "max_num_seqs": 4, "max_num_batched_tokens": 100}
    return RunnerOptions(device=CPU, dtype=torch.float32, kv_dtype=torch.float32, **(limits | more))


def test_a_window_makes_room_for_a_longer_context() -> None:
    assert layout_of([0, 64]).context_that_fits(40, options_of(384)) == 384
    with pytest.raises(KVCacheTooSmallError, match="room for 320 tokens"):
        layout_of([0]).context_that_fits(20, options_of(384))
    assert layout_of([0]).groups == (FULL,)
    assert layout_of([64]).groups == (CacheGroup(64),)


def test_a_context_that_was_not_asked_for_is_shortened_to_what_fits() -> None:
    layout = layout_of([0])
    assert layout.context_that_fits(100, options_of(4096, shortens_context=True)) == 1600
    assert layout.context_that_fits(100, options_of(512, shortens_context=True)) == 512
    for shortens_context, num_blocks in ((False, 100), (True, 60)):  # 960 tokens are too few to be of use
        with pytest.raises(KVCacheTooSmallError, match="--max-model-len"):
            layout.context_that_fits(num_blocks, options_of(4096, shortens_context=shortens_context))


def test_what_bounds_the_cache_on_a_cpu_is_said() -> None:
    layout, gib = layout_of([0]), 1 << 30
    assert layout.cpu_cache_bytes(options_of(4096), 64 * gib)[1] == "room for 4 full contexts"
    many = options_of(131072, max_num_seqs=1000)
    assert layout.cpu_cache_bytes(many, 64 * gib) == (4 * gib, "4 GiB, or one full context")
    free = 8 * gib + 4 * 1000 * 131072  # the second part is for the sampler's token history
    assert layout.cpu_cache_bytes(many, free) == (2 * gib, "a quarter of the free memory")


def test_a_token_history_fits_beside_the_cache_on_a_gpu() -> None:
    layout, options = layout_of([0]), options_of(1 << 16, max_num_seqs=32)
    memory = Memory(total=1 << 30, free=1023 << 20, used=1 << 20, peak=1 << 20)
    held = blocks_that_fit(layout, memory, options)[0] * layout.block_bytes + memory.peak + GRAPH_RESERVE
    history = TokenHistory(options.max_num_seqs, options.max_model_len, CPU)
    slots = [history.take(np.array([i, 5], np.int32)) for i in range(options.max_num_seqs)]
    assert len(set(slots)) == options.max_num_seqs
    assert history.tokens[slots, 0].tolist() == list(range(options.max_num_seqs))
    assert history.tokens.nbytes == 8 << 20
    assert 0 <= memory.total * options.gpu_memory_utilization - held - history.tokens.nbytes < layout.block_bytes
