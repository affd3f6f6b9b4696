"""Parts of encoders of images, whose tokens all see each other and are in no KV cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.reference.precision import to_wide


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [N, heads, D] by angles whose cos and sin are [N, D / 2] float32: channel i with channel i + D / 2.

    x may be overwritten.
    """
    low, high = to_wide(x).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def full_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Return the attention of q, k and v [B, heads, T, D], without a mask: of q's shape. scale: None: 1 / √D."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale)
