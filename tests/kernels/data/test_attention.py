"""The arguments of attention that kernels compute, and what becomes of calls with others."""

from typing import Any

import pytest
import torch

from kernels import AttentionArgs, BlockSparse, PagedContext, reference
from kernels.cpu import alone, attention, library, native_attention
from kernels.data.attention import KnownArgs


def test_arguments_at_their_defaults_need_no_kernel_that_knows_them() -> None:
    known = KnownArgs("window", "sinks")
    assert known.cover(AttentionArgs(0.1))
    assert known.cover(AttentionArgs(0.1, 0, 0.0, None, torch.ones(2), None, None, True))
    assert known.cover(AttentionArgs(2.0, window=3, sinks=torch.zeros(2)))
    assert known.missing(AttentionArgs(0.1, soft_cap=2.0)) == ["soft_cap"]
    args = AttentionArgs(0.1, 3, alibi_slopes=torch.zeros(2), sparse=BlockSparse(4, 1, 2, 0), causal=False)
    assert known.missing(args) == ["alibi_slopes", "sparse", "causal"]
    assert not known.cover(args)


def test_a_kernel_cannot_know_an_argument_that_does_not_exist() -> None:
    with pytest.raises(AssertionError):
        KnownArgs("sink")


@pytest.mark.parametrize("module", [native_attention, alone], ids=lambda module: module.__name__)
def test_on_cpus_the_reference_implementation_computes_what_no_kernel_knows(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cache, tables = torch.randn(2, 4, 2, 16, 16), torch.randperm(4).view(2, 2).int()
    lens, starts = torch.tensor([30, 17], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
    context = PagedContext(cache[0], cache[1], tables, torch.arange(2, dtype=torch.int32), lens)
    args, query = AttentionArgs(0.3, sinks=torch.randn(4)), torch.randn(4, 4, 16)
    for each in (native_attention, attention):
        monkeypatch.setattr(each, "KNOWN", KnownArgs("window"))
    monkeypatch.setattr(library, "library", lambda: pytest.fail("the CPU's own kernel ran"))
    for name in ("_decode_one", "_decode_group", "_prefill_one"):
        monkeypatch.setattr(attention, name, lambda *_: pytest.fail("PyTorch's fused attention ran"))
    want = reference.paged_attention_prefill(query, starts, context, args)
    got = module.paged_attention_prefill(query, starts, context, args, out=torch.full_like(query, torch.nan))
    torch.testing.assert_close(got, want)
    newest = query[[2, 3]]
    got = module.paged_attention_decode(newest, context, args, out=torch.full_like(newest, torch.nan))
    torch.testing.assert_close(got, want[[2, 3]])
