"""Threads that work together on one product, also where several callers want them at once."""

import threading
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import matmul
from kernels.cpu.library import Native, library
from kernels.cpu.packed_weight import NativeWeight


@pytest.fixture
def native() -> Iterator[Native]:
    native = library()
    if native is None:
        pytest.skip("no compiler is installed")
    native.set_threads(4)
    yield native
    native.set_threads(1)


def test_each_piece_is_computed_once(native: Native) -> None:
    """Added to a sum, a piece that is computed twice or not at all shows. Long enough for helpers to rest in
    between.
    """
    weight, x = torch.randn(512, 64), torch.randn(3, 64)
    packed = matmul.pack_weight(weight)
    assert isinstance(packed, NativeWeight)
    results = []

    def add() -> None:
        total = torch.zeros(3, 512)
        for _ in range(2000):
            matmul.linear_add(total, x, packed)
        results.append(total)

    native.set_threads(1)
    add()
    native.set_threads(4)
    callers = [threading.Thread(target=add) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.equal(each, results[0]) for each in results)
    assert len(results) == 3
