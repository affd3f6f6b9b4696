"""CUDA graphs of a drafter: one pass over few tokens, and the guesses after it."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.worker.device import Device, Graph

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a pass, or requests, to capture
Work = Callable[[Tensor, Tensor], Tensor]  # (integers [columns, size] int64, hidden [size, width]) → the result


class DraftGraphs:
    """Graphs of work on integers and hidden states of so many tokens or requests, by padded size.

    Owns the static buffers that the graphs read.
    """

    def __init__(
        self, device: Device, work: Work, padding: list[int], width: int, sizes: list[int], dtype: torch.dtype
    ):
        """`padding`: the integers of a token or request that is none. `width`: of hidden states, all of `dtype`."""
        new = partial(torch.zeros, device=device.torch_device)
        self._padding = torch.tensor(padding).unsqueeze(1).to(device.torch_device)
        self._integers = new(len(padding), sizes[-1], dtype=torch.int64)
        self._integers[:] = self._padding
        self._hidden = new(sizes[-1], width, dtype=dtype)
        self._sizes = sizes
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}
        shared: Graph | None = None
        for size in reversed(sizes):
            inputs = self._integers[:, :size], self._hidden[:size]
            work(*inputs)  # compile and select algorithms before the capture
            graph, result = device.capture(partial(work, *inputs), shared)
            shared = shared or graph
            self._graphs[size] = graph, result

    def fits(self, count: int) -> bool:
        return count <= self._sizes[-1]

    def run(self, integers: Tensor, hidden: Tensor) -> Tensor:
        """Return the result for these tokens or requests, [columns, n] and [n, width]. The next run overwrites it."""
        count = integers.shape[1]
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        self._integers[:, :count] = integers
        if size > count:
            self._integers[:, count:size] = self._padding
        if hidden.shape[1]:
            self._hidden[:count] = hidden
        graph, result = self._graphs[size]
        graph.replay()
        return result[:count]
