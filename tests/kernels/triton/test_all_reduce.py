"""Sums over ranks in Triton's interpreter: a process is a rank, and their memory is shared."""

import multiprocessing
import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.triton.all_reduce import BLOCK, all_reduce

CAPACITY = 2 * BLOCK
SHAPES = ((1, 64), (3, 500), (1, 2 * CAPACITY))


def inputs(rank: int, call: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * call + rank)).to(dtype)


def run(rank: int, memory: list[Tensor], dtype: torch.dtype, results: list[Tensor]) -> None:
    """Calls of several sizes, so that the halves of the buffers are used again; with and without a residual."""
    buffers = torch.tensor([buffer.data_ptr() for buffer in memory])
    calls = torch.zeros(CAPACITY // BLOCK, dtype=torch.int32)
    for call, result in enumerate(results):
        shape = tuple(result.shape[1:])
        x = inputs(rank, call, (shape[0], shape[1]), dtype)
        residual = torch.ones_like(x) if call % 2 else None
        result[rank] = all_reduce(x, buffers, calls, rank, CAPACITY, residual)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="ranks are processes of the interpreter")
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_sums(size: int, dtype: torch.dtype) -> None:
    memory = [torch.zeros(2 * size * CAPACITY, dtype=torch.int64).share_memory_() for _ in range(size)]
    shapes = [SHAPES[i % len(SHAPES)] for i in range(5)]
    shapes = [(rows, columns * dtype.itemsize // 4 * 4 // dtype.itemsize) for rows, columns in shapes]
    if dtype == torch.float32:
        shapes = [(rows, columns // 2) for rows, columns in shapes]
    results = [torch.zeros(size, *shape, dtype=dtype).share_memory_() for shape in shapes]
    context = multiprocessing.get_context("fork")  # the memory has one address in all
    others = [context.Process(target=run, args=(rank, memory, dtype, results)) for rank in range(1, size)]
    for process in others:
        process.start()
    run(0, memory, dtype, results)
    for process in others:
        process.join()
        assert process.exitcode == 0
    for call, (result, shape) in enumerate(zip(results, shapes, strict=True)):
        want = sum(inputs(rank, call, shape, dtype).float() for rank in range(size)) + (call % 2)
        assert isinstance(want, Tensor)
        for rank in range(size):
            assert torch.equal(result[rank], result[0])
            # It does not round to nearest.
            torch.testing.assert_close(result[rank], want.to(dtype), rtol=0.01, atol=1e-6)
