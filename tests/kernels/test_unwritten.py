"""The mode that all tests of kernels run in."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from kernels import DecodePlan, reference
from tests.support.unwritten import unwritten_is_unknown


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_what_nothing_wrote_is_nan(dtype: torch.dtype) -> None:
    x = torch.empty(5, dtype=dtype)
    for fresh in (x, torch.empty_like(x), x.new_empty(2, 3), torch.empty_strided((2, 3), (1, 2), dtype=dtype)):
        assert fresh.float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_nothing_wrote_is_no_index(dtype: torch.dtype) -> None:
    assert (torch.empty(5, dtype=dtype) > 1 << 30).all()


def test_workspaces_are_covered() -> None:
    plan = DecodePlan.allocate(4, 8, 2, 64, torch.device("cpu"), num_programs=3)
    assert plan.partial_out.isnan().all()
    assert plan.partial_stats.isnan().all()


def test_a_result_made_of_it_is_nan() -> None:
    assert reference.silu_and_mul(torch.empty(2, 8)).isnan().all()


@triton.jit
def _read(source, target, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < n, other=0.0)
    tl.store(target + i, x * 0.0)


def test_a_load_of_it_is_found_though_nothing_comes_of_it() -> None:
    source, target = torch.empty(8), torch.zeros(8)
    source[:5] = float("nan")  # of another kind
    _read[(1,)](source, target, 5, BLOCK=8)
    with pytest.raises(Exception, match="a kernel reads memory that nothing has written"):
        _read[(1,)](source, target, 6, BLOCK=8)


def test_the_mode_can_be_left_where_kernels_are_timed() -> None:
    filled = torch.empty
    with unwritten_is_unknown():
        assert torch.empty is not filled
    assert torch.empty is filled
