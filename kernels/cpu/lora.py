"""LoRA on a CPU: GEMMs by PyTorch in the dtype of the weights, one adapter after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.data.lora import AdapterTokens, LoraWeights


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
