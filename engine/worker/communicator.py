"""How the ranks of one model meet: collectives of PyTorch, over NCCL on GPUs and gloo on CPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

SMALL_BYTES = 256 << 10  # up to which one kernel that reads all ranks' memory is faster than NCCL
# PyTorch is renaming it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupCommunicator:
    """The ranks of the default process group. Every rank makes the same calls in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        size = dist.get_world_size()
        num_tokens, width = x.shape
        gathered = x.new_empty((size * num_tokens, width))
        _all_gather(gathered, x.contiguous())
        return gathered.view(size, num_tokens, width).movedim(0, 1).reshape(num_tokens, -1)

    def least(self, number: int) -> int:
        return self._least(number, torch.device("cpu"))

    @staticmethod
    def _least(number: int, device: torch.device) -> int:
        tensor = torch.tensor([number], device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor.item())


class GpuCommunicator(GroupCommunicator):
    """The GPUs of one host. Few tokens are summed by one kernel that reads the peers' memory, without NVLink multicast."""

    def __init__(self, device: torch.device) -> None:
        """Of every rank at the same time: the peers' memory is made known to each other."""
        import torch.distributed._symmetric_memory as symmetric

        self._device = device
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._buffer = symmetric.empty(SMALL_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, self._group)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.nbytes > SMALL_BYTES or x.nbytes % 16 or x.dtype not in (torch.bfloat16, torch.float32):
            return super().all_reduce(x)
        own = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        own.copy_(x)  # the sum before has ended when all ranks had read it, so that this may overwrite it
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(own, "sum", self._group)
        return total

    def least(self, number: int) -> int:
        return self._least(number, self._device)
