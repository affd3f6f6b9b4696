"""MoE: each token's router, and the experts' MLPs that it chooses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.data.activation import CLAMP, SLOPE, UNGATED, ExpertActivation
from kernels.data.compressed_weight import CompressedWeight
from kernels.data.lora import AdapterTokens, ExpertLora, LoraWeights
from kernels.data.moe import Experts, Router, RouterArgs
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.reference.activation import gelu_and_mul, silu_and_mul
from kernels.reference.lora import lora_add
from kernels.reference.norm import rms_norm
from kernels.reference.precision import to_wide
from kernels.reference.quantized import dequantize


def pack_router(weight: Tensor) -> Tensor:
    """Return a router's weight [E, hidden] in the form in which `route` multiplies fastest."""
    return weight


def route(x: Tensor, router: RouterArgs, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each token's experts, the best first: ids [T, k] int32, and their weights [T, k] float32 (float64 for float64).

    x [T, hidden]. Logits and scores are float32. slots [T] int64: where it is -1, the token is padding, and its ids are
    -1, its weights 0.
    """
    weight, bias, rule = router.weight, router.bias, router.rule
    logits = F.linear(to_wide(x), to_wide(weight), None if bias is None else to_wide(bias))
    scores = logits
    if rule.scoring != "softmax_chosen":
        scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    return choose_experts(logits, scores, router.correction, rule, slots)


def choose_experts(
    logits: Tensor, scores: Tensor, correction: Tensor | None, rule: Router, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the result of `route` from its logits and scores [T, E]."""
    choice = (
        logits if correction is None else scores + correction
    )  # logits: not all of them differ after rounding as scores
    if rule.num_chosen_groups < rule.num_groups:
        choice = _of_best_groups(scores if correction is None else choice, rule)
    ids = _best(choice, rule.num_chosen)
    weights = scores.gather(1, ids)
    if rule.scoring == "softmax_chosen":
        weights = weights.softmax(-1)
    if rule.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * rule.scale
    if slots is not None:
        padding = (slots < 0)[:, None]
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0)
    return ids.int(), weights


def _best(scores: Tensor, count: int) -> Tensor:
    """The indices of each row's highest scores, the highest first, the lower index first among equals."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def _of_best_groups(choice: Tensor, rule: Router) -> Tensor:
    """`choice` [T, E], -inf for experts outside of the best groups."""
    groups = choice.unflatten(1, (rule.num_groups, -1))
    score = groups.amax(-1) if rule.group_score == "max" else groups.topk(2).values.sum(-1)
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(1, _best(score, rule.num_chosen_groups), True)
    return groups.masked_fill(~chosen[:, :, None], -torch.inf).flatten(1)


def norm_route(
    x: Tensor, norm_weight: Tensor, eps: float, router: RouterArgs, slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """rms_norm(x [T, hidden], norm_weight [hidden], eps), and `route` of it: normed [T, hidden], ids and weights [T,
    k].
    """
    normed = rms_norm(x, norm_weight, eps)
    return normed, *route(normed, router, slots)


def route_norms_apart(x: Tensor) -> bool:
    """Return whether norm_route(x, …) runs the norm in a kernel of its own, see `norms_apart`."""
    return True


def pack_experts(gate_up: Weight, down: Weight, dtype: torch.dtype) -> tuple[Weight, Weight]:
    """Return the weights of experts without biases in the form in which `experts` multiplies tokens of `dtype` fastest.

    Their memory may be reused.
    """
    return gate_up, down


def compress_experts(gate_up: Weight, down: Weight) -> tuple[CompressedWeight, CompressedWeight] | None:
    """Compress the weights of experts without biases, without loss: faster for a few tokens, slower for many.

    None: `experts` of this backend does not take compressed weights, or these cannot be compressed.
    """
    return None


def experts(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, add_to: Tensor | None = None) -> Tensor:
    """Return each token's weighted sum of its experts' MLPs [T, hidden], or add it to `add_to` in place.

    x [T, hidden]; ids [T, k] int32 and weights [T, k] float32 as `route` returns them. The activation is rounded to x's
    dtype. A token's experts are summed in the order of its ids in float32 (float64 for float64), and rounded once.
    """
    total = to_wide(x).new_zeros(*ids.shape, x.shape[1])
    local = ids - stack.first
    gate_up, down = stack.gate_up, stack.down
    assert not isinstance(gate_up, CompressedWeight)
    assert not isinstance(down, CompressedWeight)
    for expert in local.unique().tolist():
        if 0 <= expert < len(stack):
            token, choice = (local == expert).nonzero(as_tuple=True)
            inner = activate(expert_linear(x[token], gate_up, stack.gate_up_bias, expert), stack.activation)
            total[token, choice] = to_wide(expert_linear(inner, down, stack.down_bias, expert))
    result = (total * weights.to(total.dtype)[:, :, None]).cumsum(1)[:, -1]
    if add_to is not None:
        return add_to.copy_(result + add_to)
    return result.to(x.dtype).contiguous()


def adapted_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: Experts,
    lora: ExpertLora,
    tokens: AdapterTokens,
    add_to: Tensor | None = None,
) -> Tensor:
    """Return `experts` with each token's adapter of its experts' matrices: see `ExpertLora`."""
    assert not isinstance(stack.gate_up, CompressedWeight)
    assert not isinstance(stack.down, CompressedWeight)
    routed, local = lora.routed(ids, stack.first, len(stack), tokens), (ids - stack.first).flatten()
    x = x.repeat_interleave(ids.shape[1], 0)
    y = lora_add(_of_routed(x, stack.gate_up, stack.gate_up_bias, local, lora.gate_up), x, lora.gate_up, routed)
    inner = activate(y, stack.activation)
    parts = lora_add(_of_routed(inner, stack.down, stack.down_bias, local, lora.down), inner, lora.down, routed)
    wide = to_wide(parts).unflatten(0, ids.shape)
    result = (wide * weights.to(wide.dtype)[:, :, None]).cumsum(1)[:, -1]
    return result.to(x.dtype).contiguous() if add_to is None else add_to.copy_(result + add_to)


def _of_routed(x: Tensor, stack: Weight, biases: Tensor | None, local: Tensor, lora: LoraWeights) -> Tensor:
    """Multiply each routed token x [T · k, K] by the matrix of its expert; 0 for those of other ranks."""
    y = x.new_zeros(len(x), lora.up.shape[1])
    for expert in local.unique().tolist():
        if 0 <= expert < len(stack):
            at = (local == expert).nonzero().flatten()
            y[at] = expert_linear(x[at], stack, biases, expert)
    return y


def experts_add_norm(
    residual: Tensor, norm: NextNorm, x: Tensor, ids: Tensor, weights: Tensor, stack: Experts
) -> Tensor | QuantizedRows:
    """Add `experts` to residual [T, hidden] in place and return its norm [T, hidden]; see `linear_add_norm`."""
    assert norm.rounded is None
    experts(x, ids, weights, stack, residual)
    return rms_norm(residual, norm.weight, norm.eps)


def expert_linear(x: Tensor, weights: Weight, biases: Tensor | None, expert: int) -> Tensor:
    """Return linear(x [n, K], one matrix [N, K] of a stack, its bias [N])."""
    weight = weights[expert]
    if isinstance(weight, QuantizedWeight):
        weight = dequantize(weight.codes, weight, x.dtype)
    return F.linear(x, weight, None if biases is None else biases[expert].to(x.dtype))


def activate(x: Tensor, activation: ExpertActivation) -> Tensor:
    """x [n, 2I] -> [n, I]: of the gate and up, its halves; x [n, I] without a gate."""
    if activation == UNGATED:
        return F.relu(x).square()
    if activation == "silu":
        return silu_and_mul(x)
    if activation == "gelu_tanh":
        return gelu_and_mul(x)
    gate, up = to_wide(x).chunk(2, -1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return ((up + 1) * gate * (SLOPE * gate).sigmoid()).to(x.dtype)
