"""Tokens computed one by one: see `kernels.cpu.alone`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def each_row(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield copies of each row of the tensors [T, ...]: as [1, ...], in memory of their own."""
    for i in range(len(tensors[0])):
        yield tuple(tensor[i : i + 1].clone() for tensor in tensors)


def alone(work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return work(rows of the tensors) of each row, put together."""
    results = [work(*rows) for rows in each_row(*tensors)]
    return torch.cat(results) if results else work(*tensors)
