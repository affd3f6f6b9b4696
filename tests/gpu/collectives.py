"""Sums, gathers and products over the GPUs of this machine, beside the same in float64."""

from __future__ import annotations

import os
import random
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

import kernels
from engine.worker.parallel.gpu_communicator import GpuCommunicator
from tests.gpu.checks import BF16, ELEMENTWISE_LIMITS, F16, F32, LIMITS, Checks, captured, relative_error

WIDTH = 4096
SUMS = ((1, 64), (1, WIDTH), (3, 2), (7, WIDTH), (33, 2880), (256, WIDTH), (1024, WIDTH), (3001, WIDTH), (16384, WIDTH))
EPS = 1e-5
REPEATS = 20  # calls that follow each other without a pause, with other numbers each time


def check_collectives(checks: Checks) -> None:
    """All ranks must get the same sums, also where calls follow each other, in CUDA graphs, and when a rank is late."""
    count = torch.cuda.device_count()
    if count < 2:
        print("left out: collectives (there is one GPU)")
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for size in (2, 4):
        if size <= count:
            queue: Any = torch.multiprocessing.get_context("spawn").SimpleQueue()
            torch.multiprocessing.spawn(_rank, (size, port, queue), nprocs=size)  # type: ignore[attr-defined, no-untyped-call]
            while not queue.empty():
                name, error, limit = queue.get()
                checks.add(f"{size} ranks, {name}", error, limit)


def _rank(rank: int, size: int, port: str, queue: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    with torch.inference_mode():
        communicator = GpuCommunicator(device)
        for dtype in (BF16, F32, F16):
            for shape in SUMS:
                for graph in (False, True):
                    kind = "in a graph" if graph else "eager"
                    errors, errors_of_norms = _errors_of_sums(communicator, shape, dtype, device, graph)
                    _report(queue, f"{dtype}, {kind}: sum of {shape}", errors, ELEMENTWISE_LIMITS[dtype])
                    _report(queue, f"{dtype}, {kind}: norm of the sum of {shape}", errors_of_norms, LIMITS[dtype])
            for shape in ((1, 64), (3, 64128), (256, 64128)):
                errors = _errors_of_gathers(communicator, shape, dtype, device)
                _report(queue, f"{dtype}: gather of {shape}", errors, 0.0)
        for shape in ((1, 16), (256, 16), (1024, 5)):
            errors = _errors_of_gathers(communicator, shape, torch.int64, device)
            _report(queue, f"gather of {shape} keys", errors, 0.0)
        for tokens in (1, 300, 1500, 5000, 16384):
            errors = _errors_of_products(communicator, tokens, device)
            _report(queue, f"products of {tokens} tokens", errors, LIMITS[BF16])
    dist.destroy_process_group()


def _report(queue: Any, name: str, errors: list[float], limit: float) -> None:
    """The largest error on any rank."""
    largest = torch.tensor(errors, dtype=torch.float64, device="cuda").nan_to_num_(torch.inf).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        queue.put((name, float(largest), limit))


def _inputs(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Inputs of all ranks."""
    size, generator = dist.get_world_size(), torch.Generator(device).manual_seed(seed)
    if dtype == torch.int64:
        return [torch.randint(-(2**62), 2**62, shape, generator=generator, device=device) for _ in range(size)]
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(size)]


def _late(chance: random.Random) -> None:
    """Delay this rank's GPU now and then."""
    if chance.random() < 0.3:
        torch.cuda._sleep(chance.randint(0, 2_000_000))  # type: ignore[no-untyped-call]


def _errors_of_sums(
    communicator: GpuCommunicator, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, graph: bool
) -> tuple[list[float], list[float]]:
    """Errors of sums, and of their norms where the communicator computes them."""
    rank, chance, errors, errors_of_norms = dist.get_rank(), random.Random(dist.get_rank()), [], [0.0]
    x, plain, residual, normalised, normed = (torch.empty(shape, dtype=dtype, device=device) for _ in range(5))
    weight = _inputs(shape[1:], 7, dtype, device)[0]
    has_norm = False

    def work() -> None:
        nonlocal has_norm
        again = x.clone()  # since a sum may overwrite x
        communicator.add_sum(residual, x)
        plain.copy_(communicator.all_reduce(plain))
        norm = communicator.add_sum(normalised, again, (weight, EPS))
        has_norm = norm is not None  # in a graph there may be none, where there was one before
        if norm is not None:
            normed.copy_(norm)

    for each in (x, plain, residual, normalised):
        each.fill_(0)
    run = captured(work) if graph else work
    for seed in range(REPEATS if shape[0] < 3000 else 4):
        inputs, residuals = _inputs(shape, seed, dtype, device), _inputs(shape, 99 + seed, dtype, device)[0]
        for each, value in ((x, inputs[rank]), (plain, inputs[rank]), (residual, residuals), (normalised, residuals)):
            each.copy_(value)
        _late(chance)
        run()
        total = sum(each.double() for each in inputs)
        errors += [relative_error(residual, total + residuals.double()), relative_error(plain, torch.as_tensor(total))]
        first = residual.clone()
        dist.broadcast(first, 0)
        errors.append(0.0 if torch.equal(first, residual) and torch.equal(normalised, residual) else torch.inf)
        if has_norm:
            errors_of_norms.append(
                relative_error(normed, kernels.reference.rms_norm(residual.double(), weight.double(), EPS))
            )
    return errors, errors_of_norms


def _errors_of_gathers(
    communicator: GpuCommunicator, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[float]:
    rank, size, chance, errors = dist.get_rank(), dist.get_world_size(), random.Random(dist.get_rank()), []
    for seed in range(6):
        inputs = _inputs(shape, seed, dtype, device)
        width = size * shape[1] - (seed if dtype.is_floating_point else 0)
        out = torch.full((shape[0], width), torch.nan if dtype.is_floating_point else -1, dtype=dtype, device=device)
        _late(chance)
        communicator.all_gather(inputs[rank], out)
        want = torch.cat(inputs, 1)[:, : out.shape[1]]
        errors.append(0.0 if torch.equal(out, want) else torch.inf)
    return errors


def _errors_of_products(communicator: GpuCommunicator, num_tokens: int, device: torch.device) -> list[float]:
    rank, chance, errors = dist.get_rank(), random.Random(dist.get_rank()), []
    xs, weights = _inputs((num_tokens, 512), 1, BF16, device), _inputs((WIDTH, 512), 2, BF16, device)
    before, norm = _inputs((num_tokens, WIDTH), 3, BF16, device)[0], _inputs((WIDTH,), 4, BF16, device)[0]
    want = before.double()
    for x, weight in zip(xs, weights, strict=True):
        want += x.double() @ weight.double().T
    for _ in range(3):
        residual = before.clone()
        for _ in range(2):  # without a pause between
            _late(chance)
            normed = communicator.add_gemm(
                residual, lambda rows: torch.nn.functional.linear(xs[rank][rows], weights[rank]), (norm, EPS)
            )
        errors.append(relative_error(residual, 2 * want - before.double()))
        if normed is not None:
            errors.append(relative_error(normed, kernels.reference.rms_norm(residual.double(), norm.double(), EPS)))
        first = residual.clone()
        dist.broadcast(first, 0)
        errors.append(0.0 if torch.equal(first, residual) else torch.inf)
    return errors
