"""CUDA graphs of a drafter: one pass over few tokens, and the drafts after it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.worker.device import Device, Graph

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a pass, or requests, to capture
Work = Callable[[Tensor, Tensor], Tensor]  # (integers [columns, size] int64, hidden [size, width]) → the result


@dataclass(frozen=True, slots=True)
class DraftWork:
    """Work on integers and hidden states of so many tokens or requests."""

    run: Work
    padding: list[int]  # the integers of a token or request that is none
    width: int  # of hidden states
    sizes: list[int]  # to capture, ascending

    @classmethod
    def up_to(cls, most: int, run: Work, padding: list[int], width: int) -> DraftWork:
        """Capture sizes up to `most`."""
        return cls(run, padding, width, sorted({min(size, most) for size in SIZES}))

    def inputs(self, size: int, device: Device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return integers and hidden states of `size` tokens or requests that are none."""
        integers = torch.tensor(self.padding).unsqueeze(1).to(device.torch_device)
        hidden = torch.zeros(size, self.width, device=device.torch_device, dtype=dtype)
        return integers.repeat(1, size), hidden


def run_all(works: Iterable[DraftWork], device: Device, dtype: torch.dtype) -> None:
    """Run every work once for each of its sizes, which compiles its kernels."""
    for work in works:
        for size in reversed(work.sizes):
            work.run(*work.inputs(size, device, dtype))


class DraftGraphs:
    """Graphs of a work, by padded size. Owns the static buffers that the graphs read."""

    def __init__(self, device: Device, work: DraftWork, dtype: torch.dtype) -> None:
        """`dtype`: of hidden states."""
        self._integers, self._hidden = work.inputs(work.sizes[-1], device, dtype)
        self._padding, self._sizes = self._integers[:, :1].clone(), work.sizes
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}
        shared: Graph | None = None
        for size in reversed(work.sizes):
            run = partial(work.run, self._integers[:, :size], self._hidden[:size])
            run()  # compile and select algorithms before the capture
            graph, result = device.capture(run, shared)
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
