"""Sums in pieces that a fixed tree adds up: deterministic mode's sums over channels and experts, on 1 to 8 ranks.

A piece's sum is float32. A rank adds up a whole subtree of pieces, and `add_pieces` the subtrees of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.data.lora import AdapterTokens, ExpertLora
from kernels.data.moe import Experts
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.data.split_weight import SplitWeight
from kernels.reference.moe import adapted_experts, experts
from kernels.reference.quantized import dequantize, pack_nibbles


def tree(count: int, sum_of: Callable[[int], Tensor], add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the sum of `sum_of(i)`, i < count, a power of two: of each with its neighbour, then of these sums.

    add(x, y): x + y, which may overwrite x.
    """

    def total(first: int, count: int) -> Tensor:
        if count == 1:
            return sum_of(first)
        left = total(first, count // 2)
        return add(left, total(first + count // 2, count // 2))

    return total(0, count)


def split_weight(weight: Weight, columns: tuple[slice, ...], bias: Tensor | None = None) -> SplitWeight:
    """Divide weight [N, K] at `columns`, and pack each piece as `pack_weight` does. bias [N] goes to the first."""
    if isinstance(weight, QuantizedWeight):
        weight = dequantize(weight.codes, weight, torch.float32)
    return SplitWeight(tuple(pieces_of(weight, columns)), columns, None if bias is None else bias.float())


def pieces_of(weight: Weight, columns: tuple[slice, ...]) -> Iterator[Weight]:
    """Yield the columns of a matrix: floats, or codes of four bits or eight with whole groups of channels."""
    if isinstance(weight, Tensor):
        yield from (weight[:, own].contiguous() for own in columns)
        return
    assert weight.kind != "e2m1"
    assert weight.order is None
    codes = weight.codes
    if weight.kind == "int4":
        codes = torch.cat([codes & 15, codes >> 4], 1)
    for own in columns:
        piece, groups = codes[:, own], slice(own.start // weight.group, -(-own.stop // weight.group))
        by_group: dict[str, Any] = {name: getattr(weight, name) for name in ("scale", "zero", "minimum")}
        by_group = {name: None if each is None else each[:, groups].contiguous() for name, each in by_group.items()}
        piece = pack_nibbles(piece) if weight.kind == "int4" else piece.contiguous()
        yield replace(weight, codes=piece, group=min(weight.group, own.stop - own.start), **by_group)


def has_whole_groups(weight: QuantizedWeight, columns: tuple[slice, ...]) -> bool:
    """Return True if `pieces_of` takes the codes. The answer is that of every rank's part of the matrix."""
    width = columns[0].stop
    is_even = all(own.stop - own.start == width for own in columns)
    return is_even and weight.order is None and (weight.group % width == 0 or width % weight.group == 0)


def split_linear(x: Tensor, weight: SplitWeight) -> Tensor:
    """x [T, K] → x Wᵀ + b [T, N] float32, in pieces."""

    def product(i: int) -> Tensor:
        piece, own = weight.pieces[i], weight.columns[i]
        assert isinstance(piece, Tensor)
        result = x[:, own].float() @ piece.float().T
        return result + weight.bias if i == 0 and weight.bias is not None else result

    return tree(len(weight.pieces), product, torch.add)


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
