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
    kv_scale: Tensor | None


class _Rope(TypedDict):
    num_heads: int
    num_kv_heads: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def attend(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """Norm and rotate the step's queries and keys, store its keys and values, attend to the paged contexts -> [T, H, D].

    qkv [T, (H + 2 * Hkv) * D], positions [T], cos_sin as in `kernels.reference.rope`; kv_cache [2, num_blocks, Hkv,
    block_size, D], an e4m3 one with kv_scale [2, Hkv] float32.
    """
    key_cache, value_cache = kv_cache[0], kv_cache[1]
    options = _Options(scale=scale, window=window, soft_cap=soft_cap, kv_scale=kv_scale)
    rope = _Rope(num_heads=num_heads, num_kv_heads=key_cache.shape[1], q_norm=q_norm, k_norm=k_norm, eps=eps)
    m, n = metadata, metadata.num_decodes
    if n == len(m.rows) and m.decode_plan is not None:
        return kernels.rope_and_decode(
            qkv, cos_sin, key_cache, value_cache, m.block_tables, m.rows, m.context_lens,
            plan=m.decode_plan, **rope, **options,
        )  # fmt: skip
    query = kernels.rope_and_store(
        qkv, positions, cos_sin, key_cache, value_cache, m.slot_mapping, kv_scale=kv_scale, **rope
    )
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
