"""Decoding over latents in Gluon, on torch tensors: `tests.support.gluon_on_tensors`."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernels import PagedLatents, reference
from kernels.cuda import attention
from kernels.data.plan import latent_decode_plan
from kernels.gluon.attention import latent_decode
from kernels.triton.attention_decode import plan_decode
from tests.support.gluon_on_tensors import run_on_tensors

NAN = float("nan")
L, R, PAGE = 512, 64, 16


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = ("_blocks", "_copy", "_load_queries", "_store_sums", "_attend_tile")
    run_on_tensors(monkeypatch, latent_decode, "_latent_decode_kernel", helpers)
    monkeypatch.setattr(latent_decode, "_zero", lambda: 0)
    monkeypatch.setattr(latent_decode, "wait_for_inputs", lambda: None)
    monkeypatch.setattr(latent_decode, "launch_dependents", lambda: None)


@pytest.mark.parametrize(
    ("num_heads", "processors"),
    [(20, 1), (16, 3), (40, 2), (16, 40)],
    ids=["whole", "cut", "groups", "more than tiles"],
)
@pytest.mark.usefixtures("without_layouts")
def test_against_the_reference(monkeypatch: pytest.MonkeyPatch, num_heads: int, processors: int) -> None:
    """Contexts are whole, cut among programs, or empty; unused slots are NaN, and so is scratch memory."""
    torch.manual_seed(0)
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    lens = [1, 700, 0, 64, 193, 0]
    counts = [-(-n // PAGE) for n in lens]
    ids = random.Random(1).sample(range(sum(counts)), sum(counts))
    tables = torch.full((8, max(counts) + 1), 2**30, dtype=torch.int32)
    rows = torch.tensor([3, 0, 7, 1, 2, 4], dtype=torch.int32)
    cache = torch.full((sum(counts), 2, PAGE, L + R), NAN, dtype=torch.bfloat16)[:, :1]
    for row, n, count in zip(rows.tolist(), lens, counts, strict=True):
        mine, ids = ids[:count], ids[count:]
        tables[row, :count] = torch.tensor(mine)
        for i, block in enumerate(mine):
            used = min(PAGE, n - i * PAGE)
            cache[block, 0, :used] = torch.randn(used, L + R).bfloat16()
    query, lengths = torch.randn(len(lens), num_heads, L + R).bfloat16(), torch.tensor(lens, dtype=torch.int32)
    out = torch.full((len(lens), num_heads, L), NAN, dtype=torch.bfloat16)
    plan = latent_decode_plan(len(lens), num_heads, L, query.device)
    plan.partial_out.fill_(NAN)
    plan.partial_stats.fill_(NAN)
    plan_decode(lengths, rows, plan)
    assert latent_decode.supports(query, cache, out)
    latents = PagedLatents(cache, tables, rows, lengths)
    got = attention.latent_attention_decode(query, latents, scale=0.05, out=out, plan=plan)
    wide = replace(latents, cache=cache.double())
    want = reference.latent_attention_decode(query.double(), wide, scale=0.05, out=out.double())
    assert got is out
    assert (got.double() - want).norm() < 6e-3 * want.norm()
    assert not got[2].any()
