"""Paged attention that reads the KV cache in place, by the CPU's own kernels; what they do not know, by PyTorch's."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu import attention
from kernels.cpu.library import LANES, library
from kernels.data.block_sparse import BlockSparse
from kernels.data.quantized_rows import QuantizedRows


class _Struct(ctypes.Structure):
    """`Attention` in attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "tables", "rows", "starts", "lens")),
        *((name, ctypes.c_void_p) for name in ("slopes", "sinks")),
        *(
            (name, ctypes.c_int64)
            for name in ("query_stride", "out_stride", "table_stride", "block_stride", "head_stride")
        ),
        *((name, ctypes.c_int32) for name in ("seqs", "heads", "kv_heads", "head_dim", "block_size", "window")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    )


def paged_attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sparse: BlockSparse | None = None,
    kv_scale: Tensor | None = None,
    plan: object = None,
    out: Tensor | QuantizedRows | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_decode`."""
    assert not isinstance(out, QuantizedRows)
    if sparse is not None or kv_scale is not None or not _is_native(query, key_cache, value_cache):
        return attention.paged_attention_decode(
            query, key_cache, value_cache, block_tables, rows, context_lens, scale=scale, window=window,
            soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, sparse=sparse, kv_scale=kv_scale, plan=plan, out=out,
        )  # fmt: skip
    out = torch.empty_like(query) if out is None else out
    _attend(
        query, key_cache, value_cache, out, block_tables, rows, None, context_lens, alibi_slopes, sinks, scale, window,
        soft_cap,
    )  # fmt: skip
    return out


def paged_attention_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sparse: BlockSparse | None = None,
    kv_scale: Tensor | None = None,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_prefill`."""
    if sparse is not None or kv_scale is not None or not _is_native(query, key_cache, value_cache):
        return attention.paged_attention_prefill(
            query, key_cache, value_cache, block_tables, rows, query_start, context_lens, scale=scale, window=window,
            soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, sparse=sparse, kv_scale=kv_scale, tiles=tiles, out=out,
        )  # fmt: skip
    out = torch.zeros_like(query) if out is None else out
    _attend(
        query, key_cache, value_cache, out, block_tables, rows, query_start, context_lens, alibi_slopes, sinks, scale,
        window, soft_cap,
    )  # fmt: skip
    return out


def _is_native(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    head_dim = key_cache.shape[3]
    return (
        query.dtype in (torch.float32, torch.bfloat16)
        and query.dtype == key_cache.dtype
        and head_dim % LANES == 0
        and key_cache.stride() == value_cache.stride()
        and key_cache.stride()[2:] == (head_dim, 1)
        and query.stride()[1:] == (head_dim, 1)
        and library() is not None
    )


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start: Tensor | None,
    context_lens: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """`quire_attention` in attention.cpp."""
    native, integers = library(), (block_tables, rows, context_lens)
    assert native is not None
    assert all(tensor.dtype == torch.int32 and tensor.stride(-1) == 1 for tensor in integers)
    assert query_start is None or query_start.dtype == torch.int32
    assert out.stride()[1:] == query.stride()[1:]
    slopes, sinks = (None if x is None else x.float().contiguous() for x in (slopes, sinks))
    pointers = (query, key_cache, value_cache, out, block_tables, rows, query_start, context_lens, slopes, sinks)
    struct = _Struct(
        *(None if tensor is None else tensor.data_ptr() for tensor in pointers),
        query.stride(0), out.stride(0), block_tables.stride(0), key_cache.stride(0), key_cache.stride(1),
        rows.shape[0], query.shape[1], key_cache.shape[1], query.shape[2], key_cache.shape[2], window, scale, soft_cap,
        query.dtype == torch.bfloat16,
    )  # fmt: skip
    native.call("quire_attention", struct, pointers)
