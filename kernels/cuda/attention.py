"""Attention on CUDA devices: chooses between Triton's kernels and Gluon's, which support Hopper and fewer cases."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.choice import GLUON
from kernels.data.attention import AttentionArgs, PagedContext, PagedLatents
from kernels.data.plan import (
    DecodePlan,
    latent_decode_plan,
    latent_tile_queries,
    make_prefill_tiles,
    prefill_tile_queries,
)
from kernels.data.quantized_rows import QuantizedRows
from kernels.gpu.attention import Output
from kernels.gpu.launch import next_power_of_2
from kernels.gpu.rounding import LARGEST
from kernels.triton import attention_decode, attention_prefill, latent, shared_prefix
from kernels.triton.scaled import quantize_rows

if GLUON:
    from kernels.gluon.attention import decode, latent_decode, prefill


def paged_attention_decode(
    query: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    plan: DecodePlan | None = None,
    out: Tensor | QuantizedRows | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_decode`.

    `plan` must have been written by `plan_decode` for these `context.lens`, after `plan_prefix` if it has prefixes.
    Its window must be this one, or 0: then programs whose tiles lie before the window do nothing. Without a plan one is
    allocated and written here.
    """
    if not attention_decode.KNOWN.cover(args):
        return decode_as_prefill(query, context, args, out)
    num_seqs, num_heads, head_dim = query.shape
    keys = context.key_cache
    output = _output(torch.empty_like(query) if out is None else out, num_heads, head_dim)
    dependent = plan is not None
    if plan is None:
        plan = DecodePlan.allocate(
            num_seqs, num_heads, keys.shape[1], head_dim, query.device, kv_dtype=keys.dtype, window=args.window,
            sparse=args.sparse,
        )  # fmt: skip
        attention_decode.plan_decode(context.lens, context.rows, plan)
    assert plan.window in (0, args.window)
    assert plan.sparse == args.sparse
    assert output.values.stride(1) == head_dim
    assert keys.stride() == context.value_cache.stride()
    assert (args.kv_scale is not None) == (keys.dtype == torch.float8_e4m3fn)
    if plan.prefix is not None:
        shared_prefix.attend_prefix(query, context, args, plan)
    launch = decode.launch if GLUON and decode.supports(query, keys, args, plan) else attention_decode.launch
    launch(query, context, args, plan, output, dependent)
    return output.values[:num_seqs]


def decode_as_prefill(
    query: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    out: Tensor | QuantizedRows | None,
    one_loop: bool = False,
) -> Tensor:
    """Compute decode attention by Triton's prefill kernel, as that of prompts with one token; one_loop: see there."""
    floats = torch.empty_like(query) if out is None or isinstance(out, QuantizedRows) else out
    starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    tiles = torch.stack([starts[:-1], torch.zeros_like(starts[:-1])], 1)
    attention_prefill.launch(query, starts, context, args, tiles, floats, one_loop)
    if not isinstance(out, QuantizedRows):
        return floats
    codes, scale = quantize_rows(floats.flatten(0, 1), out.codes.dtype)
    out.scale[: len(query)] = scale.reshape(query.shape[:2])
    return out.codes.unflatten(1, query.shape[1:])[: len(query)].copy_(codes.view(query.shape))


def _output(out: Tensor | QuantizedRows, num_heads: int, head_dim: int) -> Output:
    if not isinstance(out, QuantizedRows):
        return Output(out, out, 0, out.dtype)
    assert head_dim == next_power_of_2(head_dim) >= 16
    assert out.group == head_dim
    return Output(out.codes.unflatten(1, (num_heads, -1)), out.scale, LARGEST[out.codes.dtype].value, out.dtype)


def paged_attention_prefill(
    query: Tensor,
    query_start: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_prefill`.

    `tiles` [N, 2] int32: by `make_prefill_tiles` of `prefill_tile_queries`; without it the lengths are read back.
    """
    _, num_heads, head_dim = query.shape
    keys = context.key_cache
    if out is None:
        out = torch.empty_like(query)
    if tiles is None:
        packed = keys.shape[1] if args.sparse is None else num_heads
        step = prefill_tile_queries(num_heads, packed, head_dim, query.dtype)
        tiles = tiles_of(query_start, context.lens, step)
    if not len(tiles):
        return out
    assert out.stride(1) == head_dim
    assert keys.stride() == context.value_cache.stride()
    assert args.kv_scale is not None or keys.dtype != torch.float8_e4m3fn
    launch = prefill.launch if GLUON and prefill.supports(query, keys, args) else attention_prefill.launch
    launch(query, query_start, context, args, tiles, out)
    return out


def tiles_of(query_start: Tensor, context_lens: Tensor, step: int) -> Tensor:
    """Return tiles [N, 2] of `step` queries, from lengths that are read back from the device."""
    made = make_prefill_tiles((query_start[1:] - query_start[:-1]).tolist(), context_lens.tolist(), step)
    return torch.tensor(made, dtype=torch.int32, device=query_start.device).view(-1, 2)


def latent_attention_decode(
    query: Tensor, latents: PagedLatents, *, scale: float, out: Tensor, plan: DecodePlan | None = None
) -> Tensor:
    """See `kernels.reference.latent_attention_decode`. Without a plan one is allocated and written where one is
    needed.
    """
    if not GLUON or not latent_decode.supports(query, latents.cache, out):
        latent.latent_decode(query, latents, scale, out)
        return out
    dependent = plan is not None
    if plan is None:
        num_seqs, num_heads, size = out.shape
        plan = latent_decode_plan(num_seqs, num_heads, size, query.device)
        attention_decode.plan_decode(latents.lens, latents.rows, plan)
    latent_decode.launch(query, latents, scale, out, plan, dependent)
    return out


def latent_attention_prefill(
    query: Tensor,
    query_start: Tensor,
    latents: PagedLatents,
    *,
    scale: float,
    out: Tensor,
    tiles: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.latent_attention_prefill`. `tiles` [N, 2] int32: by `make_prefill_tiles` of
    `latent_tile_queries`; without it the lengths are read back.
    """
    if tiles is None:
        tiles = tiles_of(query_start, latents.lens, latent_tile_queries(query.shape[1], query.dtype))
    if len(tiles):
        latent.latent_prefill(query, query_start, latents, tiles, scale, out)
    return out
