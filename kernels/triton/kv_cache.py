"""Writing keys and values to their slots of the paged KV cache, in Triton: one program for a token and some heads."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

HEADS_PER_PROGRAM = 8


@triton.jit
def slot_offset(slot, stride_block, stride_offset, BLOCK_SIZE: tl.constexpr):
    """The offset of a slot (int64) in a cache, in elements, without its head's; int64, since it may exceed 2³¹."""
    return (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_offset


@triton.jit
def to_e4m3(x, scale):
    """x / scale in float8_e4m3fn, saturated at its largest number; what is not finite is NaN. scale: within KV_SCALES.

    The quotient is rounded as `div_rn` rounds it: one step of Markstein's division corrects the product with the
    reciprocal. `div_rn` does more, and has a subroutine for numbers out of range: a third of the instructions of such a
    kernel.
    """
    x = x.to(tl.float32)
    reciprocal = tl.div_rn(1.0, scale)
    inside = tl.clamp(x, -448.0 * scale, 448.0 * scale)
    quotient = inside * reciprocal
    excess = tl.fma(quotient, scale, inside * -1.0)  # Triton's -inside is 0 - inside, which is +0 for both zeros
    scaled = tl.fma(excess, -reciprocal, quotient)
    return tl.where(tl.abs(x) < float("inf"), scaled, float("nan")).to(tl.float8e4nv)


@triton.jit
def _store_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping, kv_scale,
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
        k = tl.load(key + token * stride_key + source, mask=mask)
        v = tl.load(value + token * stride_value + source, mask=mask)
        if key_cache.dtype.element_ty == tl.float8e4nv:
            k = to_e4m3(k, tl.load(kv_scale + heads, mask=heads < NUM_KV_HEADS, other=1.0))
            v = to_e4m3(v, tl.load(kv_scale + NUM_KV_HEADS + heads, mask=heads < NUM_KV_HEADS, other=1.0))
        tl.store(key_cache + at, k, mask=mask)
        tl.store(value_cache + at, v, mask=mask)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
) -> None:
    """See `kernels.reference.store_kv`. Heads must be contiguous, the token strides of key and value are free."""
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride(3) == 1
    assert (kv_scale is not None) == (key_cache.dtype == torch.float8_e4m3fn)
    if num_tokens:
        heads = min(next_power_of_2(num_kv_heads), HEADS_PER_PROGRAM)
        _store_kv_kernel[(num_tokens, cdiv(num_kv_heads, heads))](
            key, value, key_cache, value_cache, slot_mapping, slot_mapping if kv_scale is None else kv_scale,
            key.stride(0), value.stride(0), *key_cache.stride()[:3],
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, D_PAD=next_power_of_2(head_dim), HEADS=heads,
            BLOCK_SIZE=key_cache.shape[2], num_warps=4, **pdl_options(key.device),
        )  # fmt: skip
