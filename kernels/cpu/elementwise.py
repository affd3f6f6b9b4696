"""Elementwise operations between the GEMMs of some families, by the CPU's own kernels, so that steps can be
captured.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.library import library
from kernels.cpu.rotary import rms_norm
from kernels.data.activation import Gate

FLOATS = (torch.float32, torch.bfloat16)


class _Struct(ctypes.Structure):
    """`Elementwise` in elementwise.cpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("factor", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    )


def gate_and_mul(x: Tensor, gate: Gate) -> Tensor:
    """See `kernels.reference.gate_and_mul`."""
    if not _is_native(x):
        return reference.gate_and_mul(x, gate)
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return _run("quire_silu_and_mul" if gate == "silu" else "quire_gelu_and_mul", x, out)


def sigmoid(x: Tensor) -> Tensor:
    """See `kernels.reference.sigmoid`.

    PyTorch's sigmoid differs in the last bit between vectors and the rest of a tensor, so that a token's would depend
    on how many there are; its softmax computes each row in the same way.
    """
    return x.copy_(torch.stack([x, torch.zeros_like(x)], -1).softmax(-1)[..., 0])


def add_scaled(residual: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
    """See `kernels.reference.add_scaled`."""
    if not _is_native(residual, x):
        return reference.add_scaled(residual, x, factor)
    return _run("quire_add_scaled", x, residual, factor)


def rms_norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """See `kernels.reference.rms_norm_add`."""
    return add_scaled(residual, rms_norm(x, weight, eps), factor)


def add_rms_norm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    x_weight: Tensor | None = None,
    x_eps: float = 0.0,
    factor: float = 1.0,
) -> Tensor:
    """See `kernels.reference.add_rms_norm`."""
    if x_weight is None:
        add_scaled(residual, x, factor)
    else:
        rms_norm_add(residual, x, x_weight, x_eps, factor)
    return rms_norm(residual, weight, eps)


def scale(x: Tensor, factor: float = 1.0, cap: float = 0.0) -> Tensor:
    """See `kernels.reference.scale`. Rows of x may be parts of longer ones."""
    if not (_is_native(x) or (x.dim() == 2 and x.stride(1) == 1 and _is_native(x[:0]))):
        return reference.scale(x, factor, cap)
    return _run("quire_scale", x, x, factor, cap)


def to_floats(x: Tensor) -> Tensor:
    """Return x [T, n] in float32."""
    if x.dtype != torch.bfloat16 or not _is_native(x):
        return x.float()
    return _run("quire_to_floats", x, x.new_empty(x.shape, dtype=torch.float32))


def _is_native(*tensors: Tensor) -> bool:
    dtype = tensors[0].dtype
    return library() is not None and dtype in FLOATS and all(x.dtype == dtype and x.is_contiguous() for x in tensors)


def _run(name: str, x: Tensor, out: Tensor, factor: float = 1.0, cap: float = 0.0) -> Tensor:
    native, n = library(), out.shape[-1]
    assert native is not None
    rows = out.numel() // n if n else 0
    stride = n if out.is_contiguous() else out.stride(0)
    struct = _Struct(x.data_ptr(), out.data_ptr(), rows, n, stride, factor, cap, x.dtype == torch.bfloat16)
    native.call(name, struct, (x, out))
    return out
