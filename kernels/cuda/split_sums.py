"""Deterministic forms of sums over channels and experts on CUDA devices, see `kernels.reference.split_sums`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.deterministic import TILE_TOKENS, expert_outputs, float_linear
from kernels.cuda.fixed_lora import adapted_outputs
from kernels.data.lora import AdapterTokens, ExpertLora
from kernels.data.moe import Experts
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.data.split_weight import SplitWeight, has_whole_groups, pieces_of, tree
from kernels.triton.moe import sum_experts
from kernels.triton.weight_only import dequantize, weight_only_linear


def split_weight(weight: Weight, columns: tuple[slice, ...], bias: Tensor | None = None) -> SplitWeight:
    """See `kernels.reference.split_weight`. One kernel reads all pieces of a float weight, in the weight's memory.

    Codes that the columns would cut are kept whole, and dequantised in each call.
    """
    bias = None if bias is None else bias.float()
    if isinstance(weight, Tensor):
        is_even = all(own.stop - own.start == columns[0].stop for own in columns)
        return SplitWeight((weight,) if is_even else tuple(pieces_of(weight, columns)), columns, bias)
    return SplitWeight(tuple(pieces_of(weight, columns)) if _divides(weight, columns) else (weight,), columns, bias)


def _divides(weight: QuantizedWeight, columns: tuple[slice, ...]) -> bool:
    return weight.kind != "e2m1" and has_whole_groups(weight, columns)


def adds_split_sums(x: Tensor, weight: SplitWeight) -> bool:
    """See `kernels.reference.adds_split_sums`."""
    return len(weight.pieces) < len(weight.columns) and isinstance(weight.pieces[0], Tensor)


def split_linear_add(residual: Tensor, x: Tensor, weight: SplitWeight) -> Tensor:
    """See `kernels.reference.split_linear_add`."""
    whole = weight.pieces[0]
    assert isinstance(whole, Tensor)
    return float_linear(x, whole, weight.bias, residual, residual, len(weight.columns), rounds=True)


def split_linear(x: Tensor, weight: SplitWeight) -> Tensor:
    """See `kernels.reference.split_linear`."""
    first, columns = weight.pieces[0], weight.columns
    if isinstance(first, QuantizedWeight) and len(weight.pieces) == 1 and not _divides(first, columns):
        weight = split_weight(dequantize(first.codes, first, x.dtype), columns, weight.bias)
        first = weight.pieces[0]
    if len(weight.pieces) < len(columns):
        assert isinstance(first, Tensor)
        out = x.new_empty(len(x), len(first), dtype=torch.float32)
        return float_linear(x, first, weight.bias, out, pieces=len(columns))

    def product(i: int) -> Tensor:
        piece, own, bias = weight.pieces[i], x[:, columns[i]], None if i else weight.bias
        if isinstance(piece, QuantizedWeight):
            return weight_only_linear(own, piece, bias, TILE_TOKENS, torch.float32)
        return float_linear(own, piece, bias, x.new_empty(len(x), len(piece), dtype=torch.float32), pieces=1)

    return tree(len(columns), product, Tensor.add_)


def split_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: Experts,
    pieces: tuple[slice, ...],
    adapters: ExpertLora | None = None,
    tokens: AdapterTokens | None = None,
) -> Tensor:
    """See `kernels.reference.split_experts`."""
    if adapters is None or tokens is None:
        outputs = expert_outputs(x, ids, weights, stack)
    else:
        outputs = adapted_outputs(x, ids, weights, stack, adapters, tokens)

    def total(i: int) -> Tensor:
        out, own = torch.zeros(x.shape, dtype=torch.float32, device=x.device), pieces[i]
        if len(x) and own.stop > own.start:
            sum_experts(outputs, ids, out, False, own.start, own.stop - own.start)
        return out

    return tree(len(pieces), total, Tensor.add_)
