"""The routers of MoE layers, in Triton: the logits of all experts, then each token's top k.

For a few tokens a program computes one token's logits for some experts on CUDA cores, with the RMSNorm in its prologue;
for more, tensor cores do. A second kernel has one program for each token.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.moe import Router
from kernels.gpu.launch import (
    cdiv,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    prefer_shared_memory,
    wait_for_inputs,
)

NUM_PROGRAMS = 264  # that keep an H200 busy: two on each multiprocessor
MAX_PARTS = 8  # of logits: each is written and read again


@triton.jit
def _few_logits_kernel(
    x, norm_weight, weight, bias, normed, logits, eps, stride_x,
    E: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits [T, E] of one token and BLOCK_E experts; the program of the first experts also writes the normed token."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    token = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < HIDDEN
    if PDL:
        launch_dependents()
    w = tl.load(weight + e[:, None] * HIDDEN + k[None, :], mask=(e < E)[:, None] & inside[None, :], other=0.0)
    w = w.to(tl.float32)
    if NORM:
        g = tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
    b = tl.zeros([BLOCK_E], tl.float32)
    if BIAS:
        b = tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)
    if PDL:
        wait_for_inputs()
    values = tl.load(x + token * stride_x + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        values = (values * tl.rsqrt(tl.sum(values * values) / HIDDEN + eps)).to(x.dtype.element_ty).to(tl.float32)
        rounded = (values * g).to(x.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(normed + token * HIDDEN + k, rounded, mask=inside)
        values = rounded.to(tl.float32)
    tl.store(logits + token * E + e, tl.sum(w * values[None, :], 1) + b, mask=e < E)


@triton.jit
def _add_product(acc, xk, wk, WIDE: tl.constexpr, SPLIT: tl.constexpr):
    """acc + xk · wk; see `_logits_kernel`."""
    if SPLIT:
        high = wk.to(tl.bfloat16)
        rest = wk - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(xk, low, acc)
        acc = tl.dot(xk, middle, acc)
        acc = tl.dot(xk, high, acc)
    elif WIDE:
        acc = tl.dot(xk.to(tl.float32), wk.to(tl.float32), acc, input_precision="tf32x3")
    else:
        acc = tl.dot(xk, wk, acc)
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x, weight, bias, logits, num_tokens, stride_x, num_channels,
    E: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits [parts, M, E] by the tensor core, each part of `num_channels`, a multiple of BLOCK_K.

    WIDE: x or the weight is float32. SPLIT: the weight is, x is bfloat16, and each weight is the sum of three bfloat16.
    The first weights are read while the kernel before still runs.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    tokens, rows = tl.minimum(m, num_tokens - 1).to(tl.int64), tl.minimum(e, E - 1)
    x_pointers = x + tokens[:, None] * stride_x + k[None, :]
    w_pointers = weight + rows[None, :] * HIDDEN + k[:, None]
    start = part * num_channels
    if PDL:
        launch_dependents()
    wk = tl.load(w_pointers + start, mask=(start + k < HIDDEN)[:, None], other=0.0)
    if PDL:
        wait_for_inputs()
    xk = tl.load(x_pointers + start, mask=(start + k < HIDDEN)[None, :], other=0.0)
    acc = _add_product(tl.zeros([BLOCK_M, BLOCK_E], tl.float32), xk, wk, WIDE, SPLIT)
    for at in range(start + BLOCK_K, tl.minimum(start + num_channels, HIDDEN), BLOCK_K):
        xk = tl.load(x_pointers + at, mask=(at + k < HIDDEN)[None, :], other=0.0)
        wk = tl.load(w_pointers + at, mask=(at + k < HIDDEN)[:, None], other=0.0)
        acc = _add_product(acc, xk, wk, WIDE, SPLIT)
    if BIAS:
        acc += tl.where(part == 0, tl.load(bias + rows).to(tl.float32), 0.0)[None, :]
    mask = (m < num_tokens)[:, None] & (e < E)[None, :]
    at_m = part.to(tl.int64) * num_tokens + m
    tl.store(logits + at_m[:, None] * E + e[None, :], acc, mask=mask)


@triton.jit
def _ordered(values):
    """float32 as int32 of the same order; a NaN is the largest. A warp finds an integer's maximum in one
    instruction.
    """
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # one zero
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(keys, index, NONE: tl.constexpr):
    """The lowest index of the largest of keys [R, C] int32."""
    largest = tl.max(tl.reshape(keys, [keys.shape[0] * keys.shape[1]]), 0)
    return tl.min(tl.reshape(tl.where(keys == largest, index, NONE), [keys.shape[0] * keys.shape[1]]), 0)


@triton.jit
def _summed(logits, at, mask, num_parts, stride_part, MAX_PARTS: tl.constexpr):
    """Logits from their parts, in order, all loaded at once; -inf where the mask is False."""
    z = tl.load(logits + at, mask=mask, other=-float("inf"))
    for part in tl.static_range(1, MAX_PARTS):
        z += tl.load(logits + part * stride_part + at, mask=mask & (part < num_parts), other=0.0)
    return z


@triton.jit(do_not_specialize=["num_parts", "stride_part"])
def _top_k_kernel(
    logits, correction, slots, ids, weights, scale, num_parts, stride_part,
    E: tl.constexpr, CHOSEN: tl.constexpr, SCORING: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    TOP2: tl.constexpr, RENORMALISE: tl.constexpr, CORRECTION: tl.constexpr, SLOTS: tl.constexpr,
    MAX_PARTS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's experts, from its logits as [groups, experts of a group], each in `num_parts` <= MAX_PARTS parts."""
    SIZE: tl.constexpr = E // GROUPS
    SMALLEST: tl.constexpr = -2147483648
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    inside = (group < GROUPS) & (member < SIZE)
    index = tl.where(inside, group * SIZE + member, E)
    if PDL:
        launch_dependents()
    if CORRECTION:
        more = tl.load(correction + index, mask=inside, other=0.0)
    if PDL:
        wait_for_inputs()
    z = _summed(logits, token * E + index, inside, num_parts, stride_part, MAX_PARTS)
    largest = tl.max(tl.max(z, 1), 0)
    total = tl.sum(tl.sum(tl.exp(z - largest), 1), 0)
    choice = z
    if CORRECTION or CHOSEN_GROUPS < GROUPS:
        choice = _scores(z, largest, total, SCORING)
        if CORRECTION:
            choice += more
        choice = tl.where(inside, choice, -float("inf"))
    keys = tl.where(inside, _ordered(choice), SMALLEST)
    if CHOSEN_GROUPS < GROUPS:
        of_group = tl.max(choice, 1, keep_dims=True)
        if TOP2:
            at = tl.min(tl.where(choice == of_group, index, E), 1, keep_dims=True)
            of_group += tl.max(tl.where(index == at, -float("inf"), choice), 1, keep_dims=True)
        of_groups = tl.where(group < GROUPS, _ordered(of_group), SMALLEST)
        kept = tl.zeros([BLOCK_G, 1], tl.int32)
        for _ in tl.static_range(CHOSEN_GROUPS):
            at = _best(of_groups, group, GROUPS)
            kept = tl.where(group == at, 1, kept)
            of_groups = tl.where(group == at, SMALLEST, of_groups)
        keys = tl.where(kept == 1, keys, SMALLEST)
    j = tl.arange(0, BLOCK_C)
    chosen = tl.full([BLOCK_C], -1, tl.int32)
    for i in tl.static_range(CHOSEN):
        at = _best(keys, index, E)
        chosen = tl.where(j == i, at, chosen)
        keys = tl.where(index == at, SMALLEST, keys)
    of_chosen = _summed(logits, token * E + chosen, j < CHOSEN, num_parts, stride_part, MAX_PARTS)
    if SCORING == "softmax_chosen" or (SCORING == "softmax" and RENORMALISE):
        of_chosen = tl.exp(of_chosen - tl.max(of_chosen, 0))
        of_chosen /= tl.sum(of_chosen, 0)
    else:
        of_chosen = _scores(of_chosen, largest, total, SCORING)
        if RENORMALISE:
            of_chosen /= tl.sum(of_chosen, 0)
    of_chosen *= scale
    if SLOTS:
        real = tl.load(slots + token) >= 0
        chosen = tl.where(real, chosen, -1)
        of_chosen = tl.where(real, of_chosen, 0.0)
    tl.store(ids + token * CHOSEN + j, chosen, mask=j < CHOSEN)
    tl.store(weights + token * CHOSEN + j, of_chosen, mask=j < CHOSEN)


@triton.jit
def _scores(z, largest, total, SCORING: tl.constexpr):
    """Scores of logits, whose largest and whose sum of exponentials are known; 0 for -inf."""
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-z))
    elif SCORING == "softmax":
        scores = tl.exp(z - largest) / total
    else:
        scores = z
    return scores


def cuda_core_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return x [M, hidden], or its norm where that has a weight, and its logits [M, E] float32, for a few tokens."""
    num_tokens, hidden = x.shape
    count = len(weight)
    logits = torch.empty(num_tokens, count, dtype=torch.float32, device=x.device)
    normed = x if norm_weight is None else torch.empty(num_tokens, hidden, dtype=x.dtype, device=x.device)
    block = next_power_of_2(hidden)
    num_warps = min(max(block // 512, 1), 8)
    block_e = max(min(num_warps * 32 * 32 // block, 4), 1)
    _few_logits_kernel[(cdiv(count, block_e), num_tokens)](
        x, x if norm_weight is None else norm_weight, weight, weight if bias is None else bias, normed, logits, eps,
        x.stride(0), E=count, HIDDEN=hidden, BLOCK_E=block_e, BLOCK=block, NORM=norm_weight is not None,
        BIAS=bias is not None, num_warps=num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return normed, logits


def logits_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return partial logits [parts, M, E] float32 of split-K."""
    num_tokens, hidden = x.shape
    count = len(weight)
    wide = torch.float32 in (x.dtype, weight.dtype)
    split = x.dtype == torch.bfloat16 and weight.dtype == torch.float32
    block_m, most_e = (64, 128) if num_tokens > 2048 else (16, 64) if num_tokens > 128 else (16, 32)
    block_e = min(max(next_power_of_2(count), 16), most_e)
    block_k = 256 if not wide else 128 if split and block_m == 16 else 32
    tiles = cdiv(num_tokens, block_m), cdiv(count, block_e)
    # Few tokens have few tiles, which would wait for one step's numbers after the other: each part is a step or two.
    parts = min(max(NUM_PROGRAMS // max(tiles[0] * tiles[1], 1), 1), MAX_PARTS)
    num_channels = cdiv(cdiv(hidden, block_k), parts) * block_k
    parts = cdiv(hidden, num_channels)
    logits = torch.empty(parts, num_tokens, count, dtype=torch.float32, device=x.device)
    _logits_kernel[(*tiles, parts)](
        x, weight, weight if bias is None else bias, logits, num_tokens, x.stride(0), num_channels,
        E=count, HIDDEN=hidden, WIDE=wide, SPLIT=split, BIAS=bias is not None, BLOCK_M=block_m, BLOCK_E=block_e,
        BLOCK_K=block_k, num_warps=8 if block_k == 128 else 4, num_stages=3 if block_k == 32 else 2,
        **pdl_options(x.device),
    )  # fmt: skip
    return logits


def top_k(logits: Tensor, correction: Tensor | None, rule: Router, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ids [T, k] int32 and weights [T, k] float32 for logits [parts, T, E], which are summed over the parts."""
    num_parts, num_tokens, count = logits.shape
    ids = torch.empty(num_tokens, rule.num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, rule.num_chosen, dtype=torch.float32, device=logits.device)
    groups = rule.num_groups if rule.num_chosen_groups < rule.num_groups else 1
    if num_tokens:
        launched = _top_k_kernel[(num_tokens,)](
            logits, logits if correction is None else correction, logits if slots is None else slots, ids, weights,
            rule.scale, num_parts, logits.stride(0), E=count, CHOSEN=rule.num_chosen, SCORING=rule.scoring,
            GROUPS=groups, CHOSEN_GROUPS=min(rule.num_chosen_groups, groups), TOP2=rule.group_score == "top2",
            RENORMALISE=rule.renormalise, CORRECTION=correction is not None, SLOTS=slots is not None,
            MAX_PARTS=next_power_of_2(num_parts), BLOCK_G=next_power_of_2(groups),
            BLOCK_S=next_power_of_2(count // groups), BLOCK_C=next_power_of_2(rule.num_chosen), num_warps=1,
            **pdl_options(logits.device),
        )  # fmt: skip
        prefer_shared_memory(launched)  # pairs are sorted next
    return ids, weights
