"""MoE on the CPU: for each expert that was chosen, one GEMM over all its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.matmul import linear, swiglu
from kernels.cpu.packed_weight import NativeWeight
from kernels.cpu.rotary import rms_norm
from kernels.data.moe import Experts
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.reference.moe import activate


def experts(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, add_to: Tensor | None = None) -> Tensor:
    """See `kernels.reference.experts`."""
    gate_up, down = stack.gate_up, stack.down
    if not (isinstance(gate_up, NativeWeight) and isinstance(down, NativeWeight)):
        return reference.experts(x, ids, weights, stack, add_to)
    parts = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32)
    local = ids - stack.first
    for expert in local.unique().tolist():
        if not 0 <= expert < len(gate_up.stack):
            continue
        token, choice = (local == expert).nonzero(as_tuple=True)
        matrix, bias = gate_up.stack[expert], None if stack.gate_up_bias is None else stack.gate_up_bias[expert]
        if stack.activation == "silu":
            inner = swiglu(x[token], matrix, bias)
        else:
            inner = activate(linear(x[token], matrix, bias), stack.activation)
        bias = None if stack.down_bias is None else stack.down_bias[expert]
        parts[token, choice] = linear(inner, down.stack[expert], bias).float()
    result = torch.bmm(weights.float()[:, None, :], parts)[:, 0]
    return result.to(x.dtype) if add_to is None else add_to.copy_(result + add_to)


def experts_add_norm(
    residual: Tensor, norm: NextNorm, x: Tensor, ids: Tensor, weights: Tensor, stack: Experts
) -> Tensor | QuantizedRows:
    """See `kernels.reference.experts_add_norm`."""
    assert norm.rounded is None
    experts(x, ids, weights, stack, residual)
    return rms_norm(residual, norm.weight, norm.eps)
