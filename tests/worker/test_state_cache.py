"""Division of the memory between states and KV blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.models.recurrent_spec import StateTensor
from engine.worker.device import CpuDevice
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions
from engine.worker.state_cache import CHECKPOINTS, STATES_PER_REQUEST, TYPICAL_TOKENS, StateLayout

BLOCK_SIZE = 16


def layout_of(state_bytes: int, token_bytes: int) -> KVCacheLayout:
    """One layer that attends, and one with a state."""
    whole = KVCacheLayout.of([0], num_kv_heads=1, head_dim=token_bytes // 4, block_size=BLOCK_SIZE, dtype=torch.float16)
    part = StateTensor((state_bytes // 4,), "float32")
    states = StateLayout(((), (part,)), range(2), {"float32": torch.float32})
    return whole._beside_states([0], states, 1)


def options_of(max_num_seqs: int, max_model_len: int = 4096, **more: Any) -> RunnerOptions:
    limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 8192}
    return RunnerOptions(device=CpuDevice(), dtype=torch.float16, kv_dtype=torch.float16, **(limits | more))


def held(layout: KVCacheLayout, num_bytes: int, options: RunnerOptions) -> tuple[int, int, float, float]:
    """Return blocks, states, and how many requests of `TYPICAL_TOKENS` find blocks, and states."""
    num_blocks, num_states = layout.divided(num_bytes, options)
    used = num_blocks * layout.block_bytes + num_states * layout.state_bytes
    assert num_bytes - layout.block_bytes < used <= num_bytes
    return num_blocks, num_states, num_blocks * BLOCK_SIZE / TYPICAL_TOKENS, num_states / STATES_PER_REQUEST


def test_requests_of_typical_length_use_up_both() -> None:
    layout = layout_of(120 << 20, 64 << 10)
    assert (layout.state_bytes, layout.block_bytes) == (120 << 20, BLOCK_SIZE * 64 << 10)
    *_, by_blocks, by_states = held(layout, 30 << 30, options_of(1024))
    assert by_blocks == pytest.approx(by_states, rel=0.02)
    assert by_states == pytest.approx((30 << 10) / (1.25 * 120 + 128), rel=0.02), "MiB of each"


def test_blocks_get_a_third_and_a_whole_context() -> None:
    small = layout_of(56 << 20, 6 << 10)
    num_blocks, *_ = held(small, 60 << 30, options_of(1024))
    assert num_blocks * small.block_bytes == pytest.approx((60 << 30) / 3, rel=0.01)
    large = layout_of(180 << 20, 64 << 10)
    context = 131_072  # 8 GiB
    num_blocks, *_ = held(large, 18 << 30, options_of(1024, context))
    assert num_blocks * BLOCK_SIZE >= context, "typical requests leave less"
    num_blocks, *_ = held(large, 10 << 30, options_of(1024, context))
    assert num_blocks * large.block_bytes == pytest.approx(5 << 30, rel=0.05), "no more than half"


def test_few_requests_at_once_leave_the_memory_to_blocks() -> None:
    layout = layout_of(75 << 20, 20 << 10)
    _, num_states, *_ = held(layout, 60 << 30, options_of(16))
    assert num_states == 20 + 16 + CHECKPOINTS
    assert held(layout, 60 << 30, options_of(16, num_states_override=7))[1] == 7
    assert layout.num_states(None, options_of(16)) == num_states
