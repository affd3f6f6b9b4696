"""MoE on the CPU: for each expert that was chosen, one GEMM over all its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.elementwise import gate_and_mul, sigmoid
from kernels.cpu.lora import lora_add
from kernels.cpu.matmul import linear, pack_weight, swiglu
from kernels.cpu.packed_weight import NativeWeight
from kernels.cpu.rotary import rms_norm
from kernels.data.activation import ExpertActivation
from kernels.data.compressed_weight import CompressedWeight
from kernels.data.forms import FORMS
from kernels.data.lora import AdapterTokens, ExpertLora
from kernels.data.moe import Experts, RouterArgs
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import Weight
from kernels.reference.moe import activate, choose_experts, expert_linear
from kernels.reference.precision import to_wide


def pack_router(weight: Tensor) -> Tensor:
    """See `kernels.reference.pack_router`."""
    packed = pack_weight(to_wide(weight.detach()))
    assert isinstance(packed, Tensor)
    return packed


def route(x: Tensor, router: RouterArgs, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.route`. With a packed weight of float32, a token's result does not depend on others."""
    weight, bias, rule = router.weight, router.bias, router.rule
    is_packed = weight.is_mkldnn or isinstance(weight, NativeWeight)
    logits = linear(to_wide(x), weight if is_packed else to_wide(weight), None if bias is None else to_wide(bias))
    scores = logits
    if rule.scoring != "softmax_chosen":
        scores = logits.softmax(-1) if rule.scoring == "softmax" else sigmoid(logits.clone())
    return choose_experts(logits, scores, router.correction, rule, slots)


def norm_route(
    x: Tensor, norm_weight: Tensor, eps: float, router: RouterArgs, slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.reference.norm_route`."""
    normed = rms_norm(x, norm_weight, eps)
    return normed, *route(normed, router, slots)


def experts(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, add_to: Tensor | None = None) -> Tensor:
    """See `kernels.reference.experts`."""
    result = _weighted_sum(routed_outputs(x, ids, stack), weights)
    return result.to(x.dtype) if add_to is None else add_to.copy_(result + add_to)


def routed_outputs(x: Tensor, ids: Tensor, stack: Experts) -> Tensor:
    """Return the output of each expert that a token has chosen, 0 for those of other ranks: [T, k, hidden], at least
    float32.
    """
    parts = to_wide(x).new_zeros(*ids.shape, x.shape[1])
    local, down = ids - stack.first, stack.down
    num_experts = len(down.stack) if isinstance(down, NativeWeight) else len(down)
    for expert in local.unique().tolist():
        if not 0 <= expert < num_experts:
            continue
        token, choice = (local == expert).nonzero(as_tuple=True)
        inner = _gated(x[token], stack.gate_up, stack.gate_up_bias, expert, stack.activation)
        parts[token, choice] = to_wide(_linear(inner, stack.down, stack.down_bias, expert))
    return parts


def _weighted_sum(parts: Tensor, weights: Tensor) -> Tensor:
    if FORMS.deterministic:
        return (parts * weights.to(parts.dtype)[:, :, None]).cumsum(1)[:, -1]
    return torch.bmm(weights.to(parts.dtype)[:, None, :], parts)[:, 0]


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
    result = _weighted_sum(adapted_outputs(x, ids, stack, lora, tokens), weights)
    return result.to(x.dtype) if add_to is None else add_to.copy_(result + add_to)


def adapted_outputs(x: Tensor, ids: Tensor, stack: Experts, lora: ExpertLora, tokens: AdapterTokens) -> Tensor:
    """Return `routed_outputs` with each token's adapter."""
    down = stack.down
    count = len(down.stack) if isinstance(down, NativeWeight) else len(down)
    routed, local = lora.routed(ids, stack.first, count, tokens), (ids - stack.first).flatten()
    x = x.repeat_interleave(ids.shape[1], 0)
    rows = [
        (expert, (local == expert).nonzero().flatten()) for expert in local.unique().tolist() if 0 <= expert < count
    ]
    y = x.new_zeros(len(x), lora.gate_up.up.shape[1])
    for expert, at in rows:
        y[at] = _linear(x[at], stack.gate_up, stack.gate_up_bias, expert)
    inner = activate(lora_add(y, x, lora.gate_up, routed), stack.activation)
    parts = x.new_zeros(len(x), lora.down.up.shape[1])
    for expert, at in rows:
        parts[at] = _linear(inner[at], down, stack.down_bias, expert)
    return to_wide(lora_add(parts, inner, lora.down, routed)).unflatten(0, ids.shape)


def _gated(
    x: Tensor, weights: Weight | CompressedWeight, biases: Tensor | None, expert: int, activation: ExpertActivation
) -> Tensor:
    if activation == "silu" and isinstance(weights, NativeWeight):
        return swiglu(x, weights.stack[expert], None if biases is None else biases[expert])
    inner = _linear(x, weights, biases, expert)
    return gate_and_mul(inner, activation) if activation == "gelu_tanh" else activate(inner, activation)


def _linear(x: Tensor, weights: Weight | CompressedWeight, biases: Tensor | None, expert: int) -> Tensor:
    """Multiply by one matrix of a stack. One of an MoE's stacks may be packed and the other not."""
    assert not isinstance(weights, CompressedWeight)
    if isinstance(weights, NativeWeight):
        return linear(x, weights.stack[expert], None if biases is None else biases[expert])
    return expert_linear(x, weights, biases, expert)


def experts_add_norm(
    residual: Tensor, norm: NextNorm, x: Tensor, ids: Tensor, weights: Tensor, stack: Experts
) -> Tensor | QuantizedRows:
    """See `kernels.reference.experts_add_norm`."""
    assert norm.rounded is None
    experts(x, ids, weights, stack, residual)
    return rms_norm(residual, norm.weight, norm.eps)
