"""Times sums and gathers over the GPUs of a host: `python -m benchmarks.micro.all_reduce --gpus 2`.

Sums with the residual sum inside CUDA graphs, by each kernel that can do it, beside NCCL and PyTorch's symmetric
memory. Then gathers of logits, and of the keys that ranks exchange instead to sample; and products of many tokens with
their sums, which no graph holds. Rows of 4,096 bfloat16.
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

import kernels
from benchmarks.gpu import need_gpus
from engine.worker.parallel.communicator import GroupCommunicator
from engine.worker.parallel.gpu_communicator import LARGE_BYTES, SMALL_BYTES, GpuCommunicator
from kernels.triton import collectives
from kernels.triton.sampling import PIECE

WIDTH, VOCAB, CALLS, REPLAYS = 4096, 128256, 20, 20
MIDDLE_BYTES = 4 << 20  # up to this size, PyTorch's one-shot sum is timed
PORT = "29533"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--products", type=int, nargs="+", default=[2048, 16384], help="tokens of products")
    args = parser.parse_args(argv)
    need_gpus("benchmarks.micro.all_reduce", args.gpus)
    torch.multiprocessing.spawn(_rank, (args.gpus, args.rows, args.products), nprocs=args.gpus)  # type: ignore[attr-defined, no-untyped-call]
    return 0


def _rank(rank: int, size: int, rows: list[int], products: list[int]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    with torch.inference_mode():
        ours, nccl = GpuCommunicator(device), GroupCommunicator(device)
        for count in rows:
            x = torch.randn(count, WIDTH, dtype=torch.bfloat16, device=device)
            _print(f"sum of {count:5} rows, {x.nbytes >> 10:6} KiB", _sums(ours, nccl, x))
        for count in rows:
            x = torch.randn(count, VOCAB // size, dtype=torch.bfloat16, device=device)
            _print(f"gather of {count:5} rows of {VOCAB} logits", _gathers(ours, nccl, x, size))
            x = torch.zeros(count, -(-VOCAB // size // PIECE), dtype=torch.int64, device=device)
            _print(f"gather of {count:5} rows of {size * x.shape[1]} keys", _gathers(ours, nccl, x, size))
        for count in products:
            for inner in (4096 // size, 14336 // size):
                _print(f"product of {count:5} rows, {inner} channels", _products(ours, nccl, count, inner, device))
    dist.destroy_process_group()


def _sums(ours: GpuCommunicator, nccl: GroupCommunicator, x: Tensor) -> dict[str, float]:
    residual = torch.zeros_like(x)
    calls: dict[str, Callable[[], object]] = {"chosen": lambda: ours.add_sum(residual, x)}
    if x.nbytes <= SMALL_BYTES:
        calls["tags"] = lambda: collectives.all_reduce_small(x, ours.small, residual)
    if x.nbytes <= LARGE_BYTES:
        calls["flags"] = lambda: collectives.all_reduce(x, ours.large, residual)
        norm = torch.ones_like(x[0]), 1e-5
        calls["with norm"] = lambda: collectives.all_reduce(x, ours.large, residual, norm)
        calls["norm apart"] = lambda: (
            collectives.all_reduce(x, ours.large, residual),
            kernels.rms_norm(residual, *norm),
        )
    if x.nbytes <= MIDDLE_BYTES:
        calls["one-shot"] = _one_shot(x, residual)
    calls["NCCL"] = lambda: nccl.add_sum(residual, x)
    return {name: _microseconds(call) for name, call in calls.items()}


def _gathers(ours: GpuCommunicator, nccl: GroupCommunicator, x: Tensor, size: int) -> dict[str, float]:
    out = x.new_empty(len(x), size * x.shape[1])
    return {
        "this": _microseconds(lambda: ours.all_gather(x, out)),
        "NCCL": _microseconds(lambda: nccl.all_gather(x, out)),
    }


def _products(
    ours: GpuCommunicator, nccl: GroupCommunicator, count: int, inner: int, device: torch.device
) -> dict[str, float]:
    x = torch.randn(count, inner, dtype=torch.bfloat16, device=device)
    weight = torch.randn(WIDTH, inner, dtype=torch.bfloat16, device=device) * 0.02
    residual = torch.zeros(count, WIDTH, dtype=torch.bfloat16, device=device)

    def product(rows: Tensor) -> Tensor:
        return torch.nn.functional.linear(rows, weight)

    return {
        "without sum": _microseconds(lambda: product(x), graph=False),
        "this": _microseconds(lambda: ours.add_gemm(residual, lambda rows: product(x[rows])), graph=False),
        "NCCL": _microseconds(lambda: nccl.add_gemm(residual, lambda rows: product(x[rows])), graph=False),
    }


def _print(what: str, times: dict[str, float]) -> None:
    if dist.get_rank() == 0:
        print(what + ": " + "  ".join(f"{name} {us:7.2f} us" for name, us in times.items()), flush=True)


def _one_shot(x: Tensor, residual: Tensor) -> Callable[[], Tensor]:
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    memory = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(memory, group)

    def call() -> Tensor:
        memory.copy_(x)
        return residual.add_(torch.ops.symm_mem.one_shot_all_reduce(memory, "sum", group))

    return call


def _microseconds(call: Callable[[], object], graph: bool = True) -> float:
    """Time of one of several calls in a row, µs."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()

    def calls() -> None:
        for _ in range(CALLS):
            call()

    run = calls
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            calls()
        run = captured.replay
    times = []
    for _ in range(REPLAYS if graph else 3):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return float(sorted(times)[len(times) // 2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
