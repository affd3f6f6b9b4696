"""The Hopper prefill kernel on a Hopper GPU against the reference implementation in float64; run with
TRITON_INTERPRET=0.
"""

import itertools
import os
import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import AttentionArgs, reference
from kernels.cuda import attention
from kernels.cuda.choice import GLUON
from kernels.data.plan import make_prefill_tiles, prefill_tile_queries
from kernels.gluon.attention import prefill
from tests.support.attention_calls import spread
from tests.support.paged import as_a_layer_of_one_tensor

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not run Gluon"),
    pytest.mark.skipif(not GLUON, reason="this Triton's Gluon is not known"),
]

SHAPES = [  # query heads for each KV head, KV heads, head_dim, page, dtype
    (4, 2, 128, 16, torch.bfloat16),
    (1, 2, 128, 16, torch.bfloat16),
    (2, 8, 128, 8, torch.bfloat16),
    (2, 2, 64, 16, torch.bfloat16),
    (4, 2, 80, 32, torch.bfloat16),
    (8, 1, 128, 64, torch.float16),
    (16, 1, 128, 128, torch.float16),
    (7, 4, 128, 16, torch.bfloat16),
    (3, 2, 128, 16, torch.bfloat16),
    (4, 2, 128, 256, torch.float16),
    (2, 2, 256, 16, torch.bfloat16),
    (4, 1, 192, 64, torch.bfloat16),
]
OPTIONS = {
    "causal": {},
    "window": {"window": 100},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 300, "soft_cap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("layer", [False, True], ids=["contiguous", "a layer of one tensor"])
@pytest.mark.parametrize(("group", "num_kv_heads", "head_dim", "page", "dtype"), SHAPES)
def test_prefill_on_hopper(
    group: int, num_kv_heads: int, head_dim: int, page: int, dtype: torch.dtype, layer: bool, options: dict[str, Any]
) -> None:
    """Whole prompts and chunks on a context; slots outside the contexts hold NaN, table entries behind them a wrong
    block.
    """
    torch.manual_seed(0)
    lens, query_lens = [1, 300, 64, 1300, 17, 3000, 129, 128], [1, 70, 64, 500, 17, 129, 129, 1]
    counts = [-(-n // page) for n in lens]
    ids = random.Random(0).sample(range(sum(counts) + 3), sum(counts))
    tables = torch.full((len(lens) + 1, max(counts) + 1), 2**30, dtype=torch.int32)
    kv = torch.full((2, sum(counts) + 3, num_kv_heads, page, head_dim), float("nan"))
    for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
        mine, ids = ids[:count], ids[count:]
        tables[i + 1, :count] = torch.tensor(mine, dtype=torch.int32)
        for j, block in enumerate(mine):
            used = min(page, n - j * page)
            kv[:, block, :, :used] = torch.randn(2, num_kv_heads, used, head_dim)
    kv = kv.to(dtype)
    starts = torch.tensor([3, *itertools.accumulate(query_lens, initial=3)][1:], dtype=torch.int32)
    query = torch.randn(int(starts[-1]) + 2, group * num_kv_heads, head_dim).to(dtype)
    rows, context_lens = torch.arange(1, len(lens) + 1, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
    scale = head_dim**-0.5

    if "sinks" in options:
        options = options | {"sinks": 2 * torch.randn(group * num_kv_heads)}
    expected = torch.full_like(query, 7.0).double()
    spread(reference.paged_attention_prefill)(
        query.double(), *kv.double(), tables, rows, starts, context_lens, scale=scale, out=expected, **options
    )
    step = prefill_tile_queries(group * num_kv_heads, num_kv_heads, head_dim, dtype)
    tiles = torch.tensor(make_prefill_tiles(query_lens, lens, step), dtype=torch.int32)
    on_gpu = as_a_layer_of_one_tensor(kv.cuda()) if layer else kv.cuda()
    cuda = [query.cuda(), *on_gpu, *(x.cuda() for x in (tables, rows, starts, context_lens))]
    assert prefill.supports(cuda[0], cuda[1], AttentionArgs(scale))
    options = {name: value.cuda() if torch.is_tensor(value) else value for name, value in options.items()}
    first = None
    for _ in range(3):
        out = torch.full_like(cuda[0], 7.0)
        spread(attention.paged_attention_prefill)(*cuda, scale=scale, tiles=tiles.cuda(), out=out, **options)
        first = out if first is None else first
        assert out.equal(first)
    got = first.double().cpu()  # type: ignore[union-attr]
    for begin, end in itertools.pairwise([0, *starts.tolist(), len(query)]):
        error = (got[begin:end] - expected[begin:end]).norm() / expected[begin:end].norm()
        assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3)
