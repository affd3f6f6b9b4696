"""Sums and gathers over ranks in Triton's interpreter: a process is a rank, and their memory is shared."""

import multiprocessing
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import reference
from kernels.triton import collectives
from kernels.triton.collectives import BLOCK, WORDS, Channel
from tests.support.forks import hide_garbage_from_forks
from tests.support.quick_interpreter import yield_while_waiting

CAPACITY = 2 * WORDS
LARGE_BYTES = 12 * BLOCK
Run = Callable[[int, list[Tensor], list[Tensor], list[Tensor]], None]  # rank, memory, flags, results

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="ranks are the interpreter's processes"
)


@pytest.fixture(autouse=True)
def few_programs_that_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program of a large tensor has several blocks."""
    monkeypatch.setattr(collectives, "PROGRAMS", 4)
    yield_while_waiting(monkeypatch)


def inputs(rank: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * call + rank)).to(dtype)


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def sum_small(rank: int, memory: list[Tensor], flags: list[Tensor], results: list[Tensor]) -> None:
    """Calls of several sizes, so that the halves of the buffers are used again; with and without a residual."""
    channel = Channel(rank, CAPACITY, addresses(memory), torch.zeros(CAPACITY // WORDS, dtype=torch.int32))
    for call, result in enumerate(results):
        x = inputs(rank, call, tuple(result.shape[1:]), result.dtype)
        result[rank] = collectives.all_reduce_small(x, channel, torch.ones_like(x) if call % 2 else None)


def large(rank: int, memory: list[Tensor], flags: list[Tensor]) -> Channel:
    calls = torch.zeros(collectives.PROGRAMS, dtype=torch.int32) + (2**31 - 2)  # numbers of calls wrap around
    return Channel(rank, LARGE_BYTES, addresses(memory), calls, addresses(flags))


def sum_large(rank: int, memory: list[Tensor], flags: list[Tensor], results: list[Tensor]) -> None:
    channel = large(rank, memory, flags)
    for call, result in enumerate(results):
        x = inputs(rank, call, tuple(result.shape[1:]), result.dtype)
        result[rank] = collectives.all_reduce(x, channel, torch.ones_like(x) if call % 2 else None)


def sum_and_normalise(rank: int, memory: list[Tensor], flags: list[Tensor], results: list[Tensor]) -> None:
    """Rows of several widths, in the order sum, norm in each result."""
    channel = large(rank, memory, flags)
    for call, result in enumerate(results):
        shape = tuple(result.shape[2:])
        x, weight = inputs(rank, call, shape, result.dtype), inputs(9, call, shape[1:], torch.float32)
        residual = torch.ones_like(x) if call % 2 else None
        assert collectives.can_normalise(x)
        result[rank, 1] = collectives.all_reduce(x, channel, residual, (weight, 1e-3))
        result[rank, 0] = x if residual is None else residual


def gather(rank: int, memory: list[Tensor], flags: list[Tensor], results: list[Tensor]) -> None:
    """The last rank has columns that pad the vocabulary."""
    channel, size = large(rank, memory, flags), len(memory)
    for call, result in enumerate(results):
        rows, width = result.shape[1:]
        x = inputs(rank, call, (rows, -(-width // size)), result.dtype)
        result[rank] = collectives.all_gather(x, channel, torch.full((rows, width), torch.nan, dtype=result.dtype))


def run_all(run: Run, size: int, num_words: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """The results [size, *shape] of all ranks."""
    memory = [torch.zeros(num_words, dtype=torch.int64).share_memory_() for _ in range(size)]
    flags = [torch.zeros(size * collectives.PROGRAMS, dtype=torch.int32).share_memory_() for _ in range(size)]
    results = [torch.full((size, *shape), torch.nan, dtype=dtype).share_memory_() for shape in shapes]
    context = multiprocessing.get_context("fork")  # the memory has one address in all
    others = [context.Process(target=run, args=(rank, memory, flags, results)) for rank in range(1, size)]
    for each in flags:
        each.fill_(2**31 - 2)
    with hide_garbage_from_forks():
        for process in others:
            process.start()
    run(0, memory, flags, results)
    for process in others:
        process.join()
        assert process.exitcode == 0
    return results


def check_sums(results: list[Tensor]) -> None:
    for call, result in enumerate(results):
        size, shape = len(result), tuple(result.shape[1:])
        want = torch.zeros(shape, dtype=torch.float64) + call % 2
        for rank in range(size):
            want += inputs(rank, call, shape, result.dtype).double()
        for rank in range(size):
            assert torch.equal(result[rank], result[0])
            # The interpreter does not round to nearest.
            torch.testing.assert_close(result[rank], want.to(result.dtype), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_small_sums(size: int, dtype: torch.dtype) -> None:
    half = dtype.itemsize // 2
    shapes = [(1, 64 // half), (3, 500 // half), (1, 2 * CAPACITY // half), (1, 64 // half), (3, 502 // half)]
    check_sums(run_all(sum_small, size, 2 * size * CAPACITY, shapes, dtype))


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (2, torch.float16)])
def test_large_sums(size: int, dtype: torch.dtype) -> None:
    shapes = [(1, 64), (3, BLOCK), (3, 333), (2, BLOCK + 8), (1, 64)]
    check_sums(run_all(sum_large, size, 2 * size * LARGE_BYTES // 8, shapes, dtype))


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_large_sums_and_their_norms(size: int, dtype: torch.dtype) -> None:
    shapes = [(2, 1, 64), (2, 3, 720), (2, 300, 16), (2, 3, BLOCK), (2, 1, 64)]
    results = run_all(sum_and_normalise, size, 2 * size * LARGE_BYTES // 8, shapes, dtype)
    check_sums([result[:, 0] for result in results])
    for call, result in enumerate(results):
        want = reference.rms_norm(result[0, 0], inputs(9, call, shapes[call][2:], torch.float32).to(dtype), 1e-3)
        for rank in range(size):
            torch.testing.assert_close(
                result[rank, 1], want, rtol=0.03, atol=1e-5
            )  # the interpreter does not round to nearest


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_gathers(size: int, dtype: torch.dtype) -> None:
    """More rows than the buffer holds at once, too, and a width that no number of ranks divides."""
    shapes = [(1, 64), (9, 6001), (2, 31)]
    results = run_all(gather, size, 2 * size * LARGE_BYTES // 8, shapes, dtype)
    for call, (result, (rows, width)) in enumerate(zip(results, shapes, strict=True)):
        columns = [inputs(rank, call, (rows, -(-width // size)), dtype) for rank in range(size)]
        for rank in range(size):
            assert torch.equal(result[rank], torch.cat(columns, 1)[:, :width])


def test_what_a_peer_has_sent_is_added_once_its_flag_says_so() -> None:
    residual, own, arrived = (inputs(i, 0, (3, 700), torch.float32) for i in range(3))
    want = residual + own + arrived
    collectives.add_arrived(residual, own, arrived, torch.tensor([7], dtype=torch.int32), 7)
    torch.testing.assert_close(residual, want)


def test_the_norm_of_what_a_peer_has_sent() -> None:
    residual, own, arrived, weight = (inputs(i, 0, (3, 704), torch.float32) for i in range(4))
    want, out = residual + own + arrived, torch.full((3, 704), torch.nan)
    collectives.add_arrived(residual, own, arrived, torch.tensor([7], dtype=torch.int32), 7, (weight[0], 1e-3), out)
    torch.testing.assert_close(residual, want)
    torch.testing.assert_close(out, reference.rms_norm(want, weight[0], 1e-3))


@pytest.mark.parametrize(("shape", "can"), [((3, 4096), True), ((3, 8200), False), ((3, 36), False), ((64,), False)])
def test_rows_that_are_too_wide_or_not_aligned_are_not_normalised(shape: tuple[int, ...], can: bool) -> None:
    assert collectives.can_normalise(torch.empty(shape, dtype=torch.bfloat16)) == can
