"""Checks of the attention kernels against float64.

Contexts are ragged, from one token to thirty thousand; blocks lie in random order; slots that belong to no context hold
NaN, as does the output before the call; some cases put their blocks beyond 2^31 elements.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernels
from engine.models.wide_pages import WidePages
from tests.gpu.checks import BF16, E4M3, F16, F32, LIMITS, Checks, relative_error
from tests.oracles.attention import NUM_KV_HEADS, Paged, exact_attention
from tests.support.attention_calls import spread

CONTEXTS = (1, 30_000, 17, 1, 4097, 640)
QUERIES = (1, 600, 17, 1, 300, 640)  # of a prefill step on the same contexts
FAR = 2**31 // (NUM_KV_HEADS * 16 * 128) + 64  # blocks of 16 slots and 128 channels that hold more than 2^31 elements
ROUNDING_LIMIT = 0.06  # of attention over e4m3 against what was rounded to it

Calls = tuple[Callable[[], Tensor], Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of the grid: a cache, and queries of `dtype` with `group` heads for each of its heads."""

    head_dim: int
    group: int
    block_size: int
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    options: dict[str, float] = field(default_factory=dict)  # of attention
    sinks: bool = False
    sparse: kernels.BlockSparse | None = None
    skip: int = 0

    def __str__(self) -> str:
        names = [f"head_dim {self.head_dim} group {self.group} page {self.block_size}", str(self.dtype)[6:]]
        names += ["fp8 cache"] if self.kv_dtype == E4M3 else []
        names += [f"{name} {value:g}" for name, value in self.options.items()] + ["sinks"] * self.sinks
        names += [f"sparse {self.sparse.constants}"] if self.sparse else []
        return " ".join(names + (["beyond 2^31 elements"] if self.skip else []))

    def calls(self, contexts: Sequence[int], queries: Sequence[int], device: str) -> Iterator[tuple[str, Calls]]:
        """(name, (the kernel, what it should give)): decode under several plans, and prefill."""
        heads, scale = NUM_KV_HEADS * self.group, self.head_dim**-0.5
        paged = Paged.make(contexts, self.block_size, self.head_dim, self.kv_dtype, device, self.skip)
        here = (paged.kv[0], paged.kv[1], paged.block_tables, paged.rows)
        kinds: dict[str, Any] = dict(self.options)
        if self.sinks:
            kinds["sinks"] = 2 * torch.randn(heads, device=device)
        if self.sparse:
            kinds["sparse"] = self.sparse
        options = {"scale": scale, "kv_scale": paged.kv_scale, **kinds}

        def random(num_tokens: int) -> Tensor:
            return torch.randn(num_tokens, heads, self.head_dim, dtype=self.dtype, device=device)

        query = random(len(contexts))
        want = partial(exact_attention, query, paged, [1] * len(contexts), scale, **kinds)
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
                    max_seqs, heads, NUM_KV_HEADS, self.head_dim, query.device, kv_dtype=self.kv_dtype, window=window,
                    sparse=self.sparse,
                )  # fmt: skip
                plan = replace(plan, **cuts)
                kernels.plan_decode(paged.context_lens, paged.rows, plan)
                torch.cuda.synchronize()
            elif cuts:
                continue  # the reference implementation takes no plan
            out = torch.full_like(query, float("nan"))
            decode = partial(spread(kernels.paged_attention_decode), query, *here, paged.context_lens, **options)  # type: ignore[arg-type]
            yield name, (partial(decode, plan=plan, out=out), want)
            if plan is not None and self.head_dim & (self.head_dim - 1) == 0 and self.dtype == BF16:
                yield f"{name}, rounded", (partial(rounded, decode, plan), partial(rounded_after, decode, plan))
        start = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)
        query = random(sum(queries))
        want = partial(exact_attention, query, paged, queries, scale, **kinds)
        prefill = partial(spread(kernels.paged_attention_prefill), query, *here, start, paged.context_lens, **options)  # type: ignore[arg-type]
        yield "prefill", (prefill, want)
        if query.is_cuda and not kinds:
            yield "portable prefill", (partial(portable_prefill, query, start, paged, queries, scale), want)
        if self.kv_dtype == E4M3 and not self.sparse:
            yield "prefill over wide pages", (partial(wide_prefill, query, paged, contexts, queries, **options), want)


def rounded(decode: Callable[..., Tensor], plan: kernels.DecodePlan) -> Tensor:
    """Decode into codes, and what they stand for."""
    query: Tensor = decode.args[0]  # type: ignore[attr-defined]
    into = kernels.QuantizedRows.empty(query.flatten(1), E4M3, query.shape[2])
    codes = decode(plan=plan, out=into)
    return codes.double() * into.scale.double()[:, :, None]


def rounded_after(decode: Callable[..., Tensor], plan: kernels.DecodePlan) -> Tensor:
    """The result rounded by a kernel of its own."""
    out = decode(plan=plan)
    codes, scale = kernels.reference.quantize_rows(out.flatten(0, 1), E4M3)
    return (codes.double() * scale.double()).view(out.shape)


def portable_prefill(query: Tensor, start: Tensor, paged: Paged, queries: Sequence[int], scale: float) -> Tensor:
    """Prefill by Triton's kernel, also on Hopper."""
    from kernels.triton import attention_prefill

    step = kernels.prefill_tile_queries(query.shape[1], NUM_KV_HEADS, query.shape[2], query.dtype)
    tiles = kernels.make_prefill_tiles(list(queries), paged.context_lens.tolist(), step)
    context = kernels.PagedContext(paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, paged.context_lens)
    args, out = kernels.AttentionArgs(scale, kv_scale=paged.kv_scale), torch.empty_like(query)
    grid = torch.tensor(tiles, dtype=torch.int32, device=query.device)
    attention_prefill.launch(query, start, context, args, grid, out)
    return out


def wide_prefill(
    query: Tensor, paged: Paged, contexts: Sequence[int], queries: Sequence[int], window: int = 0, **options: Any
) -> Tensor:
    """Prefill as a step of the engine does it that widens the pages of an e4m3 cache."""
    wide = WidePages.of_step(queries, contexts, int(window), lambda tensor: tensor.to(query.device))
    start = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=query.device)
    keys, values = made = wide.allocate(paged.kv).pages
    wide.fill(made, paged.kv, paged.block_tables, paged.rows, paged.context_lens)
    here = keys, values, wide.block_tables, wide.rows
    return spread(kernels.paged_attention_prefill)(
        query if query.dtype == F32 else query.half(), *here, start, paged.context_lens, window=int(window), **options
    )


def shapes() -> Iterator[Shape]:
    """Shapes to check, the newest kernels first."""
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
    for head_dim, group in ((96, 4), (112, 2), (192, 4), (512, 8)):
        yield Shape(head_dim, group, 16)
    yield Shape(512, 4, 64, kv_dtype=E4M3)
    for page, window in ((16, 1000), (128, 128)):
        yield Shape(256, 2, page, options={"window": window})
    yield Shape(256, 2, 16, options={"window": 1000, "soft_cap": 20.0}, sinks=True)
    yield Shape(128, 6, 32, F16, F16, options={"window": 33})
    for head_step, stride, local in ((1, 8, 16), (0, 4, 3)):
        sparse = kernels.BlockSparse(64, local, stride, head_step)
        yield Shape(128, 4, 16, sparse=sparse)
        yield Shape(128, 4, 64, kv_dtype=E4M3, sparse=sparse)
    for kv_dtype in (BF16, E4M3):
        yield Shape(128, 4, 16, kv_dtype=kv_dtype, options={"window": 1000})
        yield Shape(128, 4, 16, kv_dtype=kv_dtype, options={"soft_cap": 20.0})
        yield Shape(64, 8, 16, kv_dtype=kv_dtype, sinks=True)
        yield Shape(64, 8, 16, kv_dtype=kv_dtype, options={"window": 128}, sinks=True)


def far_shapes() -> Iterator[Shape]:
    """Caches of 17 and of 9 GB."""
    yield Shape(128, 4, 16, skip=FAR)
    yield Shape(128, 4, 16, kv_dtype=E4M3, skip=FAR)


def check_attention(checks: Checks, contexts: Sequence[int] = CONTEXTS, queries: Sequence[int] = QUERIES) -> None:
    """Decode under several plans, and prefill, over every shape of the grid."""
    device, on_gpu = checks.device, checks.device != "cpu"
    with kernels.compiling_only() if on_gpu else contextlib.nullcontext():
        for shape in shapes() if on_gpu else ():
            for name, (call, _) in shape.calls(contexts, queries, device):
                if checks.wants(f"{name} {shape}"):
                    with contextlib.suppress(Exception):  # it says so below, when it is to run
                        call()
    far = on_gpu and torch.cuda.mem_get_info()[0] > 24e9
    for shape in itertools.chain(shapes(), far_shapes() if far else ()):
        lengths = ((200, 33), (100, 33)) if shape.skip else (contexts, queries)
        for name, (call, want) in shape.calls(*lengths, device):
            if not checks.wants(f"{name} {shape}"):
                continue
            try:
                error = relative_error(call(), want())
            except Exception as failure:  # the other kernels are still worth a check
                print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
                error = float("nan")
            checks.add(f"{name} {shape}", error, LIMITS[shape.dtype])


def check_many(checks: Checks) -> None:
    """Decode steps of many sequences and padding rows: most pairs of a sequence and a head are cut, some into many
    parts. The same bytes when it is run again.
    """
    device = checks.device
    lens = [0, *torch.randint(1, 2000, (119,)).tolist(), 9000, 0]
    window: dict[str, float] = {"window": 128}
    for shape in (
        Shape(128, 8, 16),
        Shape(128, 3, 128),
        Shape(64, 8, 16, options=window, sinks=True),
        Shape(128, 16, 32),
    ):
        name = f"decode of many: {shape}"
        if not checks.wants(name):
            continue
        paged = Paged.make(lens, shape.block_size, shape.head_dim, shape.kv_dtype, device)
        heads, scale = NUM_KV_HEADS * shape.group, shape.head_dim**-0.5
        query = torch.randn(len(lens), heads, shape.head_dim, dtype=shape.dtype, device=device)
        kinds: dict[str, Any] = {
            **shape.options,
            **({"sinks": torch.randn(heads, device=device)} if shape.sinks else {}),
        }
        context = kernels.PagedContext(paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, paged.context_lens)
        decode = partial(kernels.paged_attention_decode, query, context, kernels.AttentionArgs(scale, **kinds))
        got, again = decode(), decode()
        here = paged.context_lens > 0
        part = replace(paged, rows=paged.rows[here], context_lens=paged.context_lens[here])
        error = relative_error(got[here], exact_attention(query[here], part, [1] * int(here.sum()), scale, **kinds))
        same = torch.equal(got, again) and not got[~here].any()
        checks.add(name, error if same else float("inf"), LIMITS[shape.dtype])


def check_rounding(checks: Checks, contexts: Sequence[int] = CONTEXTS, queries: Sequence[int] = QUERIES) -> None:
    """Error of an e4m3 cache: attention against the bfloat16 values before they are stored."""
    device = checks.device
    wide = Paged.make(contexts, 16, 128, BF16, device)
    slots = torch.arange(wide.kv.shape[1] * 16, device=device)
    scale = torch.ones(2, NUM_KV_HEADS, device=device)
    kv = torch.zeros(wide.kv.shape, dtype=torch.uint8, device=device).view(E4M3)
    key, value = (x.transpose(1, 2).reshape(-1, NUM_KV_HEADS, 128) for x in wide.kv)
    kernels.store_kv(key, value, kv[0], kv[1], slots, scale)
    query = torch.randn(sum(queries), 4 * NUM_KV_HEADS, 128, dtype=BF16, device=device)
    start = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)
    here, options = (kv[0], kv[1], wide.block_tables, wide.rows), {"scale": 128**-0.5, "kv_scale": scale}
    got = spread(kernels.paged_attention_prefill)(query, *here, start, wide.context_lens, **options)  # type: ignore[arg-type]
    error = relative_error(got, exact_attention(query, wide, queries, 128**-0.5))
    checks.add("prefill: fp8 cache against bfloat16", error, ROUNDING_LIMIT)
    query = query[start[1:].long() - 1]
    got = spread(kernels.paged_attention_decode)(query, *here, wide.context_lens, **options)  # type: ignore[arg-type]
    error = relative_error(got, exact_attention(query, wide, [1] * len(contexts), 128**-0.5))
    checks.add("decode: fp8 cache against bfloat16", error, ROUNDING_LIMIT)
