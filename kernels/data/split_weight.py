"""Matrices whose sums are divided into pieces of fixed borders, so that any number of ranks adds up the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.data.quantized_weight import QuantizedWeight, Weight


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """W [N, K] as pieces of its columns, packed one by one."""

    pieces: tuple[Weight, ...]
    columns: tuple[slice, ...]  # of each piece
    bias: Tensor | None = None  # [N] float32, added to the first piece's sums


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
        piece = _packed(piece) if weight.kind == "int4" else piece.contiguous()
        yield replace(weight, codes=piece, group=min(weight.group, own.stop - own.start), **by_group)


def has_whole_groups(weight: QuantizedWeight, columns: tuple[slice, ...]) -> bool:
    """Return True if `pieces_of` takes the codes. The answer is that of every rank's part of the matrix."""
    width = columns[0].stop
    is_even = all(own.stop - own.start == width for own in columns)
    return is_even and weight.order is None and (weight.group % width == 0 or width % weight.group == 0)


def _packed(codes: Tensor) -> Tensor:
    """Codes [N, K] from 0 to 15 as `QuantizedWeight` holds those of int4: [N, K / 2]."""
    low, high = codes.chunk(2, 1)
    return low | high << 4
