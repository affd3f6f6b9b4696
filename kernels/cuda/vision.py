"""Parts of image encoders on CUDA devices: which kernel computes them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.cuda.choice import CHOICE
from kernels.triton import rotation


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.reference.rotate_halves`."""
    if len(x) >= CHOICE.rotated_patches:
        return rotation.rotate_halves(x, cos, sin)
    low, high = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def full_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """See `kernels.reference.full_attention`."""
    if not CHOICE.cudnn_attention or q.dtype == torch.float32:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
