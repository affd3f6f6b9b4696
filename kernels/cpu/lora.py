"""LoRA on a CPU: GEMMs by PyTorch in the dtype of the weights, one adapter after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.elementwise import gate_and_mul
from kernels.cpu.matmul import linear
from kernels.cpu.rotary import rms_norm
from kernels.data.activation import Gate
from kernels.data.lora import AdapterTokens, LoraWeights
from kernels.data.quantized_weight import Weight


def lora_add(y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> Tensor:
    """See `kernels.reference.lora_add`."""
    rank = weights.rank
    for slot, some in tokens.by_slot:
        own = x if some is None else x[some]
        inner = own @ weights.down[slot].T
        change = torch.cat(
            [
                inner[:, group * rank : (group + 1) * rank] @ weights.up[slot, start:stop].T
                for start, stop, group in weights.groups
            ],
            1,
        )
        result = torch.addcmul(weights.shift[slot] + change, y if some is None else y[some], weights.factor[slot])
        if some is None:
            y.copy_(result)
        else:
            y[some] = result.to(y.dtype)
    return y


def adapted_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    lora: LoraWeights,
    tokens: AdapterTokens,
    *,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.adapted_linear`."""
    value = x if norm is None else rms_norm(x, *norm)
    y = lora_add(linear(value, weight, bias), value, lora, tokens)
    if gate is not None:
        y = gate_and_mul(y, gate)
    return y if residual is None else residual.add_(y)
