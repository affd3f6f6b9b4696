"""Sums over the GPUs of one host for few tokens, in one kernel that writes into the peers' memory.

Every 32 bits travel together with the number of the call, which tells the reader of a word whether it has come: there are no
barriers, and a sum takes little more than the way over NVLink. Calls alternate between two halves of the buffer. A rank
writes to a half again only after it has had the peers' words of the call between, and they had read the half before these.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import cdiv, launch_dependents, pdl_options, wait_for_inputs

BLOCK = 512  # words of 32 bits that a program sums


@triton.jit
def _floats(words, WIDE: tl.constexpr):
    """Words of one float32 or two bfloat16 → float32; where there is one, twice."""
    if WIDE:
        return words.to(tl.float32, bitcast=True), words.to(tl.float32, bitcast=True)
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _words(low, high, WIDE: tl.constexpr):
    if WIDE:
        return low.to(tl.int32, bitcast=True)
    first = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    return first | high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) << 16


@triton.jit(do_not_specialize=["num_words"])
def _all_reduce_kernel(
    x, residual, out, buffers, calls, num_words,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = the sum of all ranks' x, plus residual with ADD. Sums are in the order of ranks, so all have the same."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    if PDL:
        launch_dependents()
        wait_for_inputs()
    call = tl.load(calls + tl.program_id(0)) + 1
    tag = call.to(tl.int64) << 32
    half = (call & 1) * (SIZE * CAPACITY)
    own = tl.load(x + at, mask=inside, other=0)
    for i in tl.static_range(1, SIZE):
        buffer = tl.load(buffers + (RANK + i) % SIZE).to(tl.pointer_type(tl.int64))
        word = tag | (own.to(tl.int64) & 0xFFFFFFFF)
        tl.store(buffer + half + RANK * CAPACITY + at, word, mask=inside, cache_modifier=".wt")
    buffer = tl.load(buffers + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            words = own
        else:
            come = buffer + half + rank * CAPACITY + at
            tagged = tl.load(come, mask=inside, other=tag, volatile=True)
            while tl.max(((tagged >> 32) != call).to(tl.int32), 0) > 0:
                tagged = tl.load(come, mask=inside, other=tag, volatile=True)
            words = tagged.to(tl.int32)
        a, b = _floats(words, WIDE)
        low += a
        high += b
    if ADD:
        a, b = _floats(tl.load(residual + at, mask=inside, other=0), WIDE)
        low += a
        high += b
    tl.store(out + at, _words(low, high, WIDE), mask=inside)
    tl.store(calls + tl.program_id(0), call)


def num_words(x: Tensor) -> int:
    """Of 32 bits; 0 for a tensor that the kernel does not sum."""
    fits = (
        x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous() and x.nbytes % 4 == 0 and x.data_ptr() % 4 == 0
    )
    return x.nbytes // 4 if fits else 0


def all_reduce(
    x: Tensor, buffers: Tensor, calls: Tensor, rank: int, capacity: int, residual: Tensor | None = None
) -> Tensor:
    """The sum of all ranks' x in x's memory, or added to `residual` there. All ranks call it with the same shapes.

    buffers [size] int64: addresses of 2 · size · capacity int64, zero at first, which all ranks reach; calls: int32, zero at
    first, one for each `BLOCK` of `capacity` words, and so many x may have.
    """
    words = num_words(x)
    assert 0 < words <= capacity
    out = x if residual is None else residual
    assert out.is_contiguous()
    assert out.dtype == x.dtype
    _all_reduce_kernel[(cdiv(words, BLOCK),)](
        x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), out.view(-1).view(torch.int32), buffers, calls, words,
        RANK=rank, SIZE=len(buffers), CAPACITY=capacity, ADD=residual is not None, WIDE=x.dtype == torch.float32,
        BLOCK=BLOCK, num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    return out
