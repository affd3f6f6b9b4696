"""LoRA: low-rank changes of a linear layer, chosen token by token."""

from __future__ import annotations

from torch import Tensor

from kernels.data.lora import AdapterTokens, LoraWeights
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
