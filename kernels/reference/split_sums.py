"""Sums in pieces that a fixed tree adds up: deterministic mode's sums over channels and experts, on 1 to 8 ranks.

A piece's sum is float32. A rank adds up a whole subtree of pieces, and `add_pieces` the subtrees of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.data.lora import AdapterTokens, ExpertLora
from kernels.data.moe import Experts
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.data.split_weight import SplitWeight, pieces_of, tree
from kernels.reference.moe import adapted_experts, experts
from kernels.reference.quantized import dequantize


def split_weight(weight: Weight, columns: tuple[slice, ...], bias: Tensor | None = None) -> SplitWeight:
    """Divide weight [N, K] at `columns`, and pack each piece as `pack_weight` does. bias [N] goes to the first."""
    if isinstance(weight, QuantizedWeight):
        weight = dequantize(weight.codes, weight, torch.float32)
    return SplitWeight(tuple(pieces_of(weight, columns)), columns, None if bias is None else bias.float())


def split_linear(x: Tensor, weight: SplitWeight) -> Tensor:
    """x [T, K] → x Wᵀ + b [T, N] float32, in pieces."""

    def product(i: int) -> Tensor:
        piece, own = weight.pieces[i], weight.columns[i]
        assert isinstance(piece, Tensor)
        result = x[:, own].float() @ piece.float().T
        return result + weight.bias if i == 0 and weight.bias is not None else result

    return tree(len(weight.pieces), product, torch.add)


def adds_split_sums(x: Tensor, weight: SplitWeight) -> bool:
    """Return True if one rank's kernel adds its sums to the residual stream: `split_linear_add`."""
    return False


def split_linear_add(residual: Tensor, x: Tensor, weight: SplitWeight) -> Tensor:
    """residual += `split_linear`, rounded before and after, in place."""
    return residual.add_(split_linear(x, weight).to(residual.dtype))


def split_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: Experts,
    pieces: tuple[slice, ...],
    adapters: ExpertLora | None = None,
    tokens: AdapterTokens | None = None,
) -> Tensor:
    """`experts`, or with adapters `adapted_experts`: [T, hidden] float32. Experts with ids in a slice are a piece."""

    def outputs(i: int) -> Tensor:
        here = (ids >= pieces[i].start) & (ids < pieces[i].stop)
        chosen = x, ids.masked_fill(~here, -1), weights, stack
        if adapters is None or tokens is None:
            return experts(*chosen).float()
        return adapted_experts(*chosen, adapters, tokens).float()

    return tree(len(pieces), outputs, torch.add)


def add_pieces(pieces: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up pieces [P, T, N] float32 by a tree, P a power of two: [T, N] `dtype`, rounded once."""
    return tree(len(pieces), pieces.__getitem__, torch.add).to(dtype)
