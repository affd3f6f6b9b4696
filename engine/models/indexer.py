"""Sparse attention over latents (DeepSeek V3.2): an indexer chooses the tokens that a token attends to.

A token leaves the indexer's key in the cache, behind its latent. `TokenChoice`, made by the owner of attention's step
data, says for which tokens of a step there is a choice; without one, a token attends to all that it sees, which is the
same as long as these are no more than it may choose. The chosen tokens are a list of slots of the cache: a block table
of blocks with one token each, so attention over them needs no kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import kernels
from engine.models.formats import weight_formats
from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.norms import LayerNorm
from engine.models.residual import SublayerInput
from engine.models.spec import IndexSpec

NORM_EPS = 1e-6
SCORES = 1 << 24  # that are held at a time
SCORE_BYTES = 20  # of each, with the masks and orders made of it
TILE = 128  # lengths are rounded up to a multiple


@dataclass(slots=True)
class TokenChoice:
    """The choice of some of a step's tokens [start, stop), n in all. Layers that share a choice find the last one."""

    start: int
    stop: int
    rows: Tensor  # [n] int32: token's block table in block_tables
    lens: Tensor  # [n] int32: tokens that it sees, itself included; 0: padding
    block_tables: Tensor  # [R, max_blocks] int32
    max_len: int  # a multiple of `TILE`: no length exceeds it
    slots: Tensor | None = None  # [n, k] int32: of the chosen tokens, in the order of their positions
    counts: Tensor | None = None  # [n] int32: how many there are

    @classmethod
    def of_decodes(cls, n: int, rows: Tensor, lens: Tensor, block_tables: Tensor, max_len: int) -> TokenChoice:
        """Return the choice of a step's first n sequences, which have one token each."""
        return cls(0, n, rows[:n], lens[:n], block_tables, -(-max_len // TILE) * TILE)

    @classmethod
    def of_prefills(
        cls,
        first: int,
        num_tokens: int,
        rows: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        max_len: int,
    ) -> TokenChoice:
        """Return the choice of a step's tokens from `first` on, which is also the number of sequences before these."""
        ends = query_start[first + 1 :].contiguous()
        tokens = torch.arange(first, num_tokens, dtype=ends.dtype, device=ends.device)
        sequence = torch.searchsorted(ends, tokens, right=True).clamp_(max=len(ends) - 1)
        lens = context_lens[first:][sequence] - (ends[sequence] - 1 - tokens)
        lens = lens.masked_fill(tokens >= ends[sequence], 0).clamp_(min=0)
        return cls(
            first, num_tokens, rows[first:][sequence].contiguous(), lens.int(), block_tables, -(-max_len // TILE) * TILE
        )

    def choose(self, query: Tensor, weights: Tensor, cache: Tensor, top_k: int) -> None:
        """Choose `top_k` tokens for each token. query [T, H, D] and weights [T, H]: of the whole step; cache
        [num_blocks, 1, block_size, D]: the tokens' keys. Of equal scores, those of earlier tokens are chosen.
        """
        query, weights, block_size = query[self.start : self.stop], weights[self.start : self.stop], cache.shape[2]
        k, found = min(top_k, self.max_len), []
        step = max(SCORES // self.max_len, 1)
        for start in range(0, len(query), step):
            part = slice(start, start + step)
            keys = kernels.PagedLatents(cache, self.block_tables, self.rows[part], self.lens[part])
            positions = best_positions(kernels.index_scores(query[part], weights[part], keys, self.max_len), k)
            columns = (positions // block_size).clamp_(max=self.block_tables.shape[1] - 1)
            blocks = self.block_tables[keys.rows.long().unsqueeze(1), columns]
            found.append(blocks * block_size + (positions % block_size).int())
        self.slots, self.counts = torch.cat(found), self.lens.clamp(max=k)

    def attend(self, query: Tensor, cache: Tensor, scale: float, out: Tensor) -> None:
        """Compute the attention over the chosen tokens: query [T, H, L + R], cache [num_blocks, 1, block_size, L + R]
        -> the rows from `start` to `stop` of out [T, H, L].
        """
        assert self.slots is not None
        assert self.counts is not None, "a layer that shares a choice follows the one that makes it"
        blocks = cache.view(-1, 1, 1, cache.shape[3])
        rows = torch.arange(self.stop - self.start, dtype=torch.int32, device=query.device)
        latents = kernels.PagedLatents(blocks, self.slots, rows, self.counts)
        into = out[self.start : self.stop]
        kernels.latent_attention_decode(query[self.start : self.stop], latents, scale=scale, out=into)


def best_positions(scores: Tensor, k: int) -> Tensor:
    """Return the columns of the k best scores [n, N], in ascending order: [n, k] int64; N where there are no more
    scores above -inf. Of equal scores, the first are chosen.
    """
    n = scores.shape[1]
    least = scores.topk(k, sorted=True).values[:, -1:]
    above = scores > least
    equal = (scores == least) & (scores > -torch.inf)
    above |= equal & (equal.cumsum(1, dtype=torch.int32) <= k - above.sum(1, dtype=torch.int32, keepdim=True))
    order = torch.where(above, torch.arange(n, dtype=torch.int32, device=scores.device), n)
    return order.topk(k, largest=False, sorted=True).values.long()


class Indexer(nn.Module):
    """The indexer of a layer. All ranks compute all of its heads."""

    def __init__(self, spec: IndexSpec, hidden_size: int, query_rank: int, scope: Scope) -> None:
        super().__init__()
        self.spec = spec
        self.query = Linear(scope, query_rank, {"wq_b": spec.num_heads * spec.head_dim})
        self.key = Linear(scope, hidden_size, {"wk": spec.head_dim})
        self.key_norm = LayerNorm(scope / "k_norm", spec.head_dim, NORM_EPS, bias=True)
        floats = replace(scope, weight_formats=weight_formats(None))  # in quantised checkpoints, too
        self.weights = Linear(floats, hidden_size, {"weights_proj": spec.num_heads})

    def run(
        self, x: SublayerInput, short: SublayerInput, new: kernels.NewLatents, choices: Sequence[TokenChoice]
    ) -> None:
        """Store the keys of the step's tokens behind their latents, and let `choices` choose.

        x [T, hidden]: the layer's input, normalised. short [T, query_rank]: the short vectors of the queries,
        normalised. `new`: the step's latents; its cache is the layer's whole one.
        """
        spec, bias = self.spec, self.key_norm.bias
        assert bias is not None
        query = self.query.run(short).unflatten(1, (spec.num_heads, spec.head_dim))
        cache = new.cache[..., -spec.head_dim :]
        keys = kernels.NewIndexKeys(
            self.key.run(x), self.key_norm.weight, bias, NORM_EPS, new.positions, new.cos_sin, cache,
            new.slot_mapping, spec.interleaved,
        )  # fmt: skip
        kernels.store_index_keys(query, keys)
        if choices:
            weights = self.weights.run(x).mul_((spec.num_heads * spec.head_dim) ** -0.5)
            for choice in choices:
                choice.choose(query, weights, cache, spec.top_k)
