"""Paged attention for sequences of several query tokens (prefill chunks), in Triton.

One program takes a tile of BLOCK_M rows, which are BLOCK_M // group queries times the `group` query heads of one KV
head, so that short chunks still fill the tensor core and a KV tile is read once for all its heads. Keys wholly visible
to every row need no mask; the diagonal, the window's edge and the context's end take a second, masked loop. The grid is
a list of tiles, which the caller orders longest first, so that the last programs to start are short ones.

Sources: FlashAttention-2 (Dao, arXiv 2307.08691), PagedAttention (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.attention import AttentionArgs, KnownArgs, PagedContext
from kernels.data.plan import prefill_block_m, prefill_tile_queries
from kernels.gpu.launch import launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton.paged_tile import (
    LOG2E,
    first_local_block,
    first_vertical_block,
    fold,
    load_kv_tile,
    no_sum,
    normalised,
    soft_capped,
    whole_sum,
)

KNOWN = KnownArgs("window", "soft_cap", "alibi_slopes", "sinks", "sparse", "kv_scale", "causal")


@triton.jit
def attend_tile(
    start, q, acc, m, l, key_base, value_base, table, oldest, context_len, query_pos, slopes, scale, stride_block,
    stride_token, head, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SPARSE: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr = True, SUM_BY_DOT: tl.constexpr = False,
):  # fmt: skip
    """Fold keys [start, start + BLOCK_N) into the running (acc, m, l); rows sit at absolute positions query_pos [M]."""
    k, v = load_kv_tile(
        key_base, value_base, table, start, oldest, context_len, stride_block, stride_token, q.dtype,
        BLOCK_N, PAGE, HEAD_DIM, D_PAD, False, WINDOW, MASKED,
    )  # fmt: skip
    s = tl.dot(q, k, input_precision=PRECISION) * scale
    if SOFT_CAP > 0:
        s = soft_capped(s, SOFT_CAP)
    positions = start + tl.arange(0, BLOCK_N)
    if ALIBI:
        ahead = (positions[None, :] - query_pos[:, None]).to(tl.float32)
        s += slopes[:, None] * (ahead if CAUSAL else -tl.abs(ahead))
    s *= LOG2E
    if MASKED:
        keep = positions[None, :] <= query_pos[:, None] if CAUSAL else positions[None, :] < context_len
        if WINDOW > 0:
            keep &= positions[None, :] > query_pos[:, None] - WINDOW
            if not CAUSAL:
                keep &= positions[None, :] < query_pos[:, None] + WINDOW
        if SPARSE is not None:
            block = positions // SPARSE[0]
            vertical = (block + (SPARSE[4] + head) * SPARSE[3] + 1) % SPARSE[2] == 0
            keep &= (query_pos[:, None] // SPARSE[0] - block[None, :] < SPARSE[1]) | vertical[None, :]
        s = tl.where(keep, s, -float("inf"))
    return fold(s, v, acc, m, l, PRECISION, SUM_BY_DOT)


@triton.jit(
    do_not_specialize_on_alignment=["rows", "query_start", "context_lens", "alibi_slopes", "sinks", "kv_scale", "tiles"]
)
def _prefill_kernel(
    query, key_cache, value_cache, out, block_tables, rows, query_start, context_lens, alibi_slopes, sinks, kv_scale,
    tiles, scale,
    stride_qt, stride_qh, stride_ot, stride_table, stride_block, stride_head, stride_token,
    NUM_HEADS: tl.constexpr, KV_GROUP: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE_Q: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPARSE: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, CAUSAL: tl.constexpr,
    ONE_LOOP: tl.constexpr = False,
):  # fmt: skip
    """ONE_LOOP: all tiles of keys are computed by the same instructions, masked ones or not. Not with SPARSE."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // KV_GROUP
    head = tl.program_id(0) % (NUM_HEADS // GROUP)
    tile = tl.program_id(0) // (NUM_HEADS // GROUP)
    kv_head = head * GROUP // KV_GROUP
    seq = tl.load(tiles + tile * 2)
    first_query = tl.load(tiles + tile * 2 + 1)
    start = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - start
    context_len = tl.load(context_lens + seq)
    table = block_tables + tl.load(rows + seq).to(tl.int64) * stride_table

    m_index = tl.arange(0, BLOCK_M)
    query_index = first_query + m_index // GROUP
    heads = head * GROUP + m_index % GROUP
    d = tl.arange(0, D_PAD)
    row_mask = (m_index < TILE_Q * GROUP) & (query_index < query_len)
    q_mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    tokens = (start + query_index).to(tl.int64)
    q = tl.load(query + tokens[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :], mask=q_mask, other=0.0)
    if SCALED:  # the scores and the sum of values, not each key and value
        scale *= tl.load(kv_scale + kv_head)
    FP8: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    if FP8 and q.dtype == tl.bfloat16:  # e4m3 becomes float16 in one instruction, exactly
        q = q.to(tl.float16)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slopes = tl.load(alibi_slopes + heads)
    key_base = key_cache + kv_head.to(tl.int64) * stride_head
    value_base = value_cache + kv_head.to(tl.int64) * stride_head

    first_pos = context_len - query_len + first_query
    last_pos = tl.minimum(first_pos + TILE_Q, context_len) - 1
    query_pos = tl.minimum(context_len - query_len + query_index, context_len - 1)
    oldest = 0
    whole_begin = 0
    if WINDOW > 0:  # keys before `oldest` are seen by no row, those from `whole_begin` by every row's window
        oldest = tl.maximum(first_pos - WINDOW + 1, 0)
        whole_begin = tl.cdiv(tl.maximum(last_pos - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
    if SPARSE is not None:  # the local blocks; each block before them is seen by all rows or by none
        local = first_local_block(first_pos, SPARSE)
        oldest = local * SPARSE[0]
        whole_begin = first_local_block(last_pos, SPARSE) * SPARSE[0]
    end = last_pos + 1  # of the keys that any row sees
    whole_end = first_pos + 1  # those before are seen by every row
    if not CAUSAL:
        end = context_len
        if WINDOW > 0:
            end = tl.minimum(last_pos + WINDOW, context_len)
        whole_end = tl.minimum(first_pos + WINDOW, context_len) if WINDOW > 0 else context_len
    whole_end = tl.maximum(whole_end // BLOCK_N * BLOCK_N, whole_begin)
    if ONE_LOOP:
        whole_begin = oldest // BLOCK_N * BLOCK_N
        whole_end = whole_begin
    LAST_STAGES: tl.constexpr = STAGES if ONE_LOOP else 1

    acc = no_sum(BLOCK_M, D_PAD, False)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if SPARSE is not None:
        first = first_vertical_block(head, SPARSE)
        PER_BLOCK: tl.constexpr = SPARSE[0] // BLOCK_N
        for nth in tl.range(0, tl.cdiv(tl.maximum(local - first, 0), SPARSE[2]) * PER_BLOCK, num_stages=STAGES):
            at = (first + nth // PER_BLOCK * SPARSE[2]) * SPARSE[0] + nth % PER_BLOCK * BLOCK_N
            acc, m, l = attend_tile(
                at, q, acc, m, l, key_base, value_base, table, 0, context_len, query_pos, slopes, scale, stride_block,
                stride_token, head, BLOCK_N, PAGE, HEAD_DIM, D_PAD, 0, SPARSE, SOFT_CAP, ALIBI, False, PRECISION,
            )  # fmt: skip
    if WINDOW > 0 or SPARSE is not None:
        for at in tl.range(oldest // BLOCK_N * BLOCK_N, tl.minimum(whole_begin, end), BLOCK_N, num_stages=1):
            acc, m, l = attend_tile(
                at, q, acc, m, l, key_base, value_base, table, oldest, context_len, query_pos, slopes, scale,
                stride_block, stride_token, head, BLOCK_N, PAGE, HEAD_DIM, D_PAD, WINDOW, SPARSE, SOFT_CAP, ALIBI, True,
                PRECISION, CAUSAL,
            )  # fmt: skip
    for at in tl.range(whole_begin, whole_end, BLOCK_N, num_stages=STAGES):
        acc, m, l = attend_tile(
            at, q, acc, m, l, key_base, value_base, table, oldest, context_len, query_pos, slopes, scale, stride_block,
            stride_token, head, BLOCK_N, PAGE, HEAD_DIM, D_PAD, WINDOW, SPARSE, SOFT_CAP, ALIBI, False, PRECISION,
            CAUSAL,
        )  # fmt: skip
    for at in tl.range(whole_end, end, BLOCK_N, num_stages=LAST_STAGES):
        acc, m, l = attend_tile(
            at, q, acc, m, l, key_base, value_base, table, oldest, context_len, query_pos, slopes, scale, stride_block,
            stride_token, head, BLOCK_N, PAGE, HEAD_DIM, D_PAD, WINDOW, SPARSE, SOFT_CAP, ALIBI, True, PRECISION,
            CAUSAL,
        )  # fmt: skip
    acc = whole_sum(acc)
    if SCALED:
        acc *= tl.load(kv_scale + NUM_KV_HEADS + kv_head)
    acc = normalised(acc, m, l, sinks + heads, row_mask, SINKS)
    tl.store(
        out + tokens[:, None] * stride_ot + heads[:, None] * HEAD_DIM + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=q_mask,
    )


def launch(
    query: Tensor,
    query_start: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    tiles: Tensor,
    out: Tensor,
    one_loop: bool = False,
) -> None:
    """Compute the attention of the queries [T, H, D] of tiles [N, 2] into `out`; see
    `kernels.paged_attention_prefill`. one_loop: see `_prefill_kernel`.
    """
    assert args.sparse is None or not one_loop
    if missing := KNOWN.missing(args):
        raise NotImplementedError(f"no kernel for GPUs computes attention with {', '.join(missing)}")
    _, num_heads, head_dim = query.shape
    keys, lens, sparse = context.key_cache, context.lens, args.sparse
    _, num_kv_heads, page, _ = keys.shape
    packed = num_kv_heads if sparse is None else num_heads  # heads that see different blocks have tiles of their own
    small = query.dtype == torch.float32 or head_dim > 128
    block_m, tile_keys = prefill_block_m(head_dim, query.dtype), 32 if small else 64
    _prefill_kernel[(len(tiles) * packed,)](
        query, keys, context.value_cache, out, context.block_tables, context.rows, query_start, lens,
        lens if args.alibi_slopes is None else args.alibi_slopes, lens if args.sinks is None else args.sinks,
        lens if args.kv_scale is None else args.kv_scale, tiles, args.scale,
        query.stride(0), query.stride(1), out.stride(0), context.block_tables.stride(0),
        keys.stride(0), keys.stride(1), keys.stride(2),
        NUM_HEADS=num_heads, KV_GROUP=num_heads // num_kv_heads, GROUP=num_heads // packed, HEAD_DIM=head_dim,
        D_PAD=max(16, next_power_of_2(head_dim)), BLOCK_M=block_m,
        TILE_Q=prefill_tile_queries(num_heads, packed, head_dim, query.dtype),
        BLOCK_N=tile_keys if sparse is None else min(tile_keys, sparse.block), PAGE=page, WINDOW=args.window,
        SPARSE=None if sparse is None else sparse.constants, SOFT_CAP=args.soft_cap,
        ALIBI=args.alibi_slopes is not None, SINKS=args.sinks is not None, SCALED=args.kv_scale is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", CAUSAL=args.causal,
        STAGES=2 if small else 3, num_warps=8 if small and block_m == 128 else 4, ONE_LOOP=one_loop,
        **pdl_options(query.device),
    )  # fmt: skip
