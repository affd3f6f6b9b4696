"""Tokens computed one by one: see `kernels.cpu.alone`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


def each_row(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield copies of each row of the tensors [T, ...]: as [1, ...], in memory of their own."""
    for i in range(len(tensors[0])):
        yield tuple(tensor[i : i + 1].clone() for tensor in tensors)


def alone(work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return work(rows of the tensors) of each row, put together."""
    results = [work(*rows) for rows in each_row(*tensors)]
    return torch.cat(results) if results else work(*tensors)


def by_row(work: Callable[P, Tensor], num_tensors: int) -> Callable[P, Tensor]:
    """Return `work` as a function that computes each row of its first `num_tensors` arguments alone.

    The other arguments are the same for all rows.
    """

    @functools.wraps(work)
    def compute(*args: P.args, **options: P.kwargs) -> Tensor:
        tensors: tuple[Any, ...] = args[:num_tensors]
        others: tuple[Any, ...] = args[num_tensors:]
        untyped: Callable[..., Tensor] = work
        return alone(lambda *rows: untyped(*rows, *others, **options), *tensors)

    return compute
