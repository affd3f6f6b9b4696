"""GEMMs, alone and with the norm, the gated activation or the residual sum around them in a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.data.activation import Gate
from kernels.data.block_weight import BlockWeight
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.reference.activation import gate_and_mul
from kernels.reference.norm import rms_norm
from kernels.reference.quantized import dequantize


def pack_weight(weight: Weight) -> Weight:
    """weight [N, K] -> the weight in the layout that suits the device best; only the operations below may read it."""
    return weight


def pack_blocks(
    first: Tensor, others: Sequence[Tensor], kinds: Sequence[str], dtype: torch.dtype
) -> BlockWeight | None:
    """Pack blocks [n, blocks, bytes] uint8 of a GGUF file, whose types are `kinds`, below each other, for GEMMs in
    `dtype`; None: the device does not read them.
    """
    return None


def linear(x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K] (packed, or quantised), bias [N] -> x weightᵀ + bias [T, N].

    x may have been quantised before, see `quantized_input`.
    """
    assert isinstance(x, Tensor)
    if isinstance(weight, QuantizedWeight):
        weight = dequantize(weight.codes, weight, x.dtype)
    return F.linear(x, weight, bias)


def linear_add(residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """residual [T, N] += linear(x [T, K], weight [N, K], bias [N]), in place; the sum is rounded once."""
    assert isinstance(x, Tensor)
    if isinstance(weight, QuantizedWeight):
        weight = dequantize(weight.codes, weight, x.dtype)
    residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def linear_add_norm(
    residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None, norm: NextNorm
) -> Tensor | QuantizedRows:
    """`linear_add`, in place -> the norm of that [T, N]; rounded if `norm` has memory for that."""
    assert norm.rounded is None
    return rms_norm(linear_add(residual, x, weight, bias), norm.weight, norm.eps)


def linear_gated(x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu") -> Tensor:
    """silu(g) * u [T, N], or gelu(g) by tanh; g and u are the halves of linear(x [T, K], weight [2N, K], bias [2N])."""
    return gate_and_mul(linear(x, weight, bias), gate)


def norms_apart(x: Tensor, weight: Weight, gate: Gate | None = None) -> bool:
    """Return whether norm_linear(x, …, weight), or norm_gated, runs the norm in a kernel of its own (unfused).

    Then it is faster to fuse the norm into the operation before, by `add_rms_norm`, and to call `linear`.
    """
    return True


def quantized_input(
    x: Tensor, weight: Weight, bias: Tensor | None = None, gate: Gate | None = None
) -> QuantizedRows | None:
    """Memory for the norm of x [T, K] as `linear`, or with a gate `linear_gated`, takes it rounded; None: it takes it
    as it is.

    Then it is faster to round the norm with what comes before: by `linear_add_norm` or `experts_add_norm`.
    """
    return None


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """linear(rms_norm(x [T, K], norm_weight [K], eps), weight [N, K], bias [N]) -> [T, N], in `out` where that is
    given.
    """
    result = linear(rms_norm(x, norm_weight, eps), weight, bias)
    return result if out is None else out.copy_(result)


def norm_gated(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu"
) -> Tensor:
    """silu(g) * u [T, N], or gelu(g) by tanh; g and u are the halves of norm_linear(x [T, K], weight [2N, K], bias
    [2N]).
    """
    return gate_and_mul(norm_linear(x, norm_weight, eps, weight, bias), gate)
