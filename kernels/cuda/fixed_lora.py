"""Deterministic forms of LoRA adapters on CUDA devices: one form for all steps, and tokens without an adapter as in
steps that have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.deterministic import TILE_TOKENS, expert_outputs, linear
from kernels.cuda.lora import routed_outputs
from kernels.data.activation import Gate
from kernels.data.lora import AdapterTokens, ExpertLora, LoraWeights
from kernels.data.moe import Experts
from kernels.data.quantized_weight import Weight
from kernels.triton.activation import gate_and_mul
from kernels.triton.lora import lora_add
from kernels.triton.moe import sum_experts
from kernels.triton.norm import rms_norm
from kernels.triton.pairs import sort_pairs


def fuses_adapters(x: Tensor, weight: Weight, lora: LoraWeights, gate: Gate | None = None) -> bool:
    """See `kernels.reference.fuses_adapters`."""
    return False


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


def adapted_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: Experts,
    lora: ExpertLora,
    tokens: AdapterTokens,
    add_to: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.adapted_experts`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add_to is None else add_to
    if len(x):
        parts = adapted_outputs(x, ids, weights, stack, lora, tokens)
        sum_experts(parts, ids, out, add_to is not None, stack.first, len(stack))
    return out


def adapted_outputs(
    x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, lora: ExpertLora, tokens: AdapterTokens
) -> Tensor:
    """Return `expert_outputs` with adapters: [T · k, hidden] float32. Tokens without an adapter have those without."""
    plain = expert_outputs(x, ids, weights, stack)
    if not len(x):
        return plain
    tiles = sort_pairs(ids, len(stack), stack.first, TILE_TOKENS)._replace(one_tile=True)
    parts = routed_outputs(x, ids, stack, lora, tokens, tiles).float() * weights.flatten()[:, None]
    is_adapted = (tokens.slots >= 0).repeat_interleave(ids.shape[1])
    return torch.where(is_adapted[:, None], parts, plain)
