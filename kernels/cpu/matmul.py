"""GEMMs by the CPU's own kernels; without them by oneDNN over packed weights; else by PyTorch."""

from __future__ import annotations

import ctypes
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.cpu.each_row import alone
from kernels.cpu.elementwise import FLOATS, gate_and_mul
from kernels.cpu.library import layout, library
from kernels.cpu.packed_weight import NativeWeight, pack_codes, pack_floats, pack_stack, unpacked
from kernels.cpu.rotary import rms_norm
from kernels.data.activation import Gate
from kernels.data.forms import FORMS
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.reference import silu_and_mul

_onednn = torch.ops.mkldnn
PACKED_FOR = 16  # tokens that oneDNN packs weights for: about the best blocks for fewer, and for many more
STORE, ADD, SWIGLU = range(3)  # what becomes of a result: `Then` in products.cpp


class _Struct(ctypes.Structure):
    """`Product` in products.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "norm", "bias", "out")),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("channels", "tokens", "then")),
        ("eps", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
        ("wide_norm", ctypes.c_int32),
    )


def pack_weight(weight: Weight) -> Weight:
    """See `kernels.reference.pack_weight`."""
    codes = weight if isinstance(weight, Tensor) else weight.codes
    if library() is not None:
        if codes.dim() == 3:
            packed = pack_stack(weight)
        else:
            packed = pack_codes(weight) if isinstance(weight, QuantizedWeight) else pack_floats(_tensor(weight))
        if packed is not None:
            return packed
    if isinstance(weight, Tensor) and weight.dim() == 2 and _onednn_multiplies(weight.dtype):
        return _onednn._reorder_linear_weight(weight, PACKED_FOR)
    return weight


def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """On x86 CPUs its products of packed weights are an eighth faster than PyTorch's for one token, twice as fast for
    16.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _onednn._is_mkldnn_bf16_supported())


def _tensor(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear`."""
    if isinstance(weight, NativeWeight):
        return _product(x, weight, bias, x.new_empty(x.shape[0], weight.num_rows))
    if isinstance(weight, Tensor) and weight.is_mkldnn:
        return _onednn._linear_pointwise(x, weight, bias, "none", [], "")
    if FORMS.deterministic:
        return alone(lambda row: reference.linear(row, weight, bias), x)
    return reference.linear(x, weight, bias)


def swiglu(x: Tensor, weight: NativeWeight, bias: Tensor | None) -> Tensor:
    """silu(gate) * up [T, N]; gate and up are the halves of linear(x [T, K], weight [2N, K], bias [2N])."""
    if _fuses_swiglu(weight):
        return _product(x, weight, bias, x.new_empty(len(x), weight.num_rows // 2), then=SWIGLU)
    return gate_and_mul(linear(x, weight, bias), "silu")


def _fuses_swiglu(weight: NativeWeight) -> bool:
    """Return True if the activation is fused with the GEMM, where the gate is not rounded before. A deterministic
    form has one rounding for whatever part of the rows a rank holds.
    """
    return weight.num_rows % (2 * layout().tile_rows) == 0 and not FORMS.deterministic


def linear_add(residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear_add`."""
    assert isinstance(x, Tensor)
    if isinstance(weight, NativeWeight):
        return _product(x, weight, bias, residual, then=ADD)
    if isinstance(weight, Tensor) and weight.is_mkldnn:
        return residual.copy_(_onednn._linear_pointwise.binary(x, residual, weight, bias, "add"))
    if FORMS.deterministic:
        return residual.add_(linear(x, weight, bias))
    return reference.linear_add(residual, x, weight, bias)


def linear_add_norm(
    residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None, norm: NextNorm
) -> Tensor | QuantizedRows:
    """See `kernels.reference.linear_add_norm`."""
    assert norm.rounded is None
    return rms_norm(linear_add(residual, x, weight, bias), norm.weight, norm.eps)


def linear_gated(x: Tensor, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu") -> Tensor:
    """See `kernels.reference.linear_gated`."""
    if gate == "silu" and isinstance(weight, NativeWeight):
        return swiglu(x, weight, bias)
    return gate_and_mul(linear(x, weight, bias), gate)


def norms_apart(x: Tensor, weight: Weight, gate: Gate | None = None) -> bool:
    """See `kernels.reference.norms_apart`."""
    return not isinstance(weight, NativeWeight)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.norm_linear`."""
    if isinstance(weight, NativeWeight):
        out = x.new_empty(x.shape[0], weight.num_rows) if out is None else out
        return _product(x, weight, bias, out, norm=norm_weight, eps=eps)
    result = linear(rms_norm(x, norm_weight, eps), weight, bias)
    return result if out is None else out.copy_(result)


def norm_gated(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu"
) -> Tensor:
    """See `kernels.reference.norm_gated`."""
    if gate == "silu" and isinstance(weight, NativeWeight) and _fuses_swiglu(weight):
        out = x.new_empty(x.shape[0], weight.num_rows // 2)
        return _product(x, weight, bias, out, then=SWIGLU, norm=norm_weight, eps=eps)
    return gate_and_mul(norm_linear(x, norm_weight, eps, weight, bias), gate)


def _product(
    x: Tensor,
    weight: NativeWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    then: int = STORE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute into `out`, by the faster of the C++ kernels and PyTorch."""
    native = library()
    assert native is not None
    is_chosen = native.choices.takes_pytorch("products", weight.kind, len(x))
    return (multiply_by_pytorch if is_chosen else multiply)(x, weight, bias, out, then=then, norm=norm, eps=eps)


def multiply_by_pytorch(
    x: Tensor,
    weight: NativeWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    then: int = STORE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`multiply` by PyTorch, with the threads that the C++ kernels have, over a copy of the weight in plain order."""
    native, num_threads = library(), torch.get_num_threads()
    assert native is not None
    torch.set_num_threads(native.num_threads)
    try:
        x = x if norm is None else rms_norm(x, norm, eps)
        plain = unpacked(weight) if weight.dtype in FLOATS else unpacked(weight).to(x.dtype)
        result = F.linear(x.to(plain.dtype), plain, None if bias is None else bias.to(plain.dtype))
        if then == ADD:
            return out.add_(result)
        return out.copy_(silu_and_mul(result) if then == SWIGLU else result)
    finally:
        torch.set_num_threads(num_threads)


def multiply(
    x: Tensor,
    weight: NativeWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    then: int = STORE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`quire_product` in products.cpp, into `out`."""
    assert x.shape[1] == weight.num_channels
    assert x.stride(1) == out.stride(1) == 1
    assert x.dtype == out.dtype
    is_bf16 = x.dtype == torch.bfloat16
    assert is_bf16 or x.dtype == torch.float32
    assert bias is None or bias.dtype == x.dtype
    assert norm is None or norm.dtype in (x.dtype, torch.float32)
    others = (x, norm, bias, out)
    struct = _Struct(
        ctypes.addressof(weight.struct), *(None if tensor is None else tensor.data_ptr() for tensor in others),
        x.stride(0), out.stride(0), x.shape[1], x.shape[0], then, eps, is_bf16,
        norm is not None and norm.dtype == torch.float32,
    )  # fmt: skip
    native = library()
    assert native is not None
    native.call("quire_product", struct, (weight, *others))
    return out
