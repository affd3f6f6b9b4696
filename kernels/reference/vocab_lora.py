"""LoRA of embeddings and output heads: matrices with a row for each token of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.data.lora import AdapterTokens, EmbeddingLora, RetrainedRows
from kernels.reference.precision import to_wide


def adapt_embedding(y: Tensor, ids: Tensor, weights: EmbeddingLora, tokens: AdapterTokens) -> Tensor:
    """Change embeddings y [T, hidden] of ids [T] int64 by each token's adapter, in place. Returns y.

    y → its retrained row where there is one, + up · (column of A of the token). Other ranks' tokens stay as they are.
    """
    for slot, some in tokens.by_slot:
        at = torch.arange(len(y), device=y.device) if some is None else some
        local = ids[at] - weights.first
        is_own = (local >= 0) & (local < weights.down.shape[1])
        at, local = at[is_own], local[is_own]
        place = weights.indices[slot, local].long()
        before = torch.where((place > 0).unsqueeze(1), weights.rows[slot, (place - 1).clamp(min=0)], y[at])
        change = to_wide(weights.down[slot, local]) @ to_wide(weights.up[slot]).T
        y[at] = (to_wide(before) + change).to(y.dtype)
    return y


def retrained_logits(y: Tensor, x: Tensor, weights: RetrainedRows, tokens: AdapterTokens) -> Tensor:
    """Compute logits y [T, n] of x [T, hidden] anew where a token's adapter has retrained the row, in place.

    Returns y.
    """
    for slot, some in tokens.by_slot:
        at = torch.arange(len(y), device=y.device) if some is None else some
        used = (weights.ids[slot] > 0).nonzero().flatten()
        found = to_wide(x[at]) @ to_wide(weights.rows[slot, used]).T
        y[at[:, None], weights.ids[slot, used].long() - 1] = found.to(y.dtype)
    return y
