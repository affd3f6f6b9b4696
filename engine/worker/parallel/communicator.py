"""Communication between the ranks of a model: PyTorch's collectives, over NCCL on GPUs and gloo on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import kernels
from engine.models.shard import WeightAndEps

# Newer versions of PyTorch have the first name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupCommunicator:
    """Collectives in a process group, by default of all ranks. Every rank makes the same calls in the same order."""

    def __init__(self, device: torch.device, ranks: dist.ProcessGroup | None = None) -> None:
        self._device, self._ranks = device, ranks

    def leave(self) -> None:
        """Forget the process group, before it is destroyed."""
        self._ranks = None

    def adopt(self, other: GroupCommunicator) -> None:
        """Continue in the process group of `other`."""
        self._ranks = other._ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._ranks)
        return x

    def add_sum(self, residual: Tensor, x: Tensor, norm: WeightAndEps | None = None) -> Tensor | None:
        residual.add_(self.all_reduce(x))
        return None

    def add_gemm(
        self, residual: Tensor, gemm: Callable[[slice], Tensor], norm: WeightAndEps | None = None
    ) -> Tensor | None:
        return self.add_sum(residual, gemm(slice(None)), norm)

    def add_pieces(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        size = dist.get_world_size(self._ranks)
        gathered = own.new_empty(size * own.shape[0], own.shape[1])
        _all_gather(gathered, own, group=self._ranks)
        return kernels.add_pieces(gathered.view(size, *own.shape), dtype)

    def all_gather(self, x: Tensor, out: Tensor) -> Tensor:
        size = dist.get_world_size(self._ranks)
        num_tokens, width = x.shape
        gathered = x.new_empty((size * num_tokens, width))
        _all_gather(gathered, x.contiguous(), group=self._ranks)
        columns = gathered.view(size, num_tokens, width).movedim(0, 1).reshape(num_tokens, -1)
        return out.copy_(columns[:, : out.shape[1]])

    def least(self, number: int) -> int:
        """Return the minimum over all ranks of all stages."""
        tensor = torch.tensor([number], device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor.item())


class Neighbour(NamedTuple):
    """A rank of an adjacent pipeline stage, and a process group of the two, so that no other transfer delays theirs."""

    rank: int
    pair: dist.ProcessGroup


class StageLink:
    """Sends hidden states from one pipeline stage to the next, between ranks with the same index in their stages."""

    def __init__(self, before: Neighbour | None, after: Neighbour | None, buffer: Tensor) -> None:
        """`before`, `after`: in the previous and next stage; None if there is none. buffer [T, hidden]: for the hidden
        states of a step of at most T tokens. CUDA graphs read it.
        """
        self._before, self._after, self._buffer = before, after, buffer
        self._sent: tuple[list[dist.Work], Tensor] = [], buffer  # the last transfer and its memory

    def leave(self) -> None:
        """Forget the process groups and transfers, before the groups are destroyed."""
        self._before = self._after = None
        self._sent = [], self._buffer

    def adopt(self, other: StageLink) -> None:
        """Continue with the process groups of `other`."""
        self._before, self._after = other._before, other._after

    def receive(self, num_tokens: int) -> None:
        """Receive the hidden states of a step from the previous stage, if there is one."""
        if self._before is not None:
            _wait(_transfer(dist.irecv, self._buffer[:num_tokens], self._before))

    def received(self, num_tokens: int) -> Tensor | None:
        """Return the received [num_tokens, hidden], which the stage may overwrite; None in the first stage."""
        return None if self._before is None else self._buffer[:num_tokens]

    def send(self, hidden: Tensor) -> None:
        """Send a copy to the next stage: the next step overwrites `hidden`. Waits for the previous one."""
        assert self._after is not None
        _wait(self._sent[0])
        copy = hidden.clone()
        self._sent = _transfer(dist.isend, copy, self._after), copy


def _transfer(operation: Callable[..., dist.Work | None], tensor: Tensor, neighbour: Neighbour) -> list[dist.Work]:
    """Start a transfer, as a batch of one: NCCL logs a warning about transfers outside batches."""
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(operation, tensor, neighbour.rank, neighbour.pair)])
    return works


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
