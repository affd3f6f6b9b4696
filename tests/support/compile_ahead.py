"""Compiles every Triton kernel for a GPU that is not there: `python -m tests.support.compile_ahead 90` for sm_90; with
`--once` each kernel only as its first launch needs it.

The operations are called as the engine calls them, on meta tensors, and each launch ends at its compilation. So what is
compiled is what would run. It prints one line for each binary, and exits with 1 if a kernel fails or is never launched.
Needs a fresh process: the interpreter replaces kernels while they are imported.
"""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import kernels
from kernels.data.activation import ExpertActivation
from kernels.data.block_weight import BlockKind, BlockRows, BlockWeight, unit_channels
from kernels.data.compressed_weight import CompressedWeight
from kernels.data.layout import RowState, StepTensors
from kernels.data.plan import DecodePlan, SharedPrefix
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.data.widening import WIDE_DTYPE, WIDE_PAGE
from tests.oracles.random_weights import random_weight

META = torch.device("meta")
F32, F16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
I32, I64 = torch.int32, torch.int64


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def norm(dtype: torch.dtype) -> None:
    from kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_add

    x, weight = tensor(3, 1024, dtype=dtype), tensor(1024, dtype=dtype)
    rms_norm(x, weight, 1e-6)
    rms_norm_add(x, x, weight, 1e-6)
    add_rms_norm(x, x, weight, 1e-6)
    add_rms_norm(x, x, weight.float(), 1e-6, weight.float(), 1e-6)


def activation(dtype: torch.dtype) -> None:
    from kernels.triton.activation import gate_and_mul

    gate_and_mul(tensor(3, 2 * 3072, dtype=dtype), "silu")
    gate_and_mul(tensor(3, 2 * 3072, dtype=dtype), "gelu_tanh")


def rotation(dtype: torch.dtype) -> None:
    from kernels.triton.rotation import rotate_halves

    heads = tensor(9, 3 * 16 * 72, dtype=dtype)[:, : 16 * 72].unflatten(1, (16, 72))
    rotate_halves(heads, tensor(9, 36, dtype=F32), tensor(9, 36, dtype=F32))


def kv_scale(num_kv_heads: int, cache: Tensor) -> Tensor | None:
    return tensor(2, num_kv_heads, dtype=F32) if cache.dtype == E4M3 else None


def rotary(
    head_dim: int,
    rotary_dim: int,
    normed: bool,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    interleaved: bool = False,
    wide: bool = False,
) -> None:
    from kernels.data.kv_cache import KVSlots, RopeArgs, WideCopy
    from kernels.triton.rotary import rope_and_store

    cache = tensor(10, 8, 16, head_dim, dtype=kv_dtype or dtype)
    weight = tensor(head_dim, dtype=dtype) if normed else None
    table = tensor(100, rotary_dim, dtype=F32) if rotary_dim else None
    copy = WideCopy(tensor(2, 5, 8, WIDE_PAGE, head_dim, dtype=WIDE_DTYPE), tensor(3, dtype=I64))
    args = RopeArgs(16, 8, table, weight, weight, interleaved=interleaved)
    into = KVSlots(cache, cache, tensor(3, dtype=I64), kv_scale(8, cache), copy if wide else None)
    rope_and_store(tensor(3, 32 * head_dim, dtype=dtype), tensor(3, dtype=I32), args, into)


def kv_cache(kv_dtype: torch.dtype) -> None:
    from kernels.triton.kv_cache import store_kv

    new, cache = tensor(3, 8, 80), tensor(10, 8, 16, 80, dtype=kv_dtype)
    store_kv(new, new, cache, cache, tensor(3, dtype=I64), kv_scale(8, cache))


def sampling(dtype: torch.dtype) -> None:
    from kernels.data.sampling import Part, SamplingRows
    from kernels.triton.sampling import best_keys, best_tokens, mask_logits, sample

    row, logits = tensor(3, dtype=F32), tensor(3, 151936, dtype=dtype)
    mask_logits(logits, tensor(3, 4748, dtype=I32), row.int())
    rows = SamplingRows(row, row.int(), row, row, row.long(), row.long())
    sample(logits, rows)
    sample(logits, rows, Part.PLAIN)
    sample(logits, rows, Part.REST, row.int(), row.long())
    for first in (0, 100_000):  # a rank's columns that are all tokens, and some
        best_tokens(best_keys(logits, rows, first, 200_000))


def attention(
    head_dim: int,
    group: int,
    page: int,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    few: bool = True,
    sparse: kernels.BlockSparse | None = None,
    queries: int = 1,
    reads_once: bool = False,
    **options: float,
) -> None:
    from kernels.cuda.attention import paged_attention_decode, paged_attention_prefill
    from kernels.triton.attention_decode import plan_decode
    from kernels.triton.shared_prefix import plan_prefix

    num_heads, lens, rows = 2 * group, tensor(3, dtype=I32), tensor(3, dtype=I32)
    out, cache = tensor(3, num_heads, head_dim, dtype=dtype), tensor(10, 2, page, head_dim, dtype=kv_dtype or dtype)
    query = out.half() if kv_dtype == E4M3 and dtype == BF16 else out  # as `rope_and_store` returns it
    scale = kv_scale(2, cache)
    by_head = {name: tensor(num_heads, dtype=F32) for name in ("alibi_slopes", "sinks") if options.pop(name, False)}
    tables = tensor(4, 64, dtype=I32)
    window = int(options.get("window", 0))
    plan = DecodePlan.allocate(
        4 if few else 40, num_heads, 2, head_dim, META, 264, cache.dtype, window, sparse, queries
    )
    if reads_once:
        prefix = SharedPrefix.allocate(plan.max_seqs, num_heads, 2, head_dim, META, 264)
        plan = dataclasses.replace(plan, prefix=prefix)
        plan_prefix(lens, rows, tables, page, plan)
    plan_decode(lens, rows, plan)
    args = kernels.AttentionArgs(0.1, kv_scale=scale, sparse=sparse, **by_head, **options)  # type: ignore[arg-type]
    context = kernels.PagedContext(cache, cache, tables, rows, lens)
    paged_attention_decode(query, context, args, plan=plan, out=out)
    paged_attention_prefill(query, tensor(4, dtype=I32), context, args, tiles=tensor(5, 2, dtype=I32), out=out)


def wide_pages(head_dim: int, group: int, page: int, dtype: torch.dtype = BF16, **options: float) -> None:
    """Prefill over wide copies of an e4m3 cache's pages."""
    from engine.models.wide_pages import WidePages
    from kernels.cuda.attention import paged_attention_prefill
    from kernels.triton.wide_pages import widen_pages

    query, cache = tensor(3, 2 * group, head_dim, dtype=WIDE_DTYPE), tensor(10, 2, page, head_dim, dtype=E4M3)
    lens, rows, tables = tensor(3, dtype=I32), tensor(3, dtype=I32), tensor(4, 64, dtype=I32)
    wide = WidePages.of_step([1, 1, 1], [300, 20, 1], 0, lambda tensor: tensor.to(META))
    pages = wide.allocate(cache.expand(2, *cache.shape)).pages
    widen_pages(cache, cache, tables, rows, lens, wide.pages, pages)
    context = kernels.PagedContext(pages[0], pages[1], wide.block_tables, wide.rows, lens)
    args = kernels.AttentionArgs(0.1, kv_scale=kv_scale(2, cache), **options)  # type: ignore[arg-type]
    out, tiles = tensor(*query.shape, dtype=dtype), tensor(5, 2, dtype=I32)
    paged_attention_prefill(query, tensor(4, dtype=I32), context, args, tiles=tiles, out=out)


def latent(num_heads: int, seqs: int, dtype: torch.dtype = BF16, interleaved: bool = True) -> None:
    from kernels.cuda.attention import latent_attention_decode, latent_attention_prefill
    from kernels.triton.latent import absorb_and_store, rotate_and_store

    cache, rows = tensor(10, 1, 16, 576, dtype=dtype), tensor(seqs, dtype=I32)
    query, key_up = tensor(seqs, num_heads, 192, dtype=dtype), tensor(num_heads, 128, 512, dtype=dtype)
    new = kernels.NewLatents(
        tensor(seqs, 576, dtype=dtype), tensor(512, dtype=dtype), 1e-6, rows, tensor(99, 64, dtype=F32), cache,
        tensor(seqs, dtype=I64), interleaved,
    )  # fmt: skip
    rotate_and_store(query, new)
    query = absorb_and_store(query, key_up, new)
    out, tables = tensor(seqs, num_heads, 512, dtype=dtype), tensor(4, 64, dtype=I32)
    plan = kernels.latent_decode_plan(seqs, num_heads, 512, out.device, num_programs=4)
    latents, tiles = kernels.PagedLatents(cache, tables, rows, rows), tensor(5, 2, dtype=I32)
    latent_attention_decode(query, latents, scale=0.1, out=out, plan=plan)
    latent_attention_prefill(query, tensor(seqs + 1, dtype=I32), latents, scale=0.1, out=out, tiles=tiles)


def index(num_heads: int, seqs: int, dtype: torch.dtype = BF16) -> None:
    """Scores of keys that stand behind latents."""
    from kernels.triton.index import index_scores, store_index_keys

    cache, rows = tensor(10, 1, 16, 704, dtype=dtype)[..., 576:], tensor(seqs, dtype=I32)
    query, norm = tensor(seqs, num_heads, 128, dtype=dtype), tensor(128, dtype=dtype)
    new = kernels.NewIndexKeys(
        tensor(seqs, 128, dtype=dtype), norm, norm, 1e-6, rows, tensor(99, 64, dtype=F32), cache,
        tensor(seqs, dtype=I64),
    )  # fmt: skip
    store_index_keys(query, new)
    keys = kernels.PagedLatents(cache, tensor(4, 64, dtype=I32), rows, rows)
    index_scores(query, tensor(seqs, num_heads, dtype=dtype), keys, 1024)


def matmul(tokens: int, dtype: torch.dtype) -> None:
    from kernels.cuda.linear import linear_add, norm_gated, norm_linear

    x, scale, weight = tensor(tokens, 1024, dtype=dtype), tensor(1024, dtype=dtype), tensor(2048, 1024, dtype=dtype)
    norm_linear(x, scale, 1e-6, weight, tensor(2048, dtype=dtype))
    norm_gated(x, scale, 1e-6, weight)
    norm_gated(x, scale.float(), 1e-6, weight, gate="gelu_tanh")
    linear_add(tensor(tokens, 2048, dtype=dtype), x, weight)
    linear_add(tensor(tokens, 1024, dtype=dtype), x, weight[:1024])


def quantized(tokens: int, kind: str, group: int = 0, rows: int = 1, dtype: torch.dtype = BF16, **more: bool) -> None:
    """Every form of a product of x [tokens, 1024] with codes [2048, 1024]; `more`: zeros, fractions, e4m3_scales,
    rounds.
    """
    from kernels.cuda.linear import linear_add, norm_gated, norm_linear
    from kernels.triton.weight_only import dequantize

    n, k = 2048, 1024
    halves, code_dtype = {"e4m3": (1, E4M3), "int8": (1, torch.int8)}.get(kind, (2, torch.uint8))
    e4m3_scales = more.get("e4m3_scales", False)
    zero_dtype = torch.int8 if more.get("zeros") else F16 if more.get("fractions") else None
    zero = None if zero_dtype is None else tensor(n, k // (group or k), dtype=zero_dtype)
    weight = QuantizedWeight(
        kind=kind,  # type: ignore[arg-type]
        codes=tensor(n, k // halves, dtype=code_dtype),
        scale=tensor(n // rows, k // (group or k), dtype=E4M3 if e4m3_scales else F16 if group and rows == 1 else F32),
        group=group or k,
        rows=rows,
        zero=zero,
        factor=tensor(n, dtype=F32) if e4m3_scales else None,
        rounds_activations=more.get("rounds", False),
    )
    x, scale = tensor(tokens, k, dtype=dtype), tensor(k, dtype=dtype)
    norm_linear(x, scale, 1e-6, weight, tensor(n, dtype=dtype))
    norm_gated(x, scale, 1e-6, weight)
    linear_add(tensor(tokens, n, dtype=dtype), x, weight)
    dequantize(weight.codes, weight, dtype)


def deterministic(dtype: torch.dtype) -> None:
    from engine.models.shard import Shard
    from kernels.cuda import deterministic as forms
    from kernels.cuda import split_sums
    from kernels.triton import fixed_attention
    from kernels.triton.fixed_linear import fixed_linear
    from kernels.triton.fixed_parts import few_tile, fixed_parts

    x, weight = tensor(9, 1024, dtype=dtype), tensor(2048, 1024, dtype=dtype)
    forms.linear_add(tensor(9, 2048, dtype=dtype), x, weight, tensor(2048, dtype=dtype))
    forms.linear(x, QuantizedWeight("int4", tensor(2048, 512, dtype=torch.uint8), tensor(2048, 8, dtype=F16), 128))
    forms.token_logprobs(tensor(9, 5000, dtype=dtype), tensor(9, dtype=I64), 2)
    for size in (1, 2):
        columns = Shard(0, size).eighths(1024 * size)
        split_sums.split_linear(x, split_sums.split_weight(weight, columns, tensor(2048, dtype=dtype)))
    for tokens in (9, 600):
        out = tensor(tokens, 2048, dtype=dtype)
        fixed_linear(tensor(tokens, 1024, dtype=dtype), weight, weight[0], out, out, 8)
        fixed_parts(tensor(tokens, 1024, dtype=dtype), weight, weight[0], out, out, pieces=8)
        fixed_parts(out[:, :1024], weight, None, tensor(tokens, 1024, dtype=dtype), gate="silu")
    few = tensor(4, 1024, dtype=dtype)
    fixed_parts(few, weight, None, few, gate="silu", tile=few_tile(few, 1024, 1, True))
    fixed_parts(few, weight, None, tensor(4, 2048, dtype=dtype), tile=few_tile(few, 2048, 1, False))
    query, cache = tensor(9, 8, 128, dtype=dtype), tensor(2, 10, 2, 16, 128, dtype=dtype)
    rows, tables = tensor(9, dtype=I32), tensor(4, 64, dtype=I32)
    for window in (0, 100):
        args = kernels.AttentionArgs(0.1, window=window)
        context, out = kernels.PagedContext(cache[0], cache[1], tables, rows, rows), tensor(9, 8, 128, dtype=dtype)
        forms.paged_attention_decode(query, context, args)
        fixed_attention.decode(query[:1], context, args, out[:1], fixed_attention.DecodeForm(early=True))
        fixed_attention.prefill(query, rows, context, args, tensor(2, 2, dtype=I32), out)
    if dtype == BF16:
        stack = kernels.Experts(tensor(8, 512, 1024), tensor(8, 1024, 256))
        forms.experts(x, tensor(9, 2, dtype=I32), tensor(9, 2, dtype=F32), stack)


def deterministic_layers(dtype: torch.dtype) -> None:
    """Latent attention, recurrent layers and adapters in deterministic mode."""
    from kernels.cuda import fixed_latent
    from kernels.data.state import StateSpace
    from kernels.triton import fixed_scan

    query, out = tensor(9, 20, 576, dtype=dtype), tensor(9, 20, 512, dtype=dtype)
    rows, tables = tensor(9, dtype=I32), tensor(4, 64, dtype=I32)
    latents = kernels.PagedLatents(tensor(9, 1, 16, 576, dtype=dtype), tables, rows, rows)
    fixed_latent.latent_attention_decode(query, latents, scale=0.1, out=out)
    both = tensor(20, 320, 512, dtype=dtype)
    fixed_latent.head_linear(out, both[:, 192:])
    fixed_latent.head_linear(query[..., :192], both[:, :192].mT)
    context = kernels.StateContext.of_step(
        tensor(5, 100, dtype=I32), tensor(2, dtype=I32), tensor(3, dtype=I32), tensor(2, dtype=I32), 70, 16
    )
    keys, updates = tensor(9, 16, 16, 128, dtype=dtype), tensor(9, 16, 32, 128, dtype=F32)
    states = kernels.DeltaStates(tensor(9, 32, 128, 128, dtype=F32), keys, updates, tensor(9, 16, 32, dtype=F32))
    heads, gates, inputs = tensor(32, dtype=F32), tensor(70, 64, dtype=dtype), tensor(70, 8192, dtype=dtype)
    fixed_scan.delta_rule(inputs, gates, heads, heads, states, context)
    layer = StateSpace(heads, heads, heads, (0.0, 1.0))
    fixed_scan.mamba2(inputs, gates[:, :32], layer, states, context)
    halves = tensor(9, 32, 128, 128, dtype=F16), tensor(9, 16, 32, 128, dtype=dtype)
    states, forget = kernels.DeltaStates(*halves, updates, updates), tensor(70, 4096, dtype=dtype)
    qkv = tensor(70, 3 * 4096, dtype=dtype)
    fixed_scan.kda(qkv, gates[:, :32], forget, heads, tensor(4096, dtype=F32), states, context)


def router(tokens: int, dtype: torch.dtype, **rule: Any) -> None:
    from kernels.cuda.router import norm_route, route
    from kernels.data.moe import Router

    x, weight, bias = tensor(tokens, 2048), tensor(128, 2048, dtype=dtype), tensor(128, dtype=dtype)
    slots = tensor(tokens, dtype=I64)
    norm_route(x, tensor(2048), 1e-6, kernels.RouterArgs(weight, Router(8, **rule)), slots)
    route(x, kernels.RouterArgs(weight, Router(8, **rule), bias, tensor(128, dtype=F32)))


def expert_weights(form: str, n: int, k: int) -> Weight:
    """Weights of 32 experts; "float", or a form in `FORMS`."""
    if form == "float":
        return tensor(32, n, k)
    one = random_weight(form, n, k)
    parts = ((field.name, getattr(one, field.name)) for field in dataclasses.fields(one))
    on_meta: dict[str, Any] = {name: part.to(META) for name, part in parts if isinstance(part, Tensor)}
    return QuantizedWeight.stack([dataclasses.replace(one, **on_meta)] * 32)


def block_weight(kind: BlockKind, tokens: int, units: int) -> None:
    """Every form of a product of x [tokens, K] with GGUF's blocks."""
    from kernels.cuda.linear import linear_add, norm_gated, norm_linear
    from kernels.triton.block_weight import block_gemm, dequantize

    n, k = 2048, units * unit_channels(kind)
    rows = BlockRows(
        kind,
        tensor(n, units, 128, dtype=torch.uint8),
        tensor(units, n, 8 if kind == "q8_0" else 16, dtype=torch.uint8),
        tensor(n, units, 32 if kind == "q5_k" else 64, dtype=torch.uint8) if kind in ("q5_k", "q6_k") else None,
        tensor(units, n, dtype=F16) if kind == "q6_k" else None,
    )
    x, scale, weight = tensor(tokens, k), tensor(k), BlockWeight.of([rows])
    norm_linear(x, scale, 1e-6, weight, tensor(n))
    norm_gated(x, scale, 1e-6, weight)
    linear_add(tensor(tokens, n), x, weight)
    if tokens > 16:
        block_gemm(x, weight, None, None)
        dequantize(weight, BF16)


def experts(tokens: int, form: str, activation: ExpertActivation = "silu") -> None:
    from kernels.cuda.moe import experts as compute
    from kernels.cuda.moe import experts_add_norm, pack_experts

    weights_of = expert_weights(form, 1024, 1024), expert_weights(form, 1024, 512)
    gate_up, down = pack_experts(*weights_of, BF16) if activation == "silu" else weights_of
    x, weights, bias = tensor(tokens, 1024), tensor(tokens, 4, dtype=F32), tensor(32, 1024)
    biases = (None, None) if activation == "silu" else (bias, bias)
    stack = kernels.Experts(gate_up, down, biases[0], biases[1], activation)
    compute(x, weights.int(), weights, stack, add_to=x)
    norm = kernels.NextNorm(tensor(1024), 1e-6)
    experts_add_norm(x, norm, x, weights.int(), weights, stack)


def compressed_experts(tokens: int) -> None:
    """Weights of 32 experts, of bfloat16 in 12 bits a weight."""
    from kernels.cuda.moe import experts

    gate_up, down = (
        CompressedWeight(
            tensor(32, n // 128, k // 64, 2, 3, 512, dtype=I32), tensor(32, n, dtype=F32),
            tensor(32, n // 64, 32, dtype=I64), gated,
        )
        for n, k, gated in ((1024, 1024, True), (1024, 512, False))
    )  # fmt: skip
    x, weights = tensor(tokens, 1024), tensor(tokens, 4, dtype=F32)
    experts(x, weights.int(), weights, kernels.Experts(gate_up, down), add_to=x)


def parts_of_channels() -> None:
    """A product whose channels are divided among programs, and the sum of these parts."""
    from kernels.gluon.linear import weight_only as dense

    weight = QuantizedWeight("int4", tensor(512, 512, dtype=torch.uint8), tensor(512, 8, dtype=F16), 128)
    x, out = tensor(60, 1024), tensor(60, 512)
    dense.launch(x, weight, None, out, dense.Config(64, 4, 2), residual=out)


def fixed_many() -> None:
    """Deterministic mode's GEMM of many tokens, in all tiles."""
    from kernels.gluon.linear import fixed

    x, weight, out = tensor(600, 1024), tensor(2048, 1024), tensor(600, 2048)
    for block_m, overlaps in ((64, False), (128, False), (128, True)):
        two, one = fixed.Config(block_m, 2, overlaps), fixed.Config(block_m, 1, overlaps)
        fixed.launch(x, weight, None, out, two, residual=out)
        fixed.launch(x, weight, weight[0], tensor(600, 1024), two, gate="silu")
        for pieces in (1, 8):
            fixed.launch(x, weight, None, out, one, residual=out, rounds=True, pieces=pieces)
            fixed.launch(x, weight, None, tensor(600, 2048, dtype=F32), one, pieces=pieces)


def fixed_few() -> None:
    """Deterministic mode's GEMM of few tokens."""
    from kernels.gluon.linear import fixed_few

    weight, residual = tensor(2048, 1024), tensor(9, 2048)
    for tokens in (1, 9):
        x = tensor(tokens, 1024)
        fixed_few.launch(x, weight, weight[0], residual[:tokens], residual=residual[:tokens], rounds=True, pieces=8)
        fixed_few.launch(x, weight, None, tensor(tokens, 2048, dtype=F32), pieces=4)
        fixed_few.launch(x, weight, weight[0], tensor(tokens, 1024), gate="silu")
    x = tensor(1, 4096)
    normed = fixed_few.Normed(x, tensor(4096), 1e-6)
    fixed_few.launch(normed, tensor(6144, 4096), None, tensor(1, 6144))
    fixed_few.launch(normed, tensor(6144, 4096), None, tensor(1, 3072), gate="gelu_tanh")
    fixed_few.launch(x.half(), tensor(4096, 4096, dtype=F16), None, tensor(1, 4096, dtype=F16))


def blocks(num_bytes: int) -> None:
    from kernels.triton.blocks import gather_blocks, scatter_blocks

    parts = kernels.BlockParts.of([tensor(9, num_bytes, dtype=torch.uint8)] * 2)
    for copy in (gather_blocks, scatter_blocks):
        copy(tensor(3, 2 * num_bytes, dtype=torch.uint8), parts, tensor(3, dtype=I64))


def embedding() -> None:
    from kernels.triton.embedding import embedding

    embedding(tensor(99, 1000), tensor(3, dtype=I64), 5)


def parts() -> None:
    from kernels.gpu.parts import sum_parts, sum_parts_norm

    out, bias = tensor(60, 512), tensor(512)
    sum_parts(tensor(3, 64, 512), out)
    sum_parts(tensor(3, 60, 512, dtype=F32), out, bias=bias, residual=out)
    norm = kernels.NextNorm(bias, 1e-6)
    sum_parts_norm(tensor(3, 60, 512), out, norm, bias=bias)
    sum_parts_norm(
        tensor(3, 60, 512), out, dataclasses.replace(norm, rounded=kernels.QuantizedRows.empty(out, torch.int8, 128))
    )


def pairs() -> None:
    """Routed tokens, quantised in the experts' order."""
    from kernels.triton.scaled import quantize_pairs

    ids = tensor(60, 4, dtype=I32)
    quantize_pairs(tensor(60, 1024), torch.int8, 128, ids, ids, 0, 32)


def collectives(dtype: torch.dtype) -> None:
    from kernels.triton import collectives

    x, addresses, out = tensor(3, 1024, dtype=dtype), tensor(4, dtype=I64), tensor(3, 4096, dtype=dtype)
    if dtype != F16:
        small = collectives.Channel(0, 1 << 13, addresses, tensor(16, dtype=I32))
        collectives.all_reduce_small(x, small)
        collectives.all_reduce_small(x, small, residual=x)
    channel = collectives.Channel(0, 1 << 16, addresses, tensor(collectives.PROGRAMS, dtype=I32), addresses)
    collectives.all_reduce(x, channel)
    collectives.all_reduce(x, channel, residual=x)
    collectives.all_reduce(x, channel, residual=x, norm=(x[0], 1e-5))
    collectives.all_gather(x, channel, out)
    collectives.add_arrived(x, x, x, tensor(1, dtype=I32), 7)
    collectives.add_arrived(x, x, x, tensor(1, dtype=I32), 7, (x[0], 1e-5), x)


def prepare() -> None:
    from kernels.triton.prepare import prepare_step

    for num_groups in (1, 2):
        state, step = RowState.allocate(5, num_groups, 64, META), StepTensors.allocate(4, 16, num_groups, META)
        prepare_step(tensor(99, dtype=I32), 5, 4, 16, 16, state, step)
        prepare_step(tensor(99, dtype=I32), 5, 4, 4, 16, state, step, repeats=True)


def lora(tokens: int, rank: int, dtype: torch.dtype) -> None:
    from kernels.data.lora import LARGE_TILE, SMALL_TILE, AdapterTokens, LoraWeights, RowGroup, Tiles
    from kernels.triton.extended_lora import expand_extended
    from kernels.triton.lora import both, is_one_launch, lora_add

    factor, groups = tensor(4, 6144, dtype=F32), (RowGroup(0, 6144, 0),)
    down, up = tensor(4, rank, 4096, dtype=dtype), tensor(4, 6144, rank, dtype=dtype)
    weights = LoraWeights(down, up, factor, factor, groups, tensor(96, 3, dtype=I32), tensor(24, 3, dtype=I32))
    size = LARGE_TILE if tokens > 1000 else SMALL_TILE
    step = AdapterTokens(tensor(tokens, dtype=I32), 4)
    step.tiles = Tiles(tensor(tokens, dtype=I32), tensor(9, 3, dtype=I32), size)
    lora_add(tensor(tokens, 6144, dtype=dtype), tensor(tokens, 4096, dtype=dtype), weights, step)
    if is_one_launch(weights, step):
        for gate in (None, "silu"):
            y, x = tensor(tokens, 6144, dtype=dtype), tensor(tokens, 4096, dtype=dtype)
            both(y, x, weights, step, gate)  # type: ignore[arg-type]
    for gate in (None, "silu"):
        for rows in (64, 256):
            y = tensor(tokens, 6144 + 4 * rank, dtype=dtype)
            expand_extended(y, weights, step, gate, rows=rows)  # type: ignore[arg-type]


def vocab_lora(tokens: int, rank: int, dtype: torch.dtype) -> None:
    from kernels.data.lora import SMALL_TILE, AdapterTokens, EmbeddingLora, RetrainedRows, Tiles
    from kernels.triton.vocab_lora import adapt_embedding, retrained_logits

    step = AdapterTokens(tensor(tokens, dtype=I32), 4)
    step.tiles = Tiles(tensor(tokens, dtype=I32), tensor(9, 3, dtype=I32), SMALL_TILE)
    down, up, rows = (tensor(4, *shape, dtype=dtype) for shape in ((30000, rank), (4096, rank), (256, 4096)))
    own = EmbeddingLora(down, up, rows, tensor(4, 30000, dtype=I32), 0)
    x, ids = tensor(tokens, 4096, dtype=dtype), tensor(4, 256, dtype=I32)
    adapt_embedding(x, tensor(tokens, dtype=torch.int64), own, step)
    retrained_logits(tensor(tokens, 30000, dtype=dtype), x, RetrainedRows(rows, ids), step)


def adapted_linear(tokens: int, rank: int) -> None:
    """A linear layer with adapters in one launch: a norm before it, a gate or a sum after it."""
    from kernels.cuda.lora import small_batch_linear
    from kernels.data.lora import AdapterTokens, LoraWeights, RowGroup

    x, scale, slots = tensor(tokens, 1024), tensor(1024), AdapterTokens(tensor(tokens, dtype=I32), 4)
    for gate in (None, "silu"):
        groups = (RowGroup(0, 1024, 0), RowGroup(1024, 2048, 1))
        factor, blocks = tensor(4, 2048, dtype=F32), tensor(32, 3, dtype=I32)
        down, up = tensor(4, 2 * rank, 1024), tensor(4, 2048, rank)
        lora = LoraWeights(down, up, factor, factor, groups, blocks, blocks)
        small_batch_linear(x, tensor(2048, 1024), None, lora, slots, norm=(scale, 1e-6), gate=gate)  # type: ignore[arg-type]
        if gate is None:
            small_batch_linear(x, tensor(2048, 1024), None, lora, slots, residual=tensor(tokens, 2048))


def recurrent(num_seqs: int, num_tokens: int, dtype: torch.dtype, size: int = 128) -> None:
    """`size`: of heads of a delta net."""
    from kernels.data.state import DeltaStates, StateContext
    from kernels.triton.recurrent import causal_conv, gated_rms_norm, short_conv
    from kernels.triton.scans import delta_rule

    context = StateContext.of_step(
        tensor(5, 100, dtype=I32), tensor(num_seqs, dtype=I32), tensor(num_seqs + 1, dtype=I32),
        tensor(num_seqs, dtype=I32), num_tokens, 16, only_decodes=num_seqs == num_tokens,
    )  # fmt: skip
    short_conv(
        tensor(num_tokens, 3 * 1024, dtype=dtype),
        tensor(1024, 3, dtype=dtype),
        None,
        tensor(9, 4, 1024, dtype=dtype),
        context,
    )
    width = (2 * 16 + 32) * size
    qkvz = tensor(num_tokens, width + 32 * size, dtype=dtype)
    causal_conv(qkvz[:, :width], tensor(width, 4, dtype=dtype), None, tensor(9, 4, width, dtype=dtype), context)
    states = DeltaStates(
        tensor(9, 32, size, size, dtype=F32), tensor(9, 16, 16, size, dtype=dtype), tensor(9, 16, 32, size, dtype=F32),
        tensor(9, 16, 32, dtype=F32),
    )  # fmt: skip
    heads = tensor(32, dtype=F32)
    out = delta_rule(
        tensor(num_tokens, width, dtype=dtype), tensor(num_tokens, 64, dtype=dtype), heads, heads, states, context
    )
    gated_rms_norm(out, qkvz[:, width:], tensor(size, dtype=dtype), 1e-6)
    state_space(width, states, heads, context, dtype)


def state_space(width: int, states: Any, heads: Tensor, context: Any, dtype: torch.dtype) -> None:
    """A state-space layer with states like those of a delta net."""
    from kernels.data.state import StateSpace
    from kernels.triton import scans
    from kernels.triton.grouped_norm import grouped_rms_norm

    inputs = tensor(len(context.sequence_of), width, dtype=dtype)
    steps = tensor(len(inputs), 32, dtype=dtype)
    layer = StateSpace(heads, heads, heads, (0.0, 1.0))
    out = scans.mamba2(inputs, steps, layer, states, context).flatten(1)
    grouped_rms_norm(out, out, tensor(out.shape[1], dtype=dtype), 1e-6, 8, True)


def channel_decays(num_seqs: int, num_tokens: int, dtype: torch.dtype) -> None:
    """Kimi delta attention of 32 heads of 128."""
    from kernels.data.state import DeltaStates, StateContext
    from kernels.triton.kda import kda

    context = StateContext.of_step(
        tensor(5, 100, dtype=I32), tensor(num_seqs, dtype=I32), tensor(num_seqs + 1, dtype=I32),
        tensor(num_seqs, dtype=I32), num_tokens, 16, only_decodes=num_seqs == num_tokens,
    )  # fmt: skip
    states = DeltaStates(
        tensor(9, 32, 128, 128, dtype=F32), tensor(9, 16, 32, 128, dtype=dtype), tensor(9, 16, 32, 128, dtype=F32),
        tensor(9, 16, 32, 128, dtype=F32),
    )  # fmt: skip
    qkv, forget = tensor(num_tokens, 3 * 4096, dtype=dtype), tensor(num_tokens, 4096, dtype=dtype)
    kda(
        qkv,
        tensor(num_tokens, 32, dtype=dtype),
        forget,
        tensor(32, dtype=F32),
        tensor(4096, dtype=F32),
        states,
        context,
    )


VARIANTS: list[Callable[[], None]] = [
    *(functools.partial(f, dtype) for f in (norm, activation, rotation) for dtype in (F32, F16, BF16)),
    functools.partial(sampling, BF16),
    functools.partial(rotary, 128, 128, True),
    functools.partial(rotary, 64, 64, False, F16),
    functools.partial(rotary, 80, 40, True, F32),
    functools.partial(rotary, 256, 0, False),
    functools.partial(rotary, 128, 64, False, interleaved=True),
    functools.partial(kv_cache, BF16),
    functools.partial(attention, 128, 7, 16, few=False),
    functools.partial(attention, 128, 4, 16, queries=4),
    functools.partial(attention, 80, 8, 16, soft_cap=30.0, alibi_slopes=True),
    *(functools.partial(form, dtype) for form in (deterministic, deterministic_layers) for dtype in (F32, BF16)),
    functools.partial(latent, 20, 3),
    functools.partial(index, 64, 3),
    functools.partial(index, 32, 3, F32),
    functools.partial(matmul, 1, F16),
    functools.partial(matmul, 5, BF16),
    functools.partial(matmul, 11, BF16),
    functools.partial(matmul, 16, F32),
    functools.partial(quantized, 5, "e4m3"),
    functools.partial(quantized, 1, "int8"),
    functools.partial(quantized, 1, "int4", 128, zeros=True),
    functools.partial(block_weight, "q4_k", 1, 16),
    functools.partial(block_weight, "q6_k", 1, 56),
    functools.partial(block_weight, "q5_k", 8, 16),
    functools.partial(block_weight, "q8_0", 11, 32),
    functools.partial(block_weight, "q4_k", 11, 56),
    functools.partial(block_weight, "q6_k", 100, 16),
    functools.partial(block_weight, "q8_0", 60, 32),
    functools.partial(block_weight, "q5_k", 180, 16),
    functools.partial(block_weight, "q4_k", 300, 16),
    functools.partial(quantized, 3, "e2m1", 16, e4m3_scales=True),
    functools.partial(quantized, 60, "int4", 128),
    functools.partial(quantized, 300, "int8", rounds=True),
    *(functools.partial(collectives, dtype) for dtype in (BF16, F32, F16)),
    functools.partial(router, 1, BF16, renormalise=True),
    functools.partial(router, 300, F32, scoring="sigmoid", num_groups=8, num_chosen_groups=4, group_score="top2"),
    functools.partial(experts, 1, "mxfp4", activation="clamped_swiglu"),
    functools.partial(experts, 2, "float", activation="gelu_tanh"),
    functools.partial(experts, 64, "fp8 blocks"),
    functools.partial(experts, 4096, "float"),
    functools.partial(experts, 4096, "int4"),
    functools.partial(lora, 1, 16, BF16),
    functools.partial(lora, 1100, 48, F16),
    functools.partial(lora, 20, 512, F32),
    functools.partial(vocab_lora, 5, 16, BF16),
    functools.partial(vocab_lora, 100, 512, F32),
    functools.partial(adapted_linear, 5, 32),
    functools.partial(recurrent, 1, 1, BF16),
    functools.partial(channel_decays, 2, 70, BF16),
    functools.partial(recurrent, 2, 70, F16, 64),
    functools.partial(recurrent, 2, 70, F32),
    functools.partial(attention, 128, 4, 16, few=False, reads_once=True),
    functools.partial(attention, 80, 3, 8, F32, reads_once=True),
    prepare,
    parts,
    embedding,
    functools.partial(blocks, 32768),
    functools.partial(blocks, 1028),
    pairs,
]


E4M3_VARIANTS: list[Callable[[], None]] = [  # for devices that convert it, from compute capability 8.9
    functools.partial(kv_cache, E4M3),
    functools.partial(rotary, 128, 128, True, BF16, E4M3),
    functools.partial(rotary, 256, 256, True, BF16, E4M3, wide=True),
    functools.partial(rotary, 128, 64, False, BF16, E4M3, wide=True),
    functools.partial(attention, 64, 4, 16, F32, E4M3, few=False),
    functools.partial(attention, 128, 4, 16, BF16, E4M3, few=False, reads_once=True, sinks=True),
    functools.partial(wide_pages, 128, 4, 16),
    functools.partial(quantized, 300, "e4m3", rounds=True, dtype=F16),
    functools.partial(quantized, 300, "e4m3", 128, 128, rounds=True),
]

# Compilation takes long: other devices compile no more than some forms of these.
HOPPER_VARIANTS: list[Callable[[], None]] = [
    parts_of_channels,
    functools.partial(attention, 256, 4, 16),
    functools.partial(latent, 128, 40, F16, interleaved=False),
    functools.partial(quantized, 12, "e4m3", 128, 128),
    functools.partial(quantized, 60, "e4m3"),
    functools.partial(quantized, 60, "e4m3", rounds=True),
    functools.partial(quantized, 100, "e4m3", 128, 128, rounds=True),
    functools.partial(quantized, 60, "int8", 64, zeros=True, dtype=F16),
    functools.partial(quantized, 60, "int4", 32, fractions=True),
    functools.partial(quantized, 60, "int8", 32, fractions=True),
    functools.partial(quantized, 1, "int4", 32, fractions=True),
    functools.partial(quantized, 1, "int8", 16),
    functools.partial(experts, 64, "int4 minima"),
    functools.partial(quantized, 60, "e2m1", 16, e4m3_scales=True),
    functools.partial(sampling, F32),
    functools.partial(sampling, F16),
    functools.partial(latent, 16, 3, F32),
    functools.partial(quantized, 1, "int4", 32),
    functools.partial(quantized, 3, "e2m1", 32),
    functools.partial(attention, 64, 8, 16, few=False, window=128, sinks=True),
    functools.partial(attention, 64, 2, 16, BF16, E4M3, queries=8, window=128, sinks=True),
    functools.partial(attention, 64, 1, 16, window=65, causal=False),
    functools.partial(attention, 80, 16, 32, F16, few=False, soft_cap=50.0, alibi_slopes=True),
    functools.partial(attention, 128, 4, 16, sparse=kernels.BlockSparse(64, 16, 8, 1)),
    functools.partial(attention, 128, 7, 16, BF16, E4M3, few=False),
    functools.partial(attention, 80, 8, 64, F16, E4M3, window=1024, alibi_slopes=True),
    fixed_many,
    fixed_few,
    functools.partial(wide_pages, 256, 2, 16, window=1024, soft_cap=50.0),
    functools.partial(wide_pages, 80, 7, 64, F16),
    *(functools.partial(compressed_experts, tokens) for tokens in (1, 3, 60, 400, 1000, 5000)),
]

HOPPER_FILES = (  # for compute capability 9.0 alone
    "attention.decode", "attention.prefill", "attention.latent_decode", "linear.weight_only", "linear.scaled",
    "linear.block_weight_only", "linear.fixed_few",
    "linear.fixed", "moe.compressed", "moe.compressed_small_batch", "moe.decompress", "moe.weight_only", "moe.scaled",
)  # fmt: skip
HOPPER = (*(f"kernels.gluon.{name}" for name in HOPPER_FILES), "kernels.triton.wide_pages")


# Bytes that a program may have, by compute capability.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


class Driver:
    """Stand-in for a device, as far as the compilation asks for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def entry_points() -> Iterator[JITFunction]:
    """The kernels that the package launches: its jitted functions named *_kernel."""
    for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
        module = importlib.import_module(found.name)
        for name, value in inspect.getmembers(module):
            if isinstance(value, JITFunction) and name.endswith("_kernel") and value.module == module.__name__:
                yield value


def main(capability: int, once: bool = False) -> int:
    hopper = capability // 10 == 9
    launched: dict[JITFunction, list[triton.FutureKernel]] = {
        kernel: [] for kernel in entry_points() if hopper or kernel.module not in HOPPER
    }
    run = JITFunction.run

    def counted(self: JITFunction, *args: object, **options: object) -> object:
        if once and launched.get(self):
            return launched[self][0]
        binary = run(self, *args, **options)
        launched.setdefault(self, []).append(binary)
        return binary

    JITFunction.run = counted
    triton.runtime.driver.set_active(Driver(capability))
    modules = {name: module for name, module in sys.modules.items() if name.startswith("kernels.")}
    for module in modules.values():  # what the kernels' launchers would find on such a device
        if capability >= 90 and hasattr(module, "pdl_options"):
            module.pdl_options = lambda device: {"PDL": True, "launch_pdl": True}  # type: ignore[attr-defined]
        if capability >= 89 and hasattr(module, "multiplies_e4m3"):
            module.multiplies_e4m3 = lambda device: True  # type: ignore[attr-defined]
        if hasattr(module, "has_tensor_cores"):
            module.has_tensor_cores = lambda device: True  # type: ignore[attr-defined]
        if hasattr(module, "is_hopper"):
            module.is_hopper = lambda device: capability == 90  # type: ignore[attr-defined]
        if hasattr(module, "shared_memory"):
            module.shared_memory = lambda device=None: SHARED_MEMORY[capability]  # type: ignore[attr-defined]
        if hasattr(module, "num_multiprocessors"):
            module.num_multiprocessors = lambda device: 132  # type: ignore[attr-defined]
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
    with kernels.compiling_only():
        for variant in VARIANTS + (E4M3_VARIANTS if capability >= 89 else []) + (HOPPER_VARIANTS if hopper else []):
            variant()
    if capability != 90:
        launched = {kernel: binaries for kernel, binaries in launched.items() if kernel.module not in HOPPER}
    too_large = False
    for kernel, futures in launched.items():
        binaries = {binary.hash: binary for binary in (future.result() for future in futures)}  # raises what went wrong
        shared = max((binary.metadata.shared for binary in binaries.values()), default=0)
        note = "" if shared <= SHARED_MEMORY[capability] else f", {shared} BYTES OF SHARED MEMORY ARE TOO MANY"
        print(f"sm_{capability} {kernel.module}.{kernel.__name__}: {len(binaries)} binaries{note}")
        too_large |= bool(note)
    return 0 if all(launched.values()) and not too_large else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), "--once" in sys.argv))
