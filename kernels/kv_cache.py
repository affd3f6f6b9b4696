"""Writing keys and values to their slots of the paged KV cache, in Triton: one program for a token and some heads."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch_dependents, pdl_options, wait_for_inputs

HEADS_PER_PROGRAM = 8


@triton.jit
def slot_offset(slot, stride_block, stride_offset, BLOCK_SIZE: tl.constexpr):
    """Where an int64 slot begins in a cache, in elements, before its head; int64, since it may pass 2³¹."""
    return (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_offset


@triton.jit
def _store_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping,
    stride_key, stride_value, stride_block, stride_head, stride_offset,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        d = tl.arange(0, D_PAD)[None, :]
        mask = (heads < NUM_KV_HEADS) & (d < HEAD_DIM)
        at = slot_offset(slot, stride_block, stride_offset, BLOCK_SIZE) + heads * stride_head + d
        source = heads * HEAD_DIM + d
        tl.store(key_cache + at, tl.load(key + token * stride_key + source, mask=mask), mask=mask)
        tl.store(value_cache + at, tl.load(value + token * stride_value + source, mask=mask), mask=mask)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `kernels.reference.store_kv`. Heads must be contiguous, the token strides of key and value are free."""
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride(3) == 1
    if num_tokens:
        heads = min(triton.next_power_of_2(num_kv_heads), HEADS_PER_PROGRAM)
        _store_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, heads))](
            key, value, key_cache, value_cache, slot_mapping,
            key.stride(0), value.stride(0), *key_cache.stride()[:3],
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, D_PAD=triton.next_power_of_2(head_dim), HEADS=heads,
            BLOCK_SIZE=key_cache.shape[2], num_warps=4, **pdl_options(key.device),
        )  # fmt: skip
