"""Deterministic forms on CUDA devices: each operation has one order of sums, whatever the number of tokens.

Tiles and kernels of GEMMs change with the step where that changes no bit. Norms have kernels of their own, and
activations are never quantised. A decoded token's attention is that of a prompt with one token. A prompt's keys are
read in the same tiles, from the sequence's beginning on.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from kernels.cuda import attention, moe
from kernels.cuda.choice import CHOICE, GLUON
from kernels.data.activation import Gate
from kernels.data.attention import AttentionArgs, PagedContext
from kernels.data.moe import Experts, RouterArgs
from kernels.data.plan import prefill_tile_queries
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.triton import attention_prefill, fixed_attention
from kernels.triton.activation import gate_and_mul
from kernels.triton.fixed_linear import log_sums
from kernels.triton.fixed_parts import few_tile, fixed_parts
from kernels.triton.moe import grouped, sum_experts
from kernels.triton.norm import rms_norm
from kernels.triton.pairs import sort_pairs
from kernels.triton.router import cuda_core_logits, top_k
from kernels.triton.weight_only import weight_only_linear

if GLUON:
    from kernels.gluon.linear import fixed, fixed_few

TILE_TOKENS = 64  # of a quantised weight's tile, and of an expert's


def linear(x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear`."""
    assert isinstance(x, Tensor)
    if not isinstance(weight, QuantizedWeight):
        return float_linear(x, weight, bias, x.new_empty(len(x), len(weight)))
    if weight.order is not None:
        x, weight = x[:, weight.order], dataclasses.replace(weight, order=None)
    return weight_only_linear(x, weight, bias, TILE_TOKENS)


def linear_add(residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear_add`."""
    assert isinstance(x, Tensor)
    if isinstance(weight, QuantizedWeight):
        return residual.add_(linear(x, weight, bias))
    return float_linear(x, weight, bias, residual, residual)


def float_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    pieces: int = 1,
    *,
    rounds: bool = False,
    gate: Gate | Literal[""] = "",
) -> Tensor:
    """Compute `fixed_parts`. pieces: whose sums a tree adds up."""
    if multiplies_rows(x, weight, out, pieces):
        fixed_few.launch(x, weight, bias, out, residual=residual, rounds=rounds, pieces=pieces, gate=gate)
        return out
    is_few, num_outputs = len(x) <= CHOICE.fixed_few_tokens, out.shape[1]
    if GLUON and not is_few and fixed.supports(x, weight, out, pieces):
        config = fixed.config(len(x), num_outputs, gate != "", pieces)
        if pieces == 1 or config.tiles(len(x), num_outputs, False) >= fixed.FEWEST_TILES:
            config = config._replace(overlaps=CHOICE.fixed_overlaps)
            fixed.launch(x, weight, bias, out, config, residual=residual, rounds=rounds, pieces=pieces, gate=gate)
            return out
    tile = few_tile(x, num_outputs, pieces, _is_small(weight)) if is_few else None
    return fixed_parts(x, weight, bias, out, residual, pieces, rounds=rounds, gate=gate, tile=tile)


def multiplies_rows(x: Tensor, weight: Tensor, out: Tensor, pieces: int = 1) -> bool:
    """Return True if `fixed_few` computes x [M, K] times the weight."""
    return GLUON and 0 < len(x) <= CHOICE.fixed_row_tokens and fixed_few.supports(x, weight, out, pieces)


def _norm_and_rows(
    x: Tensor,
    norm: tuple[Tensor, float],
    weight: Weight,
    bias: Tensor | None,
    out: Tensor,
    gate: Gate | Literal[""] = "",
) -> bool:
    """Compute the norm of x and its GEMM in one kernel, if there is one for it."""
    if not isinstance(weight, Tensor) or not multiplies_rows(x, weight, out) or not fixed_few.norms(x, norm[0]):
        return False
    if len(weight) > CHOICE.small_batch_outputs:
        return False
    fixed_few.launch(fixed_few.Normed(x, *norm), weight, bias, out, gate=gate)
    return True


def _is_small(weight: Tensor) -> bool:
    return weight.numel() <= CHOICE.fixed_small_weight


def linear_add_norm(
    residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None, norm: NextNorm
) -> Tensor | QuantizedRows:
    """See `kernels.reference.linear_add_norm`."""
    assert norm.rounded is None
    return rms_norm(linear_add(residual, x, weight, bias), norm.weight, norm.eps)


def linear_gated(x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu") -> Tensor:
    """See `kernels.reference.linear_gated`."""
    if isinstance(x, Tensor) and isinstance(weight, Tensor):
        out = x.new_empty(len(x), len(weight) // 2)
        if _is_small(weight) or len(x) > CHOICE.fixed_few_tokens or multiplies_rows(x, weight, out):
            return float_linear(x, weight, bias, out, gate=gate)
    return gate_and_mul(linear(x, weight, bias), gate)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.norm_linear`."""
    writes_out = isinstance(weight, Tensor) and (out is None or (out.dtype == x.dtype and out.stride(1) == 1))
    if writes_out:
        into = x.new_empty(len(x), len(weight)) if out is None else out
        if _norm_and_rows(x, (norm_weight, eps), weight, bias, into):
            return into
    normed = rms_norm(x, norm_weight, eps)
    if writes_out:
        assert isinstance(weight, Tensor)
        return float_linear(normed, weight, bias, into)
    result = linear(normed, weight, bias)
    return result if out is None else out.copy_(result)


def norm_gated(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu"
) -> Tensor:
    """See `kernels.reference.norm_gated`."""
    if isinstance(weight, Tensor):
        out = x.new_empty(len(x), len(weight) // 2)
        if _norm_and_rows(x, (norm_weight, eps), weight, bias, out, gate):
            return out
    return linear_gated(rms_norm(x, norm_weight, eps), weight, bias, gate)


def norms_apart(x: Tensor, weight: Weight, gate: Gate | None = None) -> bool:
    """See `kernels.reference.norms_apart`."""
    return True


def quantized_input(x: Tensor, weight: Weight, bias: Tensor | None = None, gate: Gate | None = None) -> None:
    """See `kernels.reference.quantized_input`."""


def pack_experts(gate_up: Weight, down: Weight, dtype: torch.dtype) -> tuple[Weight, Weight]:
    """See `kernels.reference.pack_experts`."""
    return gate_up, down


def route(x: Tensor, router: RouterArgs, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.route`."""
    logits = cuda_core_logits(x, router.weight, router.bias)[1].unsqueeze(0)
    return top_k(logits, router.correction, router.rule, slots)


def route_norms_apart(x: Tensor) -> bool:
    """See `kernels.reference.route_norms_apart`."""
    return True


def norm_route(
    x: Tensor, norm_weight: Tensor, eps: float, router: RouterArgs, slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.reference.norm_route`."""
    normed = rms_norm(x, norm_weight, eps)
    return normed, *route(normed, router, slots)


def experts(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, add_to: Tensor | None = None) -> Tensor:
    """See `kernels.reference.experts`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add_to is None else add_to
    if len(x):
        sum_experts(expert_outputs(x, ids, weights, stack), ids, out, add_to is not None, stack.first, len(stack))
    return out


def expert_outputs(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts) -> Tensor:
    """Return weight · output of each expert that a token has chosen: [T · k, hidden] float32; unwritten for those of
    other ranks.
    """
    if not len(x):
        return torch.empty(0, x.shape[1], dtype=torch.float32, device=x.device)
    gate_up, down = moe.float_or_codes(stack.gate_up), moe.float_or_codes(stack.down)
    size = down.num_channels if isinstance(down, QuantizedWeight) else down.shape[2]
    inner = torch.empty(ids.numel(), size, dtype=x.dtype, device=x.device)
    parts = torch.empty(ids.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    tiles, chosen = sort_pairs(ids, len(stack), stack.first, TILE_TOKENS)._replace(one_tile=True), ids.shape[1]
    grouped(x, gate_up, stack.gate_up_bias, weights, tiles, inner, stack.activation, chosen)
    grouped(inner, down, stack.down_bias, weights, tiles, parts, "", chosen)
    return parts


def experts_add_norm(
    residual: Tensor, norm: NextNorm, x: Tensor, ids: Tensor, weights: Tensor, stack: Experts
) -> Tensor | QuantizedRows:
    """See `kernels.reference.experts_add_norm`."""
    assert norm.rounded is None
    return rms_norm(experts(x, ids, weights, stack, residual), norm.weight, norm.eps)


def paged_attention_decode(
    query: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    plan: object = None,
    out: Tensor | QuantizedRows | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_decode`. `plan` is not read; what it was made of was written with it."""
    assert not isinstance(out, QuantizedRows)
    if CHOICE.fixed_ranges and fixed_attention.KNOWN.cover(args):
        out = torch.empty_like(query) if out is None else out
        stages, shared_stages, early = CHOICE.fixed_stages, CHOICE.fixed_shared_stages, CHOICE.fixed_early
        form = fixed_attention.DecodeForm(stages=stages, shared_stages=shared_stages, early=early and plan is not None)
        fixed_attention.decode(query, context, args, out, form)
        return out
    return attention.decode_as_prefill(query, context, args, out, one_loop=True)


def paged_attention_prefill(
    query: Tensor,
    query_start: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.cuda.attention.paged_attention_prefill`."""
    _, num_heads, head_dim = query.shape
    out = torch.empty_like(query) if out is None else out
    if tiles is None:
        packed = context.key_cache.shape[1] if args.sparse is None else num_heads
        step = prefill_tile_queries(num_heads, packed, head_dim, query.dtype)
        tiles = attention.tiles_of(query_start, context.lens, step)
    if len(tiles) and CHOICE.fixed_ranges and fixed_attention.KNOWN.cover(args):
        fixed_attention.prefill(query, query_start, context, args, tiles, out, CHOICE.fixed_prompt_stages)
    elif len(tiles):
        attention_prefill.launch(query, query_start, context, args, tiles, out, one_loop=True)
    return out


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.reference.token_logprobs`."""
    total, wide = log_sums(logits).unsqueeze(1), logits.float()
    chosen = wide.gather(1, token_ids.long().unsqueeze(1))
    top = wide.topk(num_top).values
    return (chosen - total).squeeze(1), (wide > chosen).sum(-1) + 1, _ids_of(top, wide), top - total


def _ids_of(top: Tensor, logits: Tensor) -> Tensor:
    """Return the ids [B, n] int64 of each row's highest logits top [B, n], the lower id first among equal ones.

    `topk` itself chooses among equal logits by an algorithm that depends on the number of rows.
    """
    ids: list[Tensor] = []
    vocab_size, columns = logits.shape[1], top.split(1, 1)
    order = torch.arange(vocab_size, dtype=torch.int32, device=top.device)
    for i, value in enumerate(columns):
        found = logits == value
        if i:
            found &= (value != columns[i - 1]) | (order > ids[-1])
        ids.append(torch.where(found, order, vocab_size - 1).amin(1, keepdim=True))
    return torch.cat(ids, 1).long() if ids else top.long()
