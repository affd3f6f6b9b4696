"""How a step's tokens meet the paged KV cache. Knows the step's tensors; never knows requests or scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

import kernels


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The step's attention tensors, the same for every layer. B sequences, T tokens, sequences of one token first.

    The first `num_decodes` sequences have exactly one query token, so token i belongs to sequence i for i < num_decodes.
    """

    num_decodes: int
    rows: Tensor  # [B] int32: sequence i's block table is block_tables[rows[i]]
    block_tables: Tensor  # [R, max_blocks] int32
    query_start: Tensor  # [B + 1] int32: sequence i's tokens are [query_start[i], query_start[i + 1])
    context_lens: Tensor  # [B] int32: tokens in the context, this step's included; 0: a padding row
    slot_mapping: Tensor  # [T] int64: where each token's K and V go; -1: nowhere
    decode_plan: kernels.DecodePlan | None = (
        None  # the work map of the decode kernel, made once per step; None on a CPU
    )
    prefill_tiles: Tensor | None = (
        None  # [N, 2] int32 (sequence, first query), the prefill kernel's grid; None on a CPU
    )


class _Options(TypedDict):
    scale: float
    window: int
    soft_cap: float
    alibi_slopes: Tensor | None
    kv_scale: Tensor | None


def attend(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """Attention of the step's tokens over their paged contexts, whose K and V are already stored.

    query [T, H, D], kv_cache [2, num_blocks, num_kv_heads, block_size, D] -> [T, H, D]. kv_scale [2, num_kv_heads] float32
    for an e4m3 cache, else None.
    """
    key_cache, value_cache = kv_cache[0], kv_cache[1]
    options = _Options(scale=scale, window=window, soft_cap=soft_cap, alibi_slopes=alibi_slopes, kv_scale=kv_scale)
    m, n = metadata, metadata.num_decodes
    out = torch.empty_like(query)
    if n:
        kernels.paged_attention_decode(
            query[:n], key_cache, value_cache, m.block_tables, m.rows[:n], m.context_lens[:n],
            plan=m.decode_plan, out=out[:n], **options,
        )  # fmt: skip
    if n < len(m.rows):
        kernels.paged_attention_prefill(
            query, key_cache, value_cache, m.block_tables, m.rows[n:], m.query_start[n:], m.context_lens[n:],
            tiles=m.prefill_tiles, out=out, **options,
        )  # fmt: skip
    return out
