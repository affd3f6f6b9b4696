"""Checks the attention kernels and the products of small batches against float64 twins, on the device at hand.

Contexts are ragged, from one token to thirty thousand; blocks lie in random order; slots that belong to no context hold NaN;
one case puts its blocks beyond 2^31 elements. `python -m benchmarks.check_kernels` runs these with all other checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from kernels import reference

CONTEXTS = [1, 30_000, 17, 1, 4097, 640]
QUERIES = [1, 600, 17, 1, 300, 640]  # of a prefill step on the same contexts


@dataclass(slots=True)
class Paged:
    """Random contexts in a paged cache [2, num_blocks, num_kv_heads, block_size, head_dim] that is NaN everywhere else."""

    kv: Tensor
    block_tables: Tensor
    rows: Tensor
    context_lens: Tensor

    @classmethod
    def make(
        cls,
        lens: list[int],
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        skip: int = 0,
    ) -> Paged:
        """`skip`: blocks of the cache that stay unused before the first one in use."""
        counts = [-(-n // block_size) for n in lens]
        num_blocks = skip + sum(counts)
        kv = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype, device=device)
        order = (torch.randperm(sum(counts)) + skip).tolist()
        tables = torch.full((len(lens), max(counts)), num_blocks + 7, dtype=torch.int32)
        for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
            mine = [order.pop() for _ in range(count)]
            tables[i, :count] = torch.tensor(mine)
            at = torch.tensor(mine, device=device)
            new = torch.randn(2, count, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
            if unused := count * block_size - n:
                new[:, -1, :, -unused:] = float("nan")
            kv[:, at] = new
        rows = torch.randperm(len(lens))
        shuffled = torch.empty_like(tables)
        shuffled[rows] = tables
        return cls(kv, shuffled.to(device), rows.int().to(device), torch.tensor(lens, dtype=torch.int32, device=device))

    def on_cpu(self, skip: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The twin's arguments in float64: key cache, value cache, block tables, rows, context lengths."""
        kv = self.kv[:, skip:].cpu().double()
        return kv[0], kv[1], self.block_tables.cpu() - skip, self.rows.cpu(), self.context_lens.cpu()


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want.cpu().double()).norm() / want.cpu().double().norm())


def attention_errors(
    lens: list[int],
    query_lens: list[int],
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    skip: int = 0,
) -> dict[str, float]:
    """Relative errors of decode (planned for latency and for bandwidth) and prefill."""
    num_kv_heads = 2
    heads, scale = num_kv_heads * group, head_dim**-0.5
    paged = Paged.make(lens, num_kv_heads, block_size, head_dim, dtype, device, skip)
    here = (paged.kv[0], paged.kv[1], paged.block_tables, paged.rows)
    twin = paged.on_cpu(skip)
    query = torch.randn(len(lens), heads, head_dim, dtype=dtype, device=device)
    want = reference.paged_attention_decode(query.cpu().double(), *twin, scale=scale)
    errors = {}
    for name, max_seqs in (("decode for latency", kernels.FEW_SEQS), ("decode for bandwidth", 4 * kernels.FEW_SEQS)):
        out = torch.full_like(query, float("nan"))
        plan = None
        if query.is_cuda:
            plan = kernels.DecodePlan.allocate(max_seqs, heads, num_kv_heads, head_dim, device=query.device)
            kernels.plan_decode(paged.context_lens, paged.rows, plan)
            torch.cuda.synchronize()
        kernels.paged_attention_decode(query, *here, paged.context_lens, scale=scale, plan=plan, out=out)
        errors[name] = relative_error(out, want)
    start = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device)
    query = torch.randn(sum(query_lens), heads, head_dim, dtype=dtype, device=device)
    want = reference.paged_attention_prefill(query.cpu().double(), *twin[:4], start.cpu(), twin[4], scale=scale)
    got = kernels.paged_attention_prefill(query, *here, start, paged.context_lens, scale=scale)
    errors["prefill"] = relative_error(got, want)
    return errors


def product_errors(num_tokens: int, n: int, k: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Relative errors of the four forms of a linear layer."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x, weight, wide, norm, bias = random(num_tokens, k), random(n, k), random(2 * n, k), random(k), random(n)
    residual = random(num_tokens, n)
    calls: dict[str, tuple[Callable[..., Tensor], tuple[Tensor | float, ...]]] = {
        "linear": (kernels.linear, (x, weight, bias)),
        "linear_add": (kernels.linear_add, (residual, x, weight)),
        "norm_linear": (kernels.norm_linear, (x, norm, 1e-6, weight, bias)),
        "norm_swiglu": (kernels.norm_swiglu, (x, norm, 1e-6, wide)),
    }
    errors = {}
    for name, (call, arguments) in calls.items():
        exact = [a.cpu().double() if isinstance(a, Tensor) else a for a in arguments]
        want = getattr(reference, name)(*exact)
        errors[name] = relative_error(call(*arguments), want)
    return errors


def all_errors(
    device: str, contexts: list[int] = CONTEXTS, queries: list[int] = QUERIES
) -> Iterator[tuple[str, float]]:
    """(name, relative error) of every check; inputs are bfloat16."""
    bf16 = torch.bfloat16
    for block_size, head_dim, group in itertools.product((16, 64), (64, 80, 128, 256), (1, 4, 8)):
        errors = attention_errors(contexts, queries, group, head_dim, block_size, bf16, device)
        yield from ((f"{name} head_dim {head_dim} group {group} page {block_size}", e) for name, e in errors.items())
    far = 2**31 // (2 * 16 * 128) + 64  # blocks of 2 KV heads, 16 slots, 128 channels: the cache is 17 GB
    if device != "cpu" and torch.cuda.mem_get_info()[0] > 24e9:
        errors = attention_errors([200, 33], [100, 33], 4, 128, 16, bf16, device, skip=far)
        yield from ((f"{name} beyond 2^31 elements", e) for name, e in errors.items())
    for num_tokens, n, k in ((1, 4096, 1024), (2, 3072, 4096), (1, 1000, 1000), (7, 1024, 3072), (300, 4096, 1024)):
        errors = product_errors(num_tokens, n, k, bf16, device)
        yield from ((f"{name} {num_tokens} x {k} -> {n}", e) for name, e in errors.items())
