"""Matrices of bfloat16 in 12 bits a weight come back bit for bit."""

import pytest
import torch
from torch import Tensor

from kernels.data.compressed_weight import LISTED, compress, decompress


def random_stack(count: int, n: int, k: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(count, n, k).bfloat16() * 0.02


def assert_comes_back(weight: Tensor, gated: bool) -> None:
    compressed = compress(weight, gated)
    assert compressed is not None
    assert compressed.shape == tuple(weight.shape)
    assert compressed.codes.nbytes == 0.75 * weight.nbytes
    assert torch.equal(decompress(compressed).view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize(("gated", "n", "k"), [(True, 512, 192), (False, 128, 64), (False, 384, 2048)])
def test_random_weights(gated: bool, n: int, k: int) -> None:
    assert_comes_back(random_stack(2, n, k), gated)


def test_zeros_and_tiny_weights() -> None:
    """Zeros have a sign; tiny weights may be subnormal; a row may have nothing else."""
    weight = random_stack(2, 256, 128)
    weight[0, 5, :7], weight[0, 6, 3], weight[0, 9], weight[1, 11] = 0, -0.0, 0, -0.0
    weight[1, 17, 9], weight[1, 40, 1], weight[1, 41, :20] = 1e-30, -1e-39, 3e-38
    weight[0, 100] *= 2.0**-100
    for gated in (False, True):
        assert_comes_back(weight, gated)


def test_large_weights() -> None:
    """A row's largest weight says which ones are small: one outlier may make all others so."""
    weight = random_stack(1, 128, 64)
    weight[0, 3, 5] = 2.0**15
    assert_comes_back(weight, False)
    weight[0, 3, 5] = 2.0**16
    assert compress(weight, False) is None


def test_room_for_small_weights() -> None:
    weight = random_stack(1, 128, 256).abs().clamp(min=0.01)
    for number, room in ((32, 32), (33, 64), (LISTED[-1], 128)):
        weight[0, 70, :number] = 2.0**-40
        compressed = compress(weight, False)
        assert compressed is not None
        assert compressed.small.shape == (1, 2, room)
        assert_comes_back(weight, False)
    weight[0, 71, 0] = 2.0**-40
    assert compress(weight, False) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_not_finite(value: float) -> None:
    weight = random_stack(1, 128, 64)
    weight[0, 1, 2] = value
    assert compress(weight, False) is None


def test_what_does_not_fit() -> None:
    assert compress(random_stack(1, 128, 64), True) is None
    assert compress(random_stack(1, 192, 64), False) is None
    assert compress(random_stack(1, 128, 96), False) is None
    assert compress(random_stack(1, 128, 64).float(), False) is None
