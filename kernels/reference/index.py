"""Scores by which a token chooses the earlier tokens that it attends to (DeepSeek's lightning indexer).

A token leaves one short key in the cache. A later token has several short queries and a weight for each; its score of
the earlier one is the weighted sum of the positive parts of the queries' products with that key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.data.attention import NewIndexKeys, PagedLatents
from kernels.reference.precision import to_wide, wide_dtype
from kernels.reference.rotary import rotate


def store_index_keys(query: Tensor, new: NewIndexKeys) -> None:
    """Rotate the first R channels of query [T, H, D] in place; and the keys, normed and rotated, go to their slots."""
    query.copy_(rotate(query, new.positions, new.cos_sin, new.interleaved))
    key, block_size = to_wide(new.key), new.cache.shape[2]
    normed = F.layer_norm(key, key.shape[1:], new.norm_weight.to(key.dtype), new.norm_bias.to(key.dtype), new.eps)
    values = rotate(normed.unsqueeze(1), new.positions, new.cos_sin, new.interleaved)[:, 0].to(new.key.dtype)
    written = new.slot_mapping >= 0
    slots = new.slot_mapping[written]
    new.cache[slots // block_size, 0, slots % block_size] = values[written]


def index_scores(query: Tensor, weights: Tensor, keys: PagedLatents, max_len: int) -> Tensor:
    """Score the tokens that each token may see: query [T, H, D], weights [T, H] -> [T, max_len], at least float32.

    `keys`: cache [num_blocks, 1, block_size, D]; rows and lens are those of each token: its block table, and how many
    tokens it sees. max_len: a multiple of 128 that no length exceeds. Scores of tokens that are not seen are -inf.
    """
    out = query.new_full((len(query), max_len), -math.inf, dtype=wide_dtype(query))
    rows, counts = torch.unique_consecutive(keys.rows, return_counts=True)
    start, block_size = 0, keys.cache.shape[2]
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        own = slice(start, start + count)
        start += count
        if not (longest := int(keys.lens[own].max())):
            continue
        blocks = keys.block_tables[row, : -(-longest // block_size)].long()
        key = to_wide(keys.cache[blocks, 0].flatten(0, 1)[:longest])  # [N, D]
        products = (to_wide(query[own]) @ key.T).relu_()  # [n, H, N]
        scores = (to_wide(weights[own]).unsqueeze(1) @ products).squeeze(1)
        unseen = torch.arange(longest, device=key.device) >= keys.lens[own].unsqueeze(1)
        out[own, :longest] = scores.masked_fill(unseen, -math.inf)
    return out
