"""Low-bit codes as they are stored."""

import pytest
import torch

from kernels import QuantizedWeight, pack_e2m1, reference
from kernels.reference import quantized

TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize(("n", "k"), [(1, 8), (7, 16), (50, 2880)])
def test_e2m1_is_what_was_packed(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in parts of three rows."""
    codes = torch.randint(16, (n, k), generator=torch.Generator().manual_seed(k), dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert packed.shape == (n, k // 2)
    weight = QuantizedWeight("e2m1", packed, torch.ones(n, 1), k)
    values = reference.dequantize(packed, weight, torch.float32)
    assert torch.equal(values, TABLE[codes.long()])
    assert torch.equal(values.signbit(), codes >= 8)
    monkeypatch.setattr(quantized, "PACKED_AT_ONCE", 3 * k)
    assert torch.equal(pack_e2m1(codes), packed)


def test_any_bytes_are_codes_of_e2m1() -> None:
    """So random bytes are random weights."""
    packed = torch.randint(256, (1000, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(pack_e2m1(quantized._unpack_e2m1(packed)), packed)


def test_rows_of_e2m1_that_words_do_not_divide() -> None:
    with pytest.raises(AssertionError, match="multiple of 8 codes, not 12"):
        pack_e2m1(torch.zeros(2, 12, dtype=torch.uint8))
