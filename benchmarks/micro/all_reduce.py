"""Times sums over the GPUs of a host inside CUDA graphs, with the residual sum: `python -m benchmarks.micro.all_reduce --gpus 2`.

Beside NCCL and the one-shot sum of PyTorch's symmetric memory, and against the exact sum. Rows of 4,096 bfloat16.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks.gpu import need_gpus
from engine.worker.communicator import SMALL_BYTES, GroupCommunicator
from kernels.triton import all_reduce

WIDTH, CALLS, REPLAYS = 4096, 50, 20
PORT = "29533"


class PushCommunicator(GroupCommunicator):
    """Few tokens are summed by `kernels.triton.all_reduce`: what `GpuCommunicator` may become once it is measured on GPUs."""

    def __init__(self, device: torch.device) -> None:
        """Of every rank at the same time: the peers' memory is made known to each other."""
        import torch.distributed._symmetric_memory as symmetric  # needs a GPU

        self._kernel = all_reduce
        self._rank, size, self._capacity = dist.get_rank(), dist.get_world_size(), SMALL_BYTES // 4
        self._memory = symmetric.empty(2 * size * self._capacity, dtype=torch.int64, device=device).zero_()
        handle = symmetric.rendezvous(self._memory, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        self._buffers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._calls = torch.zeros(self._capacity // all_reduce.BLOCK, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        dist.barrier()  # before any rank writes into memory that its owner has still to zero

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._sum(x, None) if self._is_small(x) else super().all_reduce(x)

    def add_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._sum(x, residual) if self._is_small(x) else super().add_sum(residual, x)

    def _is_small(self, x: Tensor) -> bool:
        return 0 < self._kernel.num_words(x) <= self._capacity

    def _sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self._kernel.all_reduce(x, self._buffers, self._calls, self._rank, self._capacity, residual)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    args = parser.parse_args(argv)
    need_gpus("benchmarks.micro.all_reduce", args.gpus)
    torch.multiprocessing.spawn(_rank, (args.gpus, args.rows), nprocs=args.gpus)  # type: ignore[attr-defined, no-untyped-call]
    return 0


def _rank(rank: int, size: int, rows: list[int]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    ours, nccl = PushCommunicator(device), GroupCommunicator(device)
    for count in rows:
        inputs = [
            torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(i)).bfloat16().to(device)
            for i in range(size)
        ]
        x, residual = inputs[rank], torch.ones(count, WIDTH, dtype=torch.bfloat16, device=device)
        want = sum(each.double() for each in inputs) + 1
        error = 0.0
        for _ in range(100):
            error = max(error, float((ours.add_sum(residual.clone(), x).double() - want).abs().max()))
        times = {
            "this": _microseconds(lambda x=x, r=residual: ours.add_sum(r, x)),  # type: ignore[misc]
            "NCCL": _microseconds(lambda x=x, r=residual: nccl.add_sum(r, x)),  # type: ignore[misc]
            "one-shot": _microseconds(_one_shot(x, residual)),
        }
        if rank == 0:
            shown = "  ".join(f"{name} {us:6.2f} us" for name, us in times.items())
            print(
                f"{count:4} rows, {x.nbytes >> 10:4} KiB on {size} GPUs: {shown}  largest error {error:.1e}", flush=True
            )
    dist.destroy_process_group()


def _one_shot(x: Tensor, residual: Tensor) -> Callable[[], Tensor]:
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    memory = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(memory, group)

    def call() -> Tensor:
        memory.copy_(x)
        return residual.add_(torch.ops.symm_mem.one_shot_all_reduce(memory, "sum", group))

    return call


def _microseconds(call: Callable[[], object]) -> float:
    """Of one call in a graph of many."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return float(sorted(times)[REPLAYS // 2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
