"""Decoding over cached latents on Hopper's tensor cores, in Gluon; see `kernels.reference.latent`.

The work is a line of tiles of 64 latents, which programs cut into equal pieces, as in
`kernels.triton.attention_decode`: a (sequence, heads) pair inside one piece is written at once, the parts of one that
is cut are joined by a second kernel. A tile is loaded once and serves as keys and as values. Latents are the rows of
the tensor core's products and heads the columns, so that few heads cost little. Two programs share a multiprocessor:
while one multiplies, the other's tile is on its way.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.data.attention import PagedLatents
from kernels.data.plan import DecodePlan
from kernels.gluon.common.layouts import barrier
from kernels.gpu.device import is_hopper
from kernels.gpu.launch import launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

TILE = 64
LOG2E = 1.4426950408889634


@gluon.jit
def _blocks(table, tile, context_len, PAGE: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """The blocks of a tile's slots [TILE]; any behind the context."""
    position = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(table + position // PAGE, mask=position < context_len, other=0)


@gluon.jit
def _copy(cache, smem, block, tile, context_len, stride_block, stride_slot, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Ask for the channels at `cache` of a tile's slots; those behind the context become 0."""
    position = tile * smem.shape[0] + gl.arange(0, smem.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = cache + (block.to(gl.int64) * stride_block + position % PAGE * stride_slot)[:, None] + c[None, :]
    async_copy.async_copy_global_to_shared(smem, at, mask=(position < context_len)[:, None])


@gluon.jit
def _load_queries(query, smem, stride, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """GROUP heads' queries, and zeros for the heads that pad them."""
    h = gl.arange(0, smem.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    smem.store(gl.load(query + h[:, None] * stride + c[None, :], mask=(h < GROUP)[:, None], other=0.0))


@gluon.jit
def _zero():
    """0, unknown to the compiler: so it does not move what this is added to before the loop, into registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _store_sums(target, sums, stride, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """GROUP heads' sums [L, N], the channels of a head side by side."""
    c = _zero() + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    h = _zero() + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = target + h[None, :] * stride + c[:, None]
    gl.store(at, sums.to(target.dtype.element_ty), mask=(h < GROUP)[None, :])


@gluon.jit
def _attend_tile(
    latents, rotated, query, query_rotated, weights, acc, m, l, tile, context_len, scale_log2,
    TILE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Fold a tile that is in shared memory into acc [L, N], the heads' running maxima m [N] and l [TILE, N], the sums
    by slot.
    """
    scores = warpgroup_mma(latents, query.permute((1, 0)), gl.zeros_like(l), use_acc=False, is_async=True)
    scores = warpgroup_mma(rotated, query_rotated.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores]) * scale_log2
    position = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    scores = gl.where((position < context_len)[:, None], scores, -float("inf"))
    new_m = gl.maximum(m, gl.max(scores, 0))
    decay = gl.exp2(m - new_m)
    p = gl.exp2(scores - new_m[None, :])
    l = l * decay[None, :] + p
    weights.store(gl.permute(p.to(weights.dtype), (1, 0)))
    acc *= decay[None, :]
    fence_async_shared()
    barrier()
    acc = warpgroup_mma(latents.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, new_m, l


@gluon.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["rows", "context_lens"],
)
def _latent_decode_kernel(
    query, cache, out, block_tables, rows, context_lens, work, partial_out, partial_stats, scale_log2, num_seqs,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_table, stride_block, stride_slot,
    GROUPS: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, L: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """GROUPS times GROUP heads, padded to N; L latent channels and 64 that carry the position."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    latents = gl.allocate_shared_memory(DTYPE, [1, TILE, L], SHARED)
    rotated = gl.allocate_shared_memory(DTYPE, [1, TILE, 64], SHARED)
    q_smem = gl.allocate_shared_memory(DTYPE, [1, N, L], SHARED)
    q_rotated_smem = gl.allocate_shared_memory(DTYPE, [1, N, 64], SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [1, N, TILE], SHARED)
    # The map, the lengths, the rows and the tables were written before the preceding kernel began, see `plan_decode`.
    program = gl.program_id(0)
    entry = work + program * 8
    left = gl.load(entry)
    per_program = gl.load(entry + 1)
    seq = gl.load(entry + 2)
    inner = gl.load(entry + 3)
    context_len = gl.load(entry + 4)
    row = gl.load(entry + 5)
    at_tile = program * per_program
    end = at_tile + left
    if PDL:
        launch_dependents()
        wait_for_inputs()
    h = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    for empty in range(program, num_seqs, gl.num_programs(0)):  # a padding row has no tile: its output is 0
        if gl.load(context_lens + empty) == 0:
            for empty_group in range(GROUPS):
                target = out + empty * stride_ot + empty_group * GROUP * stride_oh
                _store_sums(target, gl.zeros([L, N], gl.float32, LAYOUT), stride_oh, GROUP, LAYOUT)
    while at_tile < end:
        num_tiles = gl.cdiv(context_len, TILE)
        if num_tiles == 0:
            seq += 1
            context_len = gl.load(context_lens + seq)
            row = gl.load(rows + seq)
        else:
            group = inner // num_tiles
            first = inner - group * num_tiles
            count = gl.minimum(num_tiles - first, end - at_tile)
            table = block_tables + row.to(gl.int64) * stride_table
            wide = _blocks(table, first, context_len, PAGE, TILE, WIDE)
            narrow = _blocks(table, first, context_len, PAGE, TILE, NARROW)
            base = query + seq.to(gl.int64) * stride_qt + group * GROUP * stride_qh
            _load_queries(base, q_smem.index(0), stride_qh, GROUP, WIDE)
            _load_queries(base + L, q_rotated_smem.index(0), stride_qh, GROUP, NARROW)
            acc = gl.zeros([L, N], gl.float32, LAYOUT)
            m = gl.full([N], -float("inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
            l = gl.zeros([TILE, N], gl.float32, LAYOUT)
            for tile in range(first, first + count):
                _copy(cache, latents.index(0), wide, tile, context_len, stride_block, stride_slot, PAGE, WIDE)
                _copy(cache + L, rotated.index(0), narrow, tile, context_len, stride_block, stride_slot, PAGE, NARROW)
                async_copy.commit_group()
                wide = _blocks(table, tile + 1, context_len, PAGE, TILE, WIDE)
                narrow = _blocks(table, tile + 1, context_len, PAGE, TILE, NARROW)
                async_copy.wait_group(0)
                fence_async_shared()
                barrier()
                zero = _zero()
                acc, m, l = _attend_tile(
                    latents.index(zero), rotated.index(zero), q_smem.index(zero), q_rotated_smem.index(zero),
                    weights.index(zero), acc, m, l, tile, context_len, scale_log2, TILE, LAYOUT,
                )  # fmt: skip
                barrier()  # all warps have read the tile
            total = gl.sum(l, 0)
            if count == num_tiles:
                target = out + seq.to(gl.int64) * stride_ot + group * GROUP * stride_oh
                _store_sums(target, acc / total[None, :], stride_oh, GROUP, LAYOUT)
            else:
                part = program * 2 + gl.where(program * per_program >= at_tile - first, 0, 1)
                _store_sums(partial_out + (part * GROUP).to(gl.int64) * L, acc, L, GROUP, LAYOUT)
                gl.store(partial_stats + part * 2 * GROUP + h, m, mask=h < GROUP)
                gl.store(partial_stats + part * 2 * GROUP + GROUP + h, total, mask=h < GROUP)
            at_tile += count
            inner += count
            if inner == num_tiles * GROUPS:
                inner = 0
                if at_tile < end:
                    seq += 1
                    context_len = gl.load(context_lens + seq)
                    row = gl.load(rows + seq)


@triton.jit
def _part(program, start, per_program):
    """Slot of a program's partial result for tiles that begin at `start`: one slot is for tiles that began before
    it.
    """
    return program * 2 + tl.where(program * per_program >= start, 0, 1)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["context_lens"])
def _join_pieces_kernel(
    context_lens, work, partial_out, partial_stats, out, num_seqs, stride_ot, stride_oh,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_B: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, h): out [b, h] from the parts that several programs left of the pair; nothing if one wrote it."""
    b, h = tl.program_id(0), tl.program_id(1)
    seq = tl.arange(0, BLOCK_B)
    tiles = tl.cdiv(tl.load(context_lens + seq, mask=seq <= b, other=0), TILE)
    num_tiles = tl.sum(tl.where(seq == b, tiles, 0))
    start = tl.sum(tl.where(seq < b, tiles, 0)) * GROUPS + h // GROUP * num_tiles
    per_program = tl.maximum(tl.load(work + 1), 1)
    first = start // per_program
    count = (start + num_tiles - 1) // per_program - first + 1
    if PDL:
        launch_dependents()
        wait_for_inputs()
    if (num_tiles > 0) & (count > 1):
        p = tl.arange(0, PROGRAMS)
        stats = partial_stats + _part(first + p, start, per_program) * 2 * GROUP + h % GROUP
        m = tl.load(stats, mask=p < count, other=-float("inf"))
        largest = tl.max(m)
        total = tl.sum(tl.exp2(m - largest) * tl.load(stats + GROUP, mask=p < count, other=0.0))
        c = tl.arange(0, L)
        acc = tl.zeros([L], tl.float32)
        for begin in range(0, count, CHUNK):
            some = begin + tl.arange(0, CHUNK)
            part = _part(first + some, start, per_program)
            some_m = tl.load(partial_stats + part * 2 * GROUP + h % GROUP, mask=some < count, other=-float("inf"))
            at = partial_out + (part * GROUP + h % GROUP).to(tl.int64)[:, None] * L + c[None, :]
            values = tl.load(at, mask=(some < count)[:, None], other=0.0)
            acc += tl.sum(values * tl.exp2(some_m - largest)[:, None], 0)
        target = out + b.to(tl.int64) * stride_ot + h * stride_oh + c
        tl.store(target, (acc / total).to(out.dtype.element_ty))


def supports(query: Tensor, cache: Tensor, out: Tensor) -> bool:
    """Return whether `launch` computes the call: a Hopper GPU, 16-bit latents of 512 + 64 channels."""
    return (
        is_hopper(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and cache.dtype == query.dtype
        and (out.shape[-1], cache.shape[-1]) == (512, 576)
        and (query.stride(0) | query.stride(1) | cache.stride(0) | cache.stride(2)) % 8 == 0
    )


def launch(
    query: Tensor, latents: PagedLatents, scale: float, out: Tensor, plan: DecodePlan, dependent: bool = True
) -> None:
    """Writes `out`. Shapes as in `kernels.latent_attention_decode`; see `supports`. `plan`: of `latent_decode_plan`.

    `dependent`: the plan was written before the preceding kernel.
    """
    num_seqs, num_heads, size = out.shape
    cache, block_tables, context_lens = latents.cache, latents.block_tables, latents.lens
    page, groups, group = cache.shape[2], plan.num_kv_heads, plan.group
    assert plan.tile == TILE
    assert groups * group == num_heads
    assert query.stride(2) == cache.stride(3) == out.stride(2) == block_tables.stride(1) == 1
    options = pdl_options(query.device)
    _latent_decode_kernel[(len(plan.work),)](
        query, cache, out, block_tables, latents.rows, context_lens, plan.work, plan.partial_out, plan.partial_stats,
        scale * LOG2E, num_seqs, query.stride(0), query.stride(1), out.stride(0), out.stride(1), block_tables.stride(0),
        cache.stride(0), cache.stride(2), GROUPS=groups, GROUP=group, N=max(next_power_of_2(group), 16), L=size,
        PAGE=page, TILE=TILE, num_warps=4, **(options if dependent else {"PDL": False}),
    )  # fmt: skip
    _join_pieces_kernel[(num_seqs, num_heads)](
        context_lens, plan.work, plan.partial_out, plan.partial_stats, out, num_seqs, out.stride(0), out.stride(1),
        GROUPS=groups, GROUP=group, L=size, TILE=TILE, PROGRAMS=next_power_of_2(len(plan.work)),
        BLOCK_B=max(16, next_power_of_2(plan.max_seqs)), CHUNK=4, num_warps=4, **options,
    )  # fmt: skip
