"""Prefill over a bfloat16 cache, over an e4m3 cache, and over wide copies of its pages: results, and times.

Times are of a layer: keys and values are stored, older ones widened, and attention is computed.

A name that ends with a star is of what the engine does with such a step on Hopper (`kernels.data.widening`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.models.wide_pages import WidePages
from kernels.data.widening import WIDE_PAGE, can_gain, num_pairs, seconds_saved
from tests.gpu.checks import BF16, E4M3, F16, LIMITS, Checks, relative_error
from tests.oracles.attention import Paged, exact_attention

K = 1024
NUM_KV_HEADS, BLOCK_SIZE = 8, 16
HEADS = ((32, 64), (32, 128), (16, 256))  # query heads, channels
STEPS = {  # lengths of queries and contexts
    "1 x 8k": ([8 * K], [8 * K]),
    "4 x 2k": ([2 * K] * 4, [2 * K] * 4),
    "16 x 512": ([512] * 16, [512] * 16),
    "8k after 24k": ([8 * K], [32 * K]),
}
COMPARED = 32  # of each sequence the newest queries, as many as float64 has memory for


def check_codes(checks: Checks) -> None:
    """Widening changes no code's number: of all 256, NaN among them."""
    codes = torch.arange(256, dtype=torch.uint8, device=checks.device).view(E4M3).view(1, 1, 16, 16)
    zero = torch.zeros(1, 3, dtype=torch.int32, device=checks.device)
    for dtype in (BF16, F16):
        wide = torch.empty(2, 1, 1, WIDE_PAGE, 16, dtype=dtype, device=checks.device)
        kernels.widen_pages(codes, codes, zero, zero[0, :1], zero[0, :1] + 16, zero, wide)
        got, want = wide[:, 0, 0, :16].double(), codes[0, 0].double().expand(2, 16, 16)
        same = bool(torch.where(want.isnan(), got.isnan(), got == want).all())
        checks.saw(f"e4m3 codes as {str(dtype)[6:]}", same, "the same numbers" if same else "other numbers")


def check_prefill(checks: Checks) -> None:
    steps = STEPS if checks.device != "cpu" else {"1 x 200": ([200], [200]), "2 x 40 after 100": ([40] * 2, [140] * 2)}
    for (num_heads, head_dim), (name, (queries, contexts)) in itertools.product(HEADS, steps.items()):
        for kv_dtype in (BF16, E4M3):
            step = Step.make(num_heads, head_dim, kv_dtype, queries, contexts, checks.device)
            step.check(checks, f"{name} head_dim {head_dim}")


@dataclass(frozen=True, slots=True)
class Step:
    query: Tensor  # [T, H, D]
    qkv: Tensor  # [T, (H + 2 Hkv) D]: with the keys and values that are in the cache already
    slots: Tensor  # [T]
    paged: Paged
    queries: list[int]
    contexts: list[int]
    start: Tensor
    tiles: Tensor

    @classmethod
    def make(
        cls, num_heads: int, head_dim: int, kv_dtype: torch.dtype, queries: list[int], contexts: list[int], device: str
    ) -> Step:
        paged = Paged.make(contexts, BLOCK_SIZE, head_dim, kv_dtype, device, num_kv_heads=NUM_KV_HEADS)
        grid = kernels.make_prefill_tiles(
            queries, contexts, kernels.prefill_tile_queries(num_heads, NUM_KV_HEADS, head_dim, BF16)
        )
        query = torch.randn(sum(queries), num_heads, head_dim, dtype=BF16, device=device)
        keys, values, slots = paged.newest(queries)
        return cls(
            query,
            torch.cat((query, keys.to(BF16), values.to(BF16)), 1).flatten(1),
            slots,
            paged,
            queries,
            contexts,
            torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device),
            torch.tensor(grid, dtype=torch.int32, device=device),
        )

    def check(self, checks: Checks, name: str) -> None:
        narrow = self.paged.kv.dtype == E4M3
        calls: dict[str, Callable[[], Tensor]] = {"bfloat16": self.over_cache}
        if narrow:
            wide = WidePages.of_step(self.queries, self.contexts, 0, lambda tensor: tensor.to(self.query.device))
            calls = {"fp8, wide pages": partial(self.over_wide_pages, wide), "fp8": self.over_cache}
        for path, call in calls.items():
            star = " *" if narrow and (path != "fp8") == self.gains() else ""
            if checks.wants(full := f"{name} {path}{star}"):
                checks.add(full, self.error(call()), LIMITS[BF16], call, num_flops=self.num_flops, graph=True)
        if checks.wants(full := f"{name} {'fp8' if narrow else 'bfloat16'} store"):
            num_bytes = self.qkv.nbytes + self.query.nbytes + self.paged.kv[:, 0, :, 0].nbytes * len(self.slots)
            checks.add(full, 0.0, 0.0, self.store, num_bytes, graph=True)
        if narrow and checks.wants(full := f"{name} widening"):
            num_bytes = self.paged.kv[:, 0, :, 0].numel() * sum(self.contexts) * 3
            checks.add(full, 0.0, 0.0, partial(self.widen, wide), num_bytes, graph=True)

    def gains(self) -> bool:
        _, num_heads, head_dim = self.query.shape
        capability = torch.cuda.get_device_capability() if self.query.is_cuda else None
        heads = num_heads, NUM_KV_HEADS, head_dim
        return can_gain(capability, *heads, BF16) and seconds_saved(self.queries, self.contexts, 0, *heads) > 0

    @property
    def num_flops(self) -> int:
        return 4 * num_pairs(self.queries, self.contexts, 0) * self.query.shape[1] * self.query.shape[2]

    def over_cache(self) -> Tensor:
        return self.attend(self.store(), self.paged.kv, self.paged.block_tables, self.paged.rows)

    def over_wide_pages(self, wide: WidePages) -> Tensor:
        paged, copy = self.paged, wide.allocate(self.paged.kv)
        query = self.store(copy)
        wide.fill(copy.pages, paged.kv, paged.block_tables, paged.rows, None)
        return self.attend(query, copy.pages, wide.block_tables, wide.rows)

    def store(self, wide: kernels.WideCopy | None = None) -> Tensor:
        """Return the queries."""
        kv = self.paged.kv
        into = kernels.KVSlots(kv[0], kv[1], self.slots, self.paged.kv_scale, wide)
        return kernels.rope_and_store(self.qkv, self.slots, kernels.RopeArgs(self.query.shape[1], NUM_KV_HEADS), into)

    def widen(self, wide: WidePages) -> Tensor:
        """All keys and values, which no layer does that stores new ones."""
        paged, out = self.paged, wide.allocate(self.paged.kv).pages
        wide.fill(out, paged.kv, paged.block_tables, paged.rows, paged.context_lens)
        return out

    def attend(self, query: Tensor, kv: Tensor, block_tables: Tensor, rows: Tensor) -> Tensor:
        context = kernels.PagedContext(kv[0], kv[1], block_tables, rows, self.paged.context_lens)
        args = kernels.AttentionArgs(self.query.shape[2] ** -0.5, kv_scale=self.paged.kv_scale)
        return kernels.paged_attention_prefill(query, self.start, context, args, tiles=self.tiles)

    def error(self, got: Tensor) -> float:
        """Error of each sequence's newest queries."""
        newest = torch.cat([torch.arange(end - COMPARED, end) for end in itertools.accumulate(self.queries)])
        lens = [COMPARED] * len(self.queries)
        want = exact_attention(self.query[newest.to(got.device)], self.paged, lens, self.query.shape[2] ** -0.5)
        return relative_error(got[newest.to(got.device)], want)
