"""Gates, and norms with gates, by the CPU's own kernel, so that steps can be captured."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.cpu.elementwise import FLOATS, sigmoid
from kernels.cpu.library import library
from kernels.cpu.rotary import rms_norm
from kernels.data.activation import Activation

KINDS = ("silu", "sigmoid", "relu", "relu2", "gelu_tanh")  # `Activation` in gates.cpp


class _Struct(ctypes.Structure):
    """`Gated` in gates.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "groups", "n", "x_stride", "gate_stride", "weight_stride")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("activation", "is_bf16", "wide_weight", "gate_first", "rounds")),
    )


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm of groups of `width` numbers. weight: [width] of each group, or [n] of all."""

    weight: Tensor
    eps: float
    width: int
    of_all: bool = False
    gate_first: bool = False  # the norm is that of x, gated


def gated(x: Tensor, gate: Tensor, kind: Literal["silu", "sigmoid"], rounded: bool = False) -> Tensor:
    """See `kernels.reference.gated`."""
    if _is_native(x, gate):
        return _run(x, gate, kind, None, rounds=rounded)
    if rounded and kind == "sigmoid":
        return x.mul_(sigmoid(gate.clone()))
    return reference.gated(x, gate, kind, rounded)


def activation(x: Tensor, kind: Activation) -> Tensor:
    """See `kernels.reference.activation`."""
    if kind not in KINDS or x.dim() != 2 or not _is_native(x):
        return reference.activation(x, kind)
    return _run(x, None, kind, None)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.gated_rms_norm`."""
    flat = x.flatten(1)
    if _is_native(flat, gate, weight=weight):
        return _run(flat, gate, "silu", _Norm(weight, eps, x.shape[2]), rounds=True)
    normed = rms_norm(x.flatten(0, 1), weight, eps).view(x.shape).flatten(1)
    return F.silu(gate.float(), inplace=False).mul_(normed).to(x.dtype)


def grouped_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, gate_first: bool) -> Tensor:
    """See `kernels.reference.grouped_rms_norm`."""
    width = x.shape[1] // num_groups
    if _is_native(x, gate, weight=weight):
        return _run(x, gate, "silu", _Norm(weight, eps, width, of_all=True, gate_first=gate_first))
    scale = F.silu(gate.float())
    wide = x * scale if gate_first else x.float()
    normed = F.rms_norm(wide.unflatten(1, (num_groups, -1)), (width,), eps=eps).flatten(1).mul_(weight)
    return (normed if gate_first else normed.mul_(scale)).to(x.dtype)


def _is_native(x: Tensor, gate: Tensor | None = None, *, weight: Tensor | None = None) -> bool:
    """x [T, n] is contiguous; rows of gate [T, n] may be parts of longer ones."""
    return (
        library() is not None
        and x.dtype in FLOATS
        and x.is_contiguous()
        and (gate is None or (gate.dtype == x.dtype and gate.shape == x.shape and gate.stride(1) == 1))
        and (weight is None or (weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()))
    )


def _run(x: Tensor, gate: Tensor | None, kind: Activation, norm: _Norm | None, *, rounds: bool = False) -> Tensor:
    """Call `quire_gated`."""
    native = library()
    assert native is not None
    weight, n = (None, x.shape[1]) if norm is None else (norm.weight, norm.width)
    out = torch.empty_like(x)
    tensors = x, gate, weight, out
    struct = _Struct(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        len(x), x.shape[1] // n if n else 0, n, x.stride(0), 0 if gate is None else gate.stride(0),
        n if norm is not None and norm.of_all else 0, 0.0 if norm is None else norm.eps, KINDS.index(kind),
        x.dtype == torch.bfloat16, weight is not None and weight.dtype == torch.float32,
        norm is not None and norm.gate_first, rounds,
    )  # fmt: skip
    native.call("quire_gated", struct, tensors)
    return out
