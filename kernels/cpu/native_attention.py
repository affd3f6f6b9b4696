"""Paged attention that reads the KV cache in place, by the CPU's own kernels; what they do not know, by PyTorch's."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu import attention
from kernels.cpu.library import library
from kernels.data.attention import AttentionArgs, KnownArgs, PagedContext
from kernels.data.quantized_rows import QuantizedRows

KNOWN = KnownArgs("window", "soft_cap", "alibi_slopes", "sinks", "sparse", "kv_scale", "causal", "distance_bias")
TILE_KEYS = 64  # `KEYS` in attention.cpp


class _Struct(ctypes.Structure):
    """`Attention` in attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "tables", "rows", "starts", "lens")),
        *((name, ctypes.c_void_p) for name in ("slopes", "sinks", "kv_scale", "distance_bias")),
        *(
            (name, ctypes.c_int64)
            for name in ("query_stride", "out_stride", "table_stride", "block_stride", "head_stride")
        ),
        *((name, ctypes.c_int32) for name in ("seqs", "heads", "kv_heads", "head_dim", "block_size", "window")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
        ("is_fp8", ctypes.c_int32),
        ("is_causal", ctypes.c_int32),
        *((f"sparse_{name}", ctypes.c_int32) for name in ("block", "local", "stride", "step", "first")),
        ("reach", ctypes.c_int32),
    )


def paged_attention_decode(
    query: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    plan: object = None,
    out: Tensor | QuantizedRows | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_decode`."""
    assert not isinstance(out, QuantizedRows)
    if not is_native(query, context, args, 1):
        return attention.paged_attention_decode(query, context, args, plan=plan, out=out)
    out = torch.empty_like(query) if out is None else out
    attend(query, None, context, args, out)
    return out


def paged_attention_prefill(
    query: Tensor,
    query_start: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_prefill`."""
    if not is_native(query, context, args, query.shape[0]):
        return attention.paged_attention_prefill(query, query_start, context, args, tiles=tiles, out=out)
    out = torch.zeros_like(query) if out is None else out
    attend(query, query_start, context, args, out)
    return out


def is_native(query: Tensor, context: PagedContext, args: AttentionArgs, num_tokens: int) -> bool:
    """Return whether the CPU's own kernel computes the attention of so many tokens."""
    key_cache, value_cache, sparse = context.key_cache, context.value_cache, args.sparse
    head_dim = key_cache.shape[3]
    return (
        KNOWN.cover(args)
        and (sparse is None or (sparse.block % TILE_KEYS == 0 and args.causal and not args.window))
        and query.dtype in (torch.float32, torch.bfloat16)
        and key_cache.dtype in (query.dtype, torch.float8_e4m3fn)
        and key_cache.stride() == value_cache.stride()
        and key_cache.stride()[2:] == (head_dim, 1)
        and query.stride()[1:] == (head_dim, 1)
        and (native := library()) is not None
        and head_dim % native.layout.lanes == 0
        # PyTorch computes the blocks that a head does not see as well, and no biases.
        and (
            sparse is not None
            or args.distance_bias is not None
            or not native.choices.takes_pytorch("attention", query.dtype, num_tokens)
        )
    )


def attend(query: Tensor, query_start: Tensor | None, context: PagedContext, args: AttentionArgs, out: Tensor) -> None:
    """Call `quire_attention` in attention.cpp."""
    native = library()
    assert native is not None
    native.call("quire_attention", *_arguments(query, query_start, context, args, out))


def num_shared_keys(query: Tensor, context: PagedContext, args: AttentionArgs, most: int) -> int:
    """Return how often a key of a sequence need not be read again in a decode step, as others have it, too, if up to
    `most` sequences share a tile.
    """
    native = library()
    assert native is not None
    struct, _ = _arguments(query, None, context, args, query)
    count = native.functions.quire_shared_keys
    count.restype, count.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_int64)
    found: int = count(ctypes.byref(struct), most)
    return found


def _arguments(
    query: Tensor, query_start: Tensor | None, context: PagedContext, args: AttentionArgs, out: Tensor
) -> tuple[_Struct, tuple[Tensor | None, ...]]:
    """Return the arguments, and the tensors to which they point."""
    keys, tables, rows, lens = context.key_cache, context.block_tables, context.rows, context.lens
    assert all(tensor.dtype == torch.int32 and tensor.stride(-1) == 1 for tensor in (tables, rows, lens))
    assert query_start is None or query_start.dtype == torch.int32
    assert out.stride()[1:] == query.stride()[1:]
    slopes, sinks = (None if x is None else x.float().contiguous() for x in (args.alibi_slopes, args.sinks))
    kv_scale = None if args.kv_scale is None else args.kv_scale.float().contiguous()
    bias = None if args.distance_bias is None else args.distance_bias.float().contiguous()
    pointers = (query, keys, context.value_cache, out, tables, rows, query_start, lens, slopes, sinks, kv_scale, bias)
    struct = _Struct(
        *(None if tensor is None else tensor.data_ptr() for tensor in pointers),
        query.stride(0), out.stride(0), tables.stride(0), keys.stride(0), keys.stride(1), rows.shape[0], query.shape[1],
        keys.shape[1], query.shape[2], keys.shape[2], args.window, args.scale, args.soft_cap,
        query.dtype == torch.bfloat16, keys.dtype == torch.float8_e4m3fn, args.causal,
        *((0,) * 5 if args.sparse is None else args.sparse.constants),
        0 if bias is None else bias.shape[1] // 2,
    )  # fmt: skip
    return struct, pointers
