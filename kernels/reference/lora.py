"""LoRA: low-rank changes of a linear layer, chosen token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.data.activation import Gate
from kernels.data.layout import ADAPTER, RowState
from kernels.data.lora import AdapterTokens, LoraWeights
from kernels.data.quantized_weight import Weight
from kernels.reference.activation import gate_and_mul
from kernels.reference.matmul import linear
from kernels.reference.norm import rms_norm
from kernels.reference.precision import to_wide


def lora_add(y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> Tensor:
    """Change a linear layer's result y [T, out] for x [T, in] by each token's adapter, in place. Returns y.

    y → factor · y + up · (down · x) + shift of the token's slot; y stays as it is for tokens without an adapter.
    """
    rank = weights.rank
    for slot, some in tokens.by_slot:
        at: Tensor | slice = slice(None) if some is None else some
        inner = to_wide(x[at]) @ to_wide(weights.down[slot]).T
        inner = to_wide(inner.to(y.dtype))
        result = to_wide(y[at]) * weights.factor[slot] + weights.shift[slot]
        for start, stop, group in weights.groups:
            result[:, start:stop] += (
                inner[:, group * rank : (group + 1) * rank] @ to_wide(weights.up[slot, start:stop]).T
            )
        y[at] = result.to(y.dtype)
    return y


def adapter_slots(packed: Tensor, segment: int, num_seqs: int, num_tokens: int, state: RowState) -> Tensor:
    """Return the slots [T] int32 of a packed step's tokens, -1: none. packed, state: see `kernels.data.layout`."""
    slots = state.records[packed[:num_seqs].long(), ADAPTER] - 1
    if num_tokens != num_seqs:
        ends = packed[segment + 1 : segment + num_seqs + 1]
        index = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
        slots = slots[torch.searchsorted(ends, index, right=True).clamp(max=num_seqs - 1)]
    return slots.int()


def fuses_adapters(x: Tensor, weight: Weight, lora: LoraWeights, gate: Gate | None = None) -> bool:
    """Return whether one kernel computes `adapted_linear` of x [T, in], with its norm, gate or residual."""
    return False


def extended_weight(weight: Weight, num_rows: int) -> Tensor | None:
    """Return a layer's weight [out, in] with `num_rows` rows of zeros after it, for `LoraWeights.extended`; None: no
    kernel wants that.
    """
    return None


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
    """Compute a linear layer of x [T, in] with each token's adapter: [T, out], or [T, out / 2] with `gate`.

    norm: weight and eps of the RMSNorm of x that is computed first. residual [T, out]: the result is added to it, in
    place, and it is returned; not together with `gate`.
    """
    value = x if norm is None else rms_norm(x, *norm)
    y = lora_add(linear(value, weight, bias), value, lora, tokens)
    if gate is not None:
        y = gate_and_mul(y, gate)
    return y if residual is None else residual.add_(y)
