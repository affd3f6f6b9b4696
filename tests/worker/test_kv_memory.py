"""The KV cache's memory: how layers share blocks, and zeros that cost a CPU memory only once they are written."""

import resource
from pathlib import Path

import pytest
import torch

from engine.core.cache_groups import FULL, CacheGroup
from engine.worker.device import CpuDevice
from engine.worker.kv_cache import KVCacheLayout, KVCacheTooSmallError

CPU = CpuDevice()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_are_zeros_and_keep_what_is_written(dtype: torch.dtype) -> None:
    layers = KVCacheLayout.of([0, 0], num_kv_heads=3, head_dim=8, block_size=16, dtype=dtype).allocate(5, CPU)
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
    layers = layout.allocate((1 << 30) // layout.block_bytes, CPU)
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
    layers = layout.allocate(2, CPU)
    assert sum(layer.nbytes for layer in {id(layer): layer for layer in layers}.values()) == 2 * layout.block_bytes


def test_half_a_window_nearly_doubles_what_fits() -> None:
    """32k tokens, half of the layers with a window of 1k, once their prompts are computed in chunks of 2k."""
    full, half = layout_of([0] * 32), layout_of([0, 1024] * 16)
    num_tokens, chunk = 32768, 2048
    per_token = full.block_bytes * full.most_blocks(num_tokens, chunk)
    assert per_token / (half.block_bytes * half.most_blocks(num_tokens, chunk)) >= 1.8


def test_a_window_makes_room_for_a_longer_context() -> None:
    layout_of([0, 64]).check_fits(num_blocks=40, max_model_len=384, max_chunk=100)
    with pytest.raises(KVCacheTooSmallError, match="room for 320 tokens"):
        layout_of([0]).check_fits(num_blocks=20, max_model_len=384, max_chunk=100)
    assert layout_of([0]).groups == (FULL,)
    assert layout_of([64]).groups == (CacheGroup(64),)
