"""The parts a decoder is made of, with their weights. Knows matrices; never knows attention, checkpoints or families.

Weights are made empty: whoever builds a layer fills them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x [T, in] → x Wᵀ + b [T, out]. Several projections of the same input are one: their rows lie stacked."""

    def __init__(
        self, in_features: int, *out_features: int, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.out_features = out_features  # of each stacked projection
        self.weight = _empty(sum(out_features), in_features, dtype=dtype, device=device)
        self.bias = _empty(sum(out_features), dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)

    def after_norm(self, x: Tensor, norm: RMSNorm, out: Tensor | None = None) -> Tensor:
        """The projection of the normed x, in `out` where that is given."""
        return kernels.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, out)

    def swiglu_after_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """silu(gate) · up, where gate and up are the two stacked projections of the normed x."""
        return kernels.norm_swiglu(x, norm.weight, norm.eps, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the projection of x, in residual's place."""
        return kernels.linear_add(residual, x, self.weight, self.bias)

    def pack(self) -> None:
        """The weights are filled, for good: give them the form that products on their device like best."""
        self.weight = nn.Parameter(kernels.pack_weight(self.weight), requires_grad=False)

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """weight [out_features[i], in] and bias [out_features[i]] or None of each projection: views, to be filled."""
        weights = self.weight.split(self.out_features)
        biases = self.bias.split(self.out_features) if self.bias is not None else [None] * len(weights)
        return list(zip(weights, biases, strict=True))


class Embedding(nn.Module):
    """Token ids [T] → rows [T, hidden] of weight [vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class RMSNorm(nn.Module):
    """x [..., n] → x / rms(x) · weight."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _empty(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)
