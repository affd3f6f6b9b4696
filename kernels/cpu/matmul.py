"""Matrix products by oneDNN over packed weights, where that pays; else by PyTorch."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from kernels import reference
from kernels.quantized_weight import Weight
from kernels.reference import rms_norm, silu_and_mul

_onednn = torch.ops.mkldnn
PACKED_FOR = 16  # tokens that weights are packed for: about the best blocks for fewer, and for many more


def pack_weight(weight: Tensor) -> Tensor:
    """See `kernels.reference.pack_weight`.

    On x86 CPUs oneDNN's products over packed weights are an eighth faster than PyTorch's for one token, twice as fast for 16.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _onednn._is_mkldnn_bf16_supported()):
        return _onednn._reorder_linear_weight(weight, PACKED_FOR)
    return weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear`."""
    if isinstance(weight, Tensor) and weight.is_mkldnn:
        return _onednn._linear_pointwise(x, weight, bias, "none", [], "")
    return reference.linear(x, weight, bias)


def linear_add(residual: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear_add`."""
    if isinstance(weight, Tensor) and weight.is_mkldnn:
        return residual.copy_(_onednn._linear_pointwise.binary(x, residual, weight, bias, "add"))
    return reference.linear_add(residual, x, weight, bias)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.norm_linear`."""
    result = linear(rms_norm(x, norm_weight, eps), weight, bias)
    return result if out is None else out.copy_(result)


def norm_swiglu(x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.norm_swiglu`."""
    return silu_and_mul(norm_linear(x, norm_weight, eps, weight, bias))
