"""RMSNorm, and the rotary embedding with the way into the KV cache, by the CPU's own kernels where they are there."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.library import library
from kernels.data.kv_cache import KVSlots, RopeArgs

FLOATS = (torch.float32, torch.bfloat16)


class _Rope(ctypes.Structure):
    """`Rope` in rope.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "query", "keys", "values", "positions", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("cos_sin", "slots")),
        *((name, ctypes.c_int64) for name in ("qkv_stride", "block_stride", "head_stride")),
        *((name, ctypes.c_int32) for name in ("tokens", "heads", "kv_heads", "head_dim", "block_size", "rotary_dim")),
        *((name, ctypes.c_int32) for name in ("interleaved", "wide_positions")),
        ("eps", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
        ("wide_norm", ctypes.c_int32),
    )


class _Norm(ctypes.Structure):
    """`Norm` in rope.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("n", "is_bf16", "wide_norm")),
        ("eps", ctypes.c_float),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.rms_norm`."""
    native = library()
    if native is None or x.dtype not in FLOATS or weight.dtype not in (x.dtype, torch.float32):
        return reference.rms_norm(x, weight, eps)
    if native.choices.takes_pytorch("norms", x.dtype, x.numel() // x.shape[-1]):
        return reference.rms_norm(x, weight, eps)
    return norm_rows(x, weight, eps)


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call `quire_rms_norm` in rope.cpp."""
    native = library()
    assert native is not None
    x = x.contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    struct = _Norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // n, n, x.dtype == torch.bfloat16,
        weight.dtype == torch.float32, eps,
    )  # fmt: skip
    native.call("quire_rms_norm", struct, (x, weight, out))
    return out


def rope_and_store(qkv: Tensor, positions: Tensor, args: RopeArgs, into: KVSlots) -> Tensor:
    """See `kernels.reference.rope_and_store`."""
    keys, values, slots, cos_sin = into.key_cache, into.value_cache, into.slots, args.cos_sin
    native, head_dim = library(), keys.shape[3]
    norms = [norm for norm in (args.q_norm, args.k_norm) if norm is not None]
    if (
        native is None
        or qkv.dtype not in FLOATS
        or any(tensor.dtype != qkv.dtype or tensor.stride()[2:] != (head_dim, 1) for tensor in (keys, values))
        or keys.stride() != values.stride()
        or any(norm.dtype not in (qkv.dtype, torch.float32) or norm.dtype != norms[0].dtype for norm in norms)
    ):
        return reference.rope_and_store(qkv, positions, args, into)
    assert qkv.stride(1) == slots.stride(0) == positions.stride(0) == 1
    assert slots.dtype == torch.int64
    num_tokens = qkv.shape[0]
    query = qkv.new_empty(num_tokens, args.num_heads, head_dim)
    tensors = (qkv, query, keys, values, positions, args.q_norm, args.k_norm, cos_sin, slots)
    struct = _Rope(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        qkv.stride(0), keys.stride(0), keys.stride(1), num_tokens, args.num_heads, args.num_kv_heads, head_dim,
        keys.shape[2], 0 if cos_sin is None else cos_sin.shape[1], args.interleaved, positions.dtype == torch.int64,
        args.eps, qkv.dtype == torch.bfloat16, bool(norms) and norms[0].dtype == torch.float32,
    )  # fmt: skip
    native.call("quire_rope_and_store", struct, tensors)
    return query
