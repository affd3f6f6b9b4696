"""Deterministic forms of latent attention on CUDA devices: one tile for each operation, and no parts of a context.

A decoded token's attention is that of a prompt with one token. A prompt's latents are read in the same tiles, from the
sequence's beginning on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.attention import latent_attention_prefill
from kernels.data.attention import NewLatents, PagedLatents
from kernels.triton import latent
from kernels.triton.fixed_heads import fixed_heads


def absorb_and_store(query: Tensor, key_up: Tensor, new: NewLatents) -> Tensor:
    """See `kernels.reference.absorb_and_store`."""
    plain, size = key_up.shape[1:]
    out = query.new_empty(*query.shape[:2], new.latent.shape[1])
    latent.rotate_into(query, new, out, plain, size)
    fixed_heads(query[..., :plain], key_up.mT, out[..., :size])
    return out


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `kernels.reference.head_linear`."""
    return fixed_heads(x, weight, x.new_empty(*x.shape[:2], weight.shape[1]))


def latent_attention_decode(
    query: Tensor, latents: PagedLatents, *, scale: float, out: Tensor, plan: object = None
) -> Tensor:
    """See `kernels.reference.latent_attention_decode`. `plan` is not read."""
    starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    tiles = torch.stack([starts[:-1], torch.zeros_like(starts[:-1])], 1)
    return latent_attention_prefill(query, starts, latents, scale=scale, out=out, tiles=tiles)
