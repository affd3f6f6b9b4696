"""Linear layers on CUDA devices: chooses the kernel for float weights, and leaves quantised ones to `quantized_linear`.

A linear layer of a few tokens is bound by reading its weight, and a decode step by its number of kernels. So up to
`CHOICE.small_batch_tokens` tokens, one kernel computes the GEMM with its norm, activation or residual sum fused.
Beyond, cuBLAS is faster, with kernels of their own before and after it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cuda import quantized_linear
from kernels.cuda.choice import CHOICE, GLUON
from kernels.data.activation import Gate
from kernels.data.fusion import NOTHING, Fusion
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.triton import small_linear
from kernels.triton.activation import gate_and_mul
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.scaled import finish_norm

if GLUON:
    from kernels.gluon.linear import small_batch


def linear(x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.linear(x, weight, bias)
    assert isinstance(x, Tensor)
    out = _fused(x, weight, bias, NOTHING)
    return F.linear(x, weight, bias) if out is None else out


def linear_add(residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear_add`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.linear_add(residual, x, weight, bias)
    assert isinstance(x, Tensor)
    if _fused(x, weight, bias, Fusion(residual=residual)) is not None:
        return residual
    residual = residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def linear_add_norm(
    residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None, norm: NextNorm
) -> Tensor | QuantizedRows:
    """See `kernels.reference.linear_add_norm`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.linear_add_norm(residual, x, weight, bias, norm)
    assert isinstance(x, Tensor)
    if norm.rounded is None and len(x) <= CHOICE.add_norm_tokens and norms_apart(x, weight):
        return add_rms_norm(residual, F.linear(x, weight, bias), norm.weight, norm.eps)
    return finish_norm(linear_add(residual, x, weight, bias), norm)


def linear_gated(x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu") -> Tensor:
    """See `kernels.reference.linear_gated`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.linear_gated(x, weight, bias, gate)
    assert isinstance(x, Tensor)
    out = _fused(x, weight, bias, Fusion(gate=gate))
    return gate_and_mul(F.linear(x, weight, bias), gate) if out is None else out


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.norm_linear`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.norm_linear(x, norm_weight, eps, weight, bias, out)
    fused = _fused(x, weight, bias, Fusion(norm_weight, eps, out=out))
    if fused is not None:
        return fused
    normed = rms_norm(x, norm_weight, eps)
    if out is None:
        return F.linear(normed, weight, bias)
    return torch.mm(normed, weight.t(), out=out) if bias is None else torch.addmm(bias, normed, weight.t(), out=out)


def norm_gated(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu"
) -> Tensor:
    """See `kernels.reference.norm_gated`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.norm_gated(x, norm_weight, eps, weight, bias, gate)
    out = _fused(x, weight, bias, Fusion(norm_weight, eps, gate))
    return gate_and_mul(F.linear(rms_norm(x, norm_weight, eps), weight, bias), gate) if out is None else out


def norms_apart(x: Tensor, weight: Weight, gate: Gate | None = None) -> bool:
    """See `kernels.reference.norms_apart`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.norms_apart(x, weight, gate)
    n = len(weight) if gate is None else len(weight) // 2
    return len(x) > CHOICE.cuda_core_tokens and small_batch_config(x, n, gate is not None) is None


def quantized_input(
    x: Tensor, weight: Weight, bias: Tensor | None = None, gate: Gate | None = None
) -> QuantizedRows | None:
    """See `kernels.reference.quantized_input`."""
    return quantized_linear.quantized_input(x, weight, bias, gate) if isinstance(weight, QuantizedWeight) else None


def small_batch_config(x: Tensor, n: int, gated: bool) -> small_batch.Config | None:
    """Return how Gluon's small-batch kernel computes x [M, K] times a float weight of n outputs; None: it does not."""
    if GLUON and len(x) <= CHOICE.small_batch_tokens and n <= CHOICE.small_batch_outputs and small_batch.supports(x):
        return _small_batch_config(n, x.shape[1], gated, len(x) > 8)
    return None


@functools.cache
def _small_batch_config(n: int, k: int, gated: bool, more_than_8: bool) -> small_batch.Config | None:
    if (n, k, gated) in small_batch.MEASURED:
        return small_batch.MEASURED[n, k, gated][more_than_8]
    if more_than_8 and n * k * (1 + gated) > CHOICE.small_batch_weight:
        return None
    return small_batch.config(n, k, gated)


def _fused(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion) -> Tensor | None:
    """Compute x [M, K] -> [M, N] in one kernel; None where cuBLAS is faster."""
    config = small_batch_config(x, fusion.num_outputs(len(weight)), fusion.gate is not None)
    if config is None and len(x) > CHOICE.cuda_core_tokens:
        return None
    out = fusion.into(x, len(weight))
    assert x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous()
    if config is None:
        small_linear.launch(x, weight, bias, out, fusion)
    else:
        small_batch.launch(x, weight, bias, out, config, fusion)
    return out
