"""Checks the attention kernels and the products of small batches against float64, on the device at hand.

Contexts are ragged, from one token to thirty thousand; blocks lie in random order; slots that belong to no context hold NaN;
some cases put their blocks beyond 2^31 elements. `python -m benchmarks.check_kernels` runs these with all other checks.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels import reference

CONTEXTS = [1, 30_000, 17, 1, 4097, 640]
QUERIES = [1, 600, 17, 1, 300, 640]  # of a prefill step on the same contexts
NUM_KV_HEADS = 2
BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
FAR = 2**31 // (NUM_KV_HEADS * 16 * 128) + 64  # blocks of 16 slots and 128 channels that hold more than 2^31 elements

LIMITS = {BF16: 6e-3, F16: 1e-3, F32: 1e-5}
ROUNDING_LIMIT = 0.06  # of attention over e4m3 against what was rounded to it

Errors = Iterator[tuple[str, float, float]]  # name, relative error, the most that it may be
Calls = tuple[Callable[[], Tensor], Callable[[], Tensor]]


@dataclass(slots=True)
class Paged:
    """Random contexts in a paged cache [2, num_blocks, num_kv_heads, block_size, head_dim] that is NaN everywhere else."""

    kv: Tensor
    kv_scale: Tensor | None
    block_tables: Tensor
    rows: Tensor
    context_lens: Tensor

    @classmethod
    def make(
        cls, lens: list[int], block_size: int, head_dim: int, dtype: torch.dtype, device: str, skip: int = 0
    ) -> Paged:
        """`skip`: blocks of the cache that stay unused before the first one in use."""
        counts = [-(-n // block_size) for n in lens]
        shape = (2, skip + sum(counts), NUM_KV_HEADS, block_size, head_dim)
        kv_scale = None
        if dtype == E4M3:
            kv = torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)  # its NaN
            kv_scale = torch.rand(2, NUM_KV_HEADS, device=device) + 0.02
        else:
            kv = torch.full(shape, float("nan"), dtype=dtype, device=device)
        order = (torch.randperm(sum(counts)) + skip).tolist()
        tables = torch.full((len(lens), max(counts)), skip + sum(counts) + 7, dtype=torch.int32)
        for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
            mine = [order.pop() for _ in range(count)]
            tables[i, :count] = torch.tensor(mine)
            new = torch.randn(2, count, *shape[2:], device=device)
            if kv_scale is not None:
                new /= kv_scale.view(2, 1, -1, 1, 1)
            if unused := count * block_size - n:
                new[:, -1, :, -unused:] = float("nan")
            _bits(kv)[:, torch.tensor(mine, device=device)] = _bits(new.to(dtype))
        rows = torch.randperm(len(lens))
        shuffled = torch.empty_like(tables)
        shuffled[rows] = tables
        context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        return cls(kv, kv_scale, shuffled.to(device), rows.int().to(device), context_lens)

    def context(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, n, D] of one sequence in float64, times their scales."""
        n, block_size = int(self.context_lens[sequence]), self.kv.shape[3]
        blocks = self.block_tables[int(self.rows[sequence]), : -(-n // block_size)].long()
        mine = _bits(self.kv)[:, blocks].view(self.kv.dtype).float().double().transpose(1, 2).flatten(2, 3)[:, :, :n]
        if self.kv_scale is not None:
            mine *= self.kv_scale.double().view(2, -1, 1, 1)
        return mine[0], mine[1]


def _bits(x: Tensor) -> Tensor:
    """Float8, of which PyTorch indexes none, as bytes; anything else as it is."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def exact_attention(
    query: Tensor, paged: Paged, query_lens: list[int], scale: float, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """[T, H, D] float64: the newest `query_lens` tokens of each sequence over its context, all scores at once."""
    out = []
    for i, q in enumerate(query.double().split(query_lens)):
        key, value = paged.context(i)
        length, context = len(q), key.shape[1]
        q = q.unflatten(1, (NUM_KV_HEADS, -1)).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
        scores = q @ key.unsqueeze(1).mT * scale
        if soft_cap:
            scores = soft_cap * (scores / soft_cap).tanh()
        ages = torch.arange(context - length, context, device=q.device).unsqueeze(1) - torch.arange(
            context, device=q.device
        )
        seen = (ages >= 0) & (ages < window) if window else ages >= 0
        attended = scores.masked_fill_(~seen, float("-inf")).softmax(-1) @ value.unsqueeze(1)
        out.append(attended.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(out)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want.cpu().double()).norm() / want.cpu().double().norm())


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of the grid: a cache, and queries of `dtype` with `group` heads for each of its heads."""

    head_dim: int
    group: int
    block_size: int
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    options: dict[str, float] = field(default_factory=dict)  # of attention
    skip: int = 0

    def __str__(self) -> str:
        names = [f"head_dim {self.head_dim} group {self.group} page {self.block_size}", str(self.dtype)[6:]]
        names += ["fp8 cache"] if self.kv_dtype == E4M3 else []
        names += [f"{name} {value:g}" for name, value in self.options.items()]
        return " ".join(names + (["beyond 2^31 elements"] if self.skip else []))

    def calls(self, contexts: list[int], queries: list[int], device: str) -> Iterator[tuple[str, Calls]]:
        """(name, (the kernel, what it should give)): decode under several plans, and prefill."""
        heads, scale = NUM_KV_HEADS * self.group, self.head_dim**-0.5
        paged = Paged.make(contexts, self.block_size, self.head_dim, self.kv_dtype, device, self.skip)
        here = (paged.kv[0], paged.kv[1], paged.block_tables, paged.rows)
        options = {"scale": scale, "kv_scale": paged.kv_scale, **self.options}

        def random(num_tokens: int) -> Tensor:
            return torch.randn(num_tokens, heads, self.head_dim, dtype=self.dtype, device=device)

        query = random(len(contexts))
        want = partial(exact_attention, query, paged, [1] * len(contexts), scale, **self.options)  # type: ignore[arg-type]
        window = int(self.options.get("window", 0))
        plans: list[tuple[str, int, dict[str, Any]]] = [
            ("decode for latency", 16, {"tile": 32, "num_warps": 1, "min_tiles": 1}),
            ("decode for few", 16, {}),
            ("decode for bandwidth", 64, {}),
            ("decode merging once", 16, {"fan_in": 0}),
        ]
        if window:
            plans.append(("decode with a plan of the whole context", 16, {"window": 0}))
        for name, max_seqs, cuts in plans:
            plan = None
            if query.is_cuda:
                plan = kernels.DecodePlan.allocate(
                    max_seqs, heads, NUM_KV_HEADS, self.head_dim, query.device, kv_dtype=self.kv_dtype, window=window
                )
                plan = replace(plan, **cuts)
                kernels.plan_decode(paged.context_lens, paged.rows, plan)
                torch.cuda.synchronize()
            elif cuts:
                continue  # a CPU has no plans
            out = torch.full_like(query, float("nan"))
            decode = partial(kernels.paged_attention_decode, query, *here, paged.context_lens, **options)  # type: ignore[arg-type]
            yield name, (partial(decode, plan=plan, out=out), want)
        start = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)
        query = random(sum(queries))
        want = partial(exact_attention, query, paged, queries, scale, **self.options)  # type: ignore[arg-type]
        prefill = partial(kernels.paged_attention_prefill, query, *here, start, paged.context_lens, **options)  # type: ignore[arg-type]
        yield "prefill", (prefill, want)
        if query.is_cuda and not self.options:  # what is named for tuning is the portable kernel's
            yield "portable prefill", (partial(prefill, num_warps=4), want)  # type: ignore[call-arg]


def shapes() -> Iterator[Shape]:
    """What is checked, the newest kernels first."""
    for group in (7, 3, 6, 5):
        yield Shape(128, group, 16)
    yield Shape(64, 7, 64)
    for block_size, head_dim, group in itertools.product((16, 64), (64, 80, 128, 256), (4, 7)):
        yield Shape(head_dim, group, block_size, kv_dtype=E4M3)
    yield Shape(128, 1, 16, kv_dtype=E4M3)
    yield Shape(128, 8, 128, F16, E4M3)
    yield Shape(64, 4, 16, F32, E4M3)
    for block_size, head_dim, group in itertools.product((16, 64), (64, 80, 128, 256), (1, 4, 8)):
        yield Shape(head_dim, group, block_size)
    yield Shape(128, 4, 16, F16, F16)
    for kv_dtype in (BF16, E4M3):
        yield Shape(128, 4, 16, kv_dtype=kv_dtype, options={"window": 1000})
        yield Shape(128, 4, 16, kv_dtype=kv_dtype, options={"soft_cap": 20.0})


def far_shapes() -> Iterator[Shape]:
    """Caches of 17 and of 9 GB."""
    yield Shape(128, 4, 16, skip=FAR)
    yield Shape(128, 4, 16, kv_dtype=E4M3, skip=FAR)


def attention_errors(device: str, contexts: list[int] = CONTEXTS, queries: list[int] = QUERIES) -> Errors:
    """Every check of attention."""
    on_gpu = device != "cpu"
    with kernels.compiling_only() if on_gpu else contextlib.nullcontext():
        for shape in shapes() if on_gpu else ():
            for _, (call, _) in shape.calls(contexts, queries, device):
                with contextlib.suppress(Exception):  # it says so below, when it is to run
                    call()
    far = on_gpu and torch.cuda.mem_get_info()[0] > 24e9
    for shape in itertools.chain(shapes(), far_shapes() if far else ()):
        lens = ([200, 33], [100, 33]) if shape.skip else (contexts, queries)
        for name, (call, want) in shape.calls(*lens, device):
            try:
                error = relative_error(call(), want())
            except Exception as failure:  # the other kernels are still worth a check
                print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
                error = float("nan")
            yield f"{name} {shape}", error, LIMITS[shape.dtype]


def rounding_errors(device: str, contexts: list[int] = CONTEXTS, queries: list[int] = QUERIES) -> Errors:
    """What an e4m3 cache costs: attention against the bfloat16 values before they are stored."""
    wide = Paged.make(contexts, 16, 128, BF16, device)
    slots = torch.arange(wide.kv.shape[1] * 16, device=device)
    scale = torch.ones(2, NUM_KV_HEADS, device=device)
    kv = torch.zeros(wide.kv.shape, dtype=torch.uint8, device=device).view(E4M3)
    key, value = (x.transpose(1, 2).reshape(-1, NUM_KV_HEADS, 128) for x in wide.kv)
    kernels.store_kv(key, value, kv[0], kv[1], slots, scale)
    query = torch.randn(sum(queries), 4 * NUM_KV_HEADS, 128, dtype=BF16, device=device)
    start = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)
    here, options = (kv[0], kv[1], wide.block_tables, wide.rows), {"scale": 128**-0.5, "kv_scale": scale}
    got = kernels.paged_attention_prefill(query, *here, start, wide.context_lens, **options)  # type: ignore[arg-type]
    error = relative_error(got, exact_attention(query, wide, queries, 128**-0.5))
    yield "prefill: fp8 cache against bfloat16", error, ROUNDING_LIMIT
    query = query[start[1:].long() - 1]
    got = kernels.paged_attention_decode(query, *here, wide.context_lens, **options)  # type: ignore[arg-type]
    error = relative_error(got, exact_attention(query, wide, [1] * len(contexts), 128**-0.5))
    yield "decode: fp8 cache against bfloat16", error, ROUNDING_LIMIT


def product_errors(device: str) -> Errors:
    """The four forms of a linear layer."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=BF16, device=device)

    for num_tokens, n, k in (
        (1, 4096, 1024), (2, 3072, 4096), (1, 1000, 1000), (7, 1024, 3072), (16, 1024, 3072), (3, 4096, 1024), (13, 4096, 1024),
        (8, 1024, 2048), (12, 1024, 2048), (1, 3072, 1024), (16, 3072, 1024), (6, 6144, 4096), (8, 14336, 4096),
        (8, 4096, 14336), (5, 4096, 4096), (11, 1000, 192), (4, 40_000, 256), (300, 4096, 1024),
    ):  # fmt: skip
        x, weight, wide, norm, bias = random(num_tokens, k), random(n, k), random(2 * n, k), random(k), random(n)
        residual = random(num_tokens, n)
        calls: dict[str, tuple[Callable[..., Tensor], tuple[Tensor | float, ...]]] = {
            "linear": (kernels.linear, (x, weight, bias)),
            "linear_add": (kernels.linear_add, (residual, x, weight)),
            "norm_linear": (kernels.norm_linear, (x, norm, 1e-6, weight, bias)),
            "norm_swiglu": (kernels.norm_swiglu, (x, norm, 1e-6, wide)),
        }
        for name, (call, arguments) in calls.items():
            exact = [a.double() if isinstance(a, Tensor) else a for a in arguments]
            want = getattr(reference, name)(*exact)
            limit = LIMITS[BF16] * (2 if name == "norm_swiglu" else 1)  # it rounds the norm, two products and theirs
            yield f"{name} {num_tokens} x {k} -> {n}", relative_error(call(*arguments), want), limit
