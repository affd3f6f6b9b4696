"""Rotates queries and keys of image encoders in place, in Triton: one program for all heads of a few tokens."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import cdiv, next_power_of_2

TOKENS = 4  # of a program


@triton.jit
def _rotate_kernel(
    x, cos, sin, num_tokens, stride_token, stride_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, HALF_PAD)[None, :]
    heads = tl.arange(0, HEADS_PAD)[:, None]
    mask = (heads < NUM_HEADS) & (i < HALF)
    for number in tl.static_range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + number
        if token < num_tokens:
            turn_cos = tl.load(cos + token * HALF + i, mask=i < HALF, other=0.0)
            turn_sin = tl.load(sin + token * HALF + i, mask=i < HALF, other=0.0)
            at = x + token * stride_token + heads * stride_head + i
            low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, low * turn_cos - high * turn_sin, mask=mask)
            tl.store(at + HALF, high * turn_cos + low * turn_sin, mask=mask)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.reference.rotate_halves`. The channels of a head must be contiguous; x is overwritten."""
    num_tokens, num_heads, size = x.shape
    assert x.stride(2) == 1
    cos, sin = cos.contiguous(), sin.contiguous()
    if num_tokens:
        _rotate_kernel[(cdiv(num_tokens, TOKENS),)](
            x, cos, sin, num_tokens, x.stride(0), x.stride(1),
            NUM_HEADS=num_heads, HALF=size // 2, HEADS_PAD=next_power_of_2(num_heads),
            HALF_PAD=next_power_of_2(size // 2), TOKENS=TOKENS, num_warps=4,
        )  # fmt: skip
    return x
