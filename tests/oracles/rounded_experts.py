"""Experts whose products are of codes: x, and what is between both products, rounded to e4m3 as the products round
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import Gate, QuantizedWeight, reference


def rounded(x: Tensor, group: int) -> Tensor:
    """x [M, K] in float64, rounded to e4m3 with a scale for each group of channels."""
    codes, scale = reference.quantize_rows(x.float().reshape(-1, group), torch.float8_e4m3fn)
    return (codes.double() * scale.double()).reshape(x.shape)


def rounded_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight,
    activation: Gate = "silu", first: int = 0,
) -> Tensor:  # fmt: skip
    """`reference.experts` in float64 [tokens, hidden]; ids are of experts from `first` on."""
    total = torch.zeros(len(x), down.codes.shape[1], dtype=torch.float64, device=x.device)
    x = rounded(x, gate_up.group)
    for expert in range(len(gate_up)):
        tokens, chosen = (ids == first + expert).nonzero(as_tuple=True)
        if len(tokens):
            both = x[tokens] @ _exact(gate_up[expert]).T
            inner = rounded(reference.gate_and_mul(both, activation), down.group)
            total.index_add_(0, tokens, inner @ _exact(down[expert]).T * weights[tokens, chosen, None].double())
    return total


def _exact(weight: QuantizedWeight) -> Tensor:
    return reference.dequantize(weight.codes, weight, torch.float64)
