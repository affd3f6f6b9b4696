"""The experts of a mixture by the CPU's own products: of each expert that was chosen, all its tokens together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.matmul import linear, swiglu
from kernels.cpu.packed_weight import NativeWeight
from kernels.cpu.rotary import rms_norm
from kernels.data.moe import ExpertActivation
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import Weight
from kernels.reference.moe import activate


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: ExpertActivation = "silu",
    add_to: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """See `kernels.reference.experts`."""
    if not (isinstance(gate_up, NativeWeight) and isinstance(down, NativeWeight)):
        return reference.experts(
            x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation, add_to=add_to, first=first
        )
    parts = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32)
    local = ids - first
    for expert in local.unique().tolist():
        if not 0 <= expert < len(gate_up.stack):
            continue
        token, choice = (local == expert).nonzero(as_tuple=True)
        matrix, bias = gate_up.stack[expert], None if gate_up_bias is None else gate_up_bias[expert]
        if activation == "silu":
            inner = swiglu(x[token], matrix, bias)
        else:
            inner = activate(linear(x[token], matrix, bias), activation)
        bias = None if down_bias is None else down_bias[expert]
        parts[token, choice] = linear(inner, down.stack[expert], bias).float()
    result = torch.bmm(weights.float()[:, None, :], parts)[:, 0]
    return result.to(x.dtype) if add_to is None else add_to.copy_(result + add_to)


def experts_add_norm(
    residual: Tensor, norm: NextNorm, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, *others: Any,
    first: int = 0, **options: Any,
) -> Tensor | QuantizedRows:  # fmt: skip
    """See `kernels.reference.experts_add_norm`."""
    assert norm.rounded is None
    experts(x, ids, weights, gate_up, *others, **{"add_to": residual, "first": first, **options})
    return rms_norm(residual, norm.weight, norm.eps)
