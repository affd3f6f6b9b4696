"""The paged attention kernels in Triton's interpreter, against the reference implementation in float64."""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import AttentionArgs, BlockSparse, PagedContext, QuantizedRows, reference
from kernels.cuda import attention
from kernels.data.attention import KnownArgs
from kernels.data.plan import DecodePlan, make_prefill_tiles
from kernels.triton import attention_decode, attention_prefill
from kernels.triton.scaled import quantize_rows
from tests.support.attention_calls import spread
from tests.support.paged import as_a_layer_of_one_tensor

NAN = float("nan")
E4M3 = torch.float8_e4m3fn


@dataclass
class Case:
    kv: Tensor
    block_tables: Tensor
    rows: Tensor
    context_lens: Tensor
    kv_scale: Tensor | None = None

    @classmethod
    def make(
        cls, lens: Any, num_kv_heads: Any, page: Any, head_dim: Any, dtype: torch.dtype = torch.float32, seed: Any = 0
    ) -> Any:
        """Random contexts in shuffled blocks; every slot that belongs to no context holds NaN."""
        torch.manual_seed(seed)
        counts = [-(-n // page) for n in lens]
        num_blocks = sum(counts) + 3
        ids = random.Random(seed).sample(range(num_blocks), sum(counts))
        num_rows = len(lens) + 2
        tables = torch.full((num_rows, max(counts) + 1), 2**30, dtype=torch.int32)
        rows = torch.randperm(num_rows)[: len(lens)].int()
        kv = torch.full((2, num_blocks, num_kv_heads, page, head_dim), NAN)
        for row, n, count in zip(rows.tolist(), lens, counts, strict=True):
            mine, ids = ids[:count], ids[count:]
            tables[row, :count] = torch.tensor(mine, dtype=torch.int32)
            for i, block in enumerate(mine):
                used = min(page, n - i * page)
                kv[:, block, :, :used] = torch.randn(2, num_kv_heads, used, head_dim)
        scale = None
        if dtype == E4M3:
            scale = torch.rand(2, num_kv_heads) + 0.01
            kv = kv / scale.view(2, 1, -1, 1, 1)
        return cls(kv.to(dtype), tables, rows, torch.tensor(lens, dtype=torch.int32), scale)

    def forget(self, oldest: Any) -> Any:
        """Release the blocks of each sequence that lie wholly before its oldest key in use: they hold NaN, and their
        table entries are -1. There is a block of NaN where such an entry points.
        """
        kv, page = self.kv.float(), self.kv.shape[3]
        for row, first in zip(self.rows.tolist(), oldest, strict=True):
            released = self.block_tables[row, : max(first, 0) // page]
            kv[:, released.long()] = NAN
            released.fill_(-1)
        self.kv = torch.cat([torch.full_like(kv[:, :1], NAN), kv], 1).to(self.kv.dtype)[:, 1:]
        return self

    def exact(self) -> Any:
        """The keys and values as float64, for the reference implementation."""
        kv = self.kv.double()
        return kv if self.kv_scale is None else kv * self.kv_scale.view(2, 1, -1, 1, 1)

    def with_drafts(self, counts: Any) -> Any:
        """Let the newest tokens of each row be sequences, as many as `counts` says: one, and its drafts."""
        each = [
            (row, n - before)
            for row, n, count in zip(self.rows.tolist(), self.context_lens.tolist(), counts, strict=True)
            for before in reversed(range(count))
        ]
        self.rows, self.context_lens = torch.tensor(each, dtype=torch.int32).T.contiguous()
        return self

    def decode(
        self, query: Any, num_programs: Any, max_seqs: Any = 9, cuts: Any = None, plan_window: Any = 0,
        queries: int = 1, **options: Any,
    ) -> Any:  # fmt: skip
        shape = (
            max_seqs, query.shape[1], self.kv.shape[2], query.shape[2], torch.device("cpu"), num_programs,
            self.kv.dtype,
            plan_window, options.get("sparse"), queries,
        )  # fmt: skip
        plan, expected = (dataclasses.replace(DecodePlan.allocate(*shape), **(cuts or {})) for _ in "ab")
        attention_decode.plan_decode(self.context_lens, self.rows, plan)
        reference.plan_decode(self.context_lens, self.rows, expected)
        busy = expected.work[:, 0] > 0
        assert plan.spans.equal(expected.spans)
        assert plan.work[:, :2].equal(expected.work[:, :2])
        assert plan.work[busy].equal(expected.work[busy])
        out = torch.full_like(query, NAN)
        is_rounded = self.kv_scale is None and (query.shape[2] & (query.shape[2] - 1)) == 0
        for _ in range(1 if is_rounded else 2):  # a later run finds the workspace as the first left it
            spread(attention.paged_attention_decode)(
                query,
                self.kv[0],
                self.kv[1],
                self.block_tables,
                self.rows,
                self.context_lens,
                plan=plan,
                kv_scale=self.kv_scale,
                out=out,
                **options,
            )
        assert not plan.arrivals.any()
        assert not plan.group_arrivals.any()
        if is_rounded:
            self._decode_rounded(query, plan, out, **options)
        return out, spread(reference.paged_attention_decode)(
            query.double(), *self.exact(), self.block_tables, self.rows, self.context_lens, **options
        )

    def _decode_rounded(self, query: Tensor, plan: DecodePlan, out: Tensor, **options: Any) -> None:
        """The same as codes, in the workspace that the first run left: those of the result. The scales of many
        heads lie by groups.
        """
        by_group = query.shape[1] > 4
        into = QuantizedRows.empty(query.flatten(1), torch.int8, query.shape[2], by_group)
        got = spread(attention.paged_attention_decode)(
            query,
            self.kv[0],
            self.kv[1],
            self.block_tables,
            self.rows,
            self.context_lens,
            plan=plan,
            out=into,
            **options,
        )
        codes, scale = quantize_rows(out.flatten(1), torch.int8, group=query.shape[2], by_group=by_group)
        assert torch.equal(got.flatten(1), codes[: len(query)])
        assert torch.equal(into.scale[: len(query)], scale[: len(query)])

    def prefill(self, query: Any, query_start: Any, **options: Any) -> Any:
        out = torch.full_like(query, 7.0)
        args = (self.block_tables, self.rows, query_start, self.context_lens)
        spread(attention.paged_attention_prefill)(
            query, self.kv[0], self.kv[1], *args, kv_scale=self.kv_scale, out=out, **options
        )
        expected = torch.full_like(query, 7.0).double()
        spread(reference.paged_attention_prefill)(query.double(), *self.exact(), *args, out=expected, **options)
        return out, expected


def options(kind: Any, num_heads: Any) -> Any:
    return {
        "causal": {},
        "window": {"window": 37},
        "soft_cap": {"soft_cap": 3.0},
        "alibi": {"alibi_slopes": torch.rand(num_heads)},
        "sinks": {"sinks": 4 * torch.randn(num_heads)},
        "all": {"window": 100, "soft_cap": 3.0, "alibi_slopes": torch.rand(num_heads), "sinks": torch.randn(num_heads)},
    }[kind]


SHAPES = [(1, 64, 16), (4, 64, 16), (8, 128, 64), (3, 80, 16), (7, 16, 8), (2, 256, 16), (4, 32, 64)]


@pytest.mark.parametrize("max_seqs", [9, 40], ids=["for latency", "for bandwidth"])
@pytest.mark.parametrize(("group", "head_dim", "page"), SHAPES)
def test_decode_shapes(group: int, head_dim: int, page: int, max_seqs: int) -> None:
    lens = [1, 300, 64, 130, 0, 17, 0, 128]
    case = Case.make(lens, 2, page, head_dim)
    query = torch.randn(len(lens), 2 * group, head_dim)
    out, expected = case.decode(query, 5, max_seqs, scale=head_dim**-0.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["window", "soft_cap", "alibi", "sinks", "all"])
def test_decode_options(kind: str) -> None:
    lens = [1, 300, 64, 36, 37, 38, 200]
    case = Case.make(lens, 2, 16, 64)
    out, expected = case.decode(torch.randn(len(lens), 8, 64), 7, scale=0.2, **options(kind, 8))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_seqs", [2, 9, 40], ids=["tiles of 32", "tiles of 64", "tiles of 64 or 128"])
@pytest.mark.parametrize(
    ("window", "dtype"),
    [*((window, torch.float32) for window in (1, 37, 64, 200, 520)), (200, E4M3)],
    ids=["1", "37", "64", "200", "520", "200 of e4m3"],
)
def test_a_plan_with_a_window_needs_nothing_before_it(
    window: int, dtype: Any, max_seqs: int, request: pytest.FixtureRequest
) -> None:
    """Contexts shorter and longer than the window, which is cut by tiles, blocks and programs or fits them."""
    if dtype == E4M3:
        request.getfixturevalue("exact_float8")
    lens = [700, 1] if max_seqs == 2 else [1, 700, 64, 0, 36, 37, 38, 201, 130]
    case = Case.make(lens, 2, 16, 32, dtype).forget([n - window for n in lens])
    query = torch.randn(len(lens), 8, 32)
    out, expected = case.decode(query, 23, max_seqs, plan_window=window, scale=0.2, window=window)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "queries", "options"),
    [
        ((4, 1), 4, {}),
        ((6, 2), 5, {"window": 9}),
        ((4, 2), 2, {"window": 40}),
        ((2, 2), 8, {"alibi_slopes": torch.tensor([0.3, 0.02]), "sinks": torch.tensor([0.5, -1.0])}),
        ((4, 2), 8, {"soft_cap": 4.0}),
    ],
)
@pytest.mark.parametrize("num_programs", [3, 29])
def test_successive_tokens_of_a_row_share_a_tile_of_queries(
    heads: tuple[int, int], queries: int, options: dict[str, Any], num_programs: int
) -> None:
    counts = [1, 3, 7, 1, 2, 9]
    case = Case.make([5, 70, 300, 33, 2, 130], heads[1], 16, 16).with_drafts(counts)
    padded = torch.tensor([99, 99], dtype=torch.int32)
    case.rows, case.context_lens = torch.cat([case.rows, padded]), torch.cat([case.context_lens, 0 * padded])
    query = torch.randn(sum(counts) + 2, heads[0], 16)
    out, expected = case.decode(query, num_programs, 30, queries=queries, scale=0.2, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_keys_of_a_row_are_counted_once_for_its_queries() -> None:
    lens = torch.tensor([5, 61, 62, 63, 64, 65, 66, 80, 80, 0, 0], dtype=torch.int32)
    rows = torch.tensor([3, 1, 1, 1, 1, 1, 1, 2, 4, 9, 9], dtype=torch.int32)
    plan = DecodePlan.allocate(11, 4, 1, 16, torch.device("cpu"), 64, queries=4)
    attention_decode.plan_decode(lens, rows, plan)
    assert plan.spans.tolist() == [1, 3, 0, 0, 3, 0, 0, 1, 1, 0, 0]
    tiles = [-(-n // plan.tile) for n in (5, 63, 66, 80, 80)]
    assert int(plan.work[:, 0].sum()) == sum(tiles)


def test_a_plan_counts_only_tiles_inside_the_window() -> None:
    lens = torch.tensor([32_768] * 8, dtype=torch.int32)
    rows = torch.arange(8, dtype=torch.int32)
    for window, tiles in ((0, 8 * 512), (4096, 8 * 64), (4000, 8 * 63)):
        plan = DecodePlan.allocate(8, 8, 1, 128, torch.device("cpu"), 64, window=window)
        attention_decode.plan_decode(lens, rows, plan)
        assert int(plan.work[:, 0].sum()) == tiles
        assert int(plan.work[:, 0].max()) == -(-tiles // 64)


def test_a_plan_with_a_window_is_for_that_window() -> None:
    case = Case.make([50, 3], 2, 16, 16)
    for window in (0, 30):
        with pytest.raises(AssertionError):
            case.decode(torch.randn(2, 4, 16), 3, plan_window=20, scale=1.0, window=window)


@pytest.mark.parametrize(
    ("num_programs", "fan_in", "min_tiles"),
    [
        (1, 0, 2), (2, 0, 2), (3, 0, 1), (16, 0, 2), (61, 0, 1), (61, 2, 2), (61, 4, 2), (16, 1, 2), (61, 2, 1),
        (5, 0, 8),
    ],
)  # fmt: skip
def test_decode_is_the_same_however_it_is_split(num_programs: int, fan_in: int, min_tiles: int) -> None:
    lens = [1000, 1, 0, 64, 450, 150, 33, 90, 0]
    case = Case.make(lens, 2, 16, 16)
    cuts = {"fan_in": fan_in, "min_tiles": min_tiles}
    out, expected = case.decode(torch.randn(len(lens), 4, 16), num_programs, cuts=cuts, scale=0.25)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_decode_of_nothing() -> None:
    case = Case.make([0, 0], 2, 16, 16)
    out, _ = case.decode(torch.randn(2, 4, 16), 3, scale=0.25)
    assert not out.any()


def test_half_precision() -> None:
    """float16 only: the interpreter multiplies bfloat16 matrices as if their bits were integers."""
    dtype = torch.float16
    lens = [200, 65, 3]
    case = Case.make(lens, 2, 16, 64, dtype)
    out, expected = case.decode(torch.randn(3, 8, 64, dtype=dtype), 5, scale=0.125)
    assert (out.double() - expected).norm() / expected.norm() < 1e-2
    start = torch.tensor([0, 150, 151, 154], dtype=torch.int32)
    out, expected = case.prefill(torch.randn(154, 8, 64, dtype=dtype), start, scale=0.125)
    assert (out.double() - expected).norm() / expected.norm() < 1e-2


def chunks(lens: Any, query_lens: Any, first: Any = 3) -> Tensor:
    starts = [first]
    for n in query_lens:
        starts.append(starts[-1] + n)
    return torch.tensor(starts, dtype=torch.int32)


@pytest.mark.parametrize(("group", "head_dim", "page"), SHAPES)
def test_prefill_shapes(group: int, head_dim: int, page: int) -> None:
    """Whole prompts, chunks on a context, one-token chunks; tokens before the first chunk are left alone."""
    lens, query_lens = [1, 300, 64, 130, 17], [1, 70, 64, 1, 17]
    case = Case.make(lens, 2, page, head_dim)
    start = chunks(lens, query_lens)
    out, expected = case.prefill(torch.randn(int(start[-1]), 2 * group, head_dim), start, scale=head_dim**-0.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["window", "soft_cap", "alibi", "sinks", "all"])
def test_prefill_options(kind: str) -> None:
    lens, query_lens = [1, 300, 64, 150, 150], [1, 70, 64, 150, 2]
    case = Case.make(lens, 2, 16, 32)
    start = chunks(lens, query_lens)
    out, expected = case.prefill(torch.randn(int(start[-1]), 8, 32), start, scale=0.2, **options(kind, 8))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "window", "alibi", "all"])
def test_tokens_of_an_encoder_see_later_ones(kind: str) -> None:
    lens = [1, 300, 64, 150, 0]
    case = Case.make(lens, 2, 16, 32)
    start = chunks(lens, lens)
    how = options(kind, 8) | {"causal": False}
    out, expected = case.prefill(torch.randn(int(start[-1]), 8, 32), start, scale=0.2, **how)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 37, 64, 200])
def test_prefill_needs_nothing_before_the_window(window: int) -> None:
    lens, query_lens = [1, 300, 64, 200, 150], [1, 130, 64, 20, 2]
    case = Case.make(lens, 2, 16, 32).forget([n - q + 1 - window for n, q in zip(lens, query_lens, strict=True)])
    start = chunks(lens, query_lens)
    out, expected = case.prefill(torch.randn(int(start[-1]), 8, 32), start, scale=0.2, window=window)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


FEWER_SHAPES = [*SHAPES[1:5], *(pytest.param(*shape, marks=pytest.mark.slow) for shape in (SHAPES[0], *SHAPES[5:]))]
PLANS = [pytest.param(9, torch.float16, id="for latency"), pytest.param(40, torch.float32, id="for bandwidth")]


@pytest.mark.parametrize(("max_seqs", "dtype"), PLANS)
@pytest.mark.parametrize(("group", "head_dim", "page"), FEWER_SHAPES)
def test_decode_of_an_e4m3_cache(
    group: int, head_dim: int, page: int, max_seqs: int, dtype: torch.dtype, exact_float8: None
) -> None:
    lens = [1, 300, 64, 130, 0, 17, 0, 128]
    case = Case.make(lens, 2, page, head_dim, E4M3)
    query = torch.randn(len(lens), 2 * group, head_dim, dtype=dtype)
    out, expected = case.decode(query, 5, max_seqs, scale=head_dim**-0.5)
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (3e-3, 3e-3)
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("group", "head_dim", "page"), FEWER_SHAPES)
def test_prefill_of_an_e4m3_cache(group: int, head_dim: int, page: int, exact_float8: None) -> None:
    lens, query_lens = [1, 300, 64, 130, 17], [1, 70, 64, 1, 17]
    case = Case.make(lens, 2, page, head_dim, E4M3)
    start = chunks(lens, query_lens)
    out, expected = case.prefill(torch.randn(int(start[-1]), 2 * group, head_dim), start, scale=head_dim**-0.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, E4M3], ids=["float32", "e4m3"])
def test_a_cache_may_be_a_layer_of_one_tensor(dtype: Any, request: pytest.FixtureRequest) -> None:
    if dtype == E4M3:
        request.getfixturevalue("exact_float8")
    lens, query_lens = [1, 300, 64, 130], [1, 70, 64, 1]
    case = Case.make(lens, 2, 16, 64, dtype)
    case.kv = as_a_layer_of_one_tensor(case.kv)
    assert not case.kv[0].is_contiguous()
    out, expected = case.decode(torch.randn(4, 8, 64), 5, 40, scale=0.125)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    start = chunks(lens, query_lens)
    out, expected = case.prefill(torch.randn(int(start[-1]), 8, 64), start, scale=0.125)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["soft_cap", "all"])
def test_options_with_an_e4m3_cache(kind: str, exact_float8: None) -> None:
    lens, query_lens = [1, 300, 64, 36, 200], [1, 130, 64, 1, 2]
    case = Case.make(lens, 2, 16, 32, E4M3)
    out, expected = case.decode(torch.randn(5, 8, 32), 7, 40, scale=0.2, **options(kind, 8))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    start = chunks(lens, query_lens)
    out, expected = case.prefill(torch.randn(int(start[-1]), 8, 32), start, scale=0.2, **options(kind, 8))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


SPARSE = [
    pytest.param(BlockSparse(block=64, local=2, stride=3, head_step=1), id="heads differ"),
    pytest.param(BlockSparse(block=32, local=1, stride=4, head_step=2, first_head=3), id="steps of two"),
    pytest.param(BlockSparse(block=16, local=5, stride=7, head_step=0), id="heads alike"),
    pytest.param(BlockSparse(block=64, local=20, stride=8, head_step=1), id="all local"),
]


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("sparse", SPARSE)
def test_decode_of_some_blocks(sparse: BlockSparse, group: int) -> None:
    lens = [1, 700, 64, 0, 65, 449, 33]
    case = Case.make(lens, 2, 16, 32)
    options = {"sparse": sparse, "sinks": torch.randn(2 * group)}
    out, expected = case.decode(torch.randn(len(lens), 2 * group, 32), 13, scale=0.2, **options)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("sparse", SPARSE)
def test_prefill_of_some_blocks(sparse: BlockSparse, group: int) -> None:
    lens, query_lens = [1, 400, 64, 150, 150], [1, 70, 64, 150, 2]
    case = Case.make(lens, 2, 16, 32)
    start = chunks(lens, query_lens)
    out, expected = case.prefill(torch.randn(int(start[-1]), 2 * group, 32), start, scale=0.2, sparse=sparse)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 4])
def test_blocks_that_no_head_sees_are_not_read(group: int) -> None:
    """Nor do they count in a plan: NaN is in them."""
    sparse, lens, heads = BlockSparse(block=16, local=2, stride=8, head_step=1), [700, 90], 2 * group
    case = Case.make(lens, 2, 16, 32)
    query = torch.randn(2, heads, 32)
    _, expected = case.decode(query, 13, scale=0.2, sparse=sparse)
    kv = case.kv.clone()
    for row, n in zip(case.rows.tolist(), lens, strict=True):
        blocks = torch.arange(-(-n // 16))
        seen = sparse.seen(torch.tensor([n - 1]), blocks * 16, torch.arange(heads))[:, 0].view(2, group, -1).any(1)
        for kv_head in range(2):
            case.kv[:, case.block_tables[row, blocks[~seen[kv_head]]].long(), kv_head] = NAN
    assert case.kv.isnan().sum() > kv.isnan().sum()
    out = spread(attention.paged_attention_decode)(
        query, case.kv[0], case.kv[1], case.block_tables, case.rows, case.context_lens, scale=0.2, sparse=sparse,
        plan=_written_plan(case, sparse, heads),
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def _written_plan(case: Any, sparse: BlockSparse, num_heads: int) -> DecodePlan:
    plan = DecodePlan.allocate(9, num_heads, 2, 32, torch.device("cpu"), 13, sparse=sparse)
    attention_decode.plan_decode(case.context_lens, case.rows, plan)
    counted = sum(sparse.num_tiles(n, plan.tile, num_heads // 2) for n in case.context_lens.tolist())
    assert int(plan.work[:, 0].sum()) == 2 * counted
    return plan


def test_tiles_cover_every_query_once_longest_first() -> None:
    tiles = make_prefill_tiles([5, 1, 9], [100, 1, 9], 4)
    assert sorted(tiles) == [(0, 0), (0, 4), (1, 0), (2, 0), (2, 4), (2, 8)]
    assert tiles[:2] == [(0, 4), (0, 0)]


def test_decode_takes_the_prefill_kernel_for_what_only_that_one_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    case, query = Case.make([1, 0, 40, 17], 2, 16, 32), torch.randn(4, 4, 32)
    context = PagedContext(case.kv[0], case.kv[1], case.block_tables, case.rows, case.context_lens)
    args = AttentionArgs(0.3, window=9, sinks=torch.randn(4))
    want = reference.paged_attention_decode(query.double(), dataclasses.replace(context, **exact(case)), args)
    monkeypatch.setattr(attention_decode, "KNOWN", KnownArgs("window"))
    monkeypatch.setattr(attention_decode, "launch", lambda *_: pytest.fail("the decode kernel ran"))
    out = torch.full_like(query, NAN)
    assert attention.paged_attention_decode(query, context, args, out=out) is out
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    into = QuantizedRows.empty(query.flatten(1), torch.int8, 32)
    got = attention.paged_attention_decode(query, context, args, out=into)
    codes, scale = reference.quantize_rows(out.flatten(0, 1), torch.int8)
    assert got.equal(codes.view(got.shape))
    assert into.codes.view(codes.shape).equal(codes)
    torch.testing.assert_close(into.scale, scale.view(4, 4))


def exact(case: Case) -> dict[str, Tensor]:
    keys, values = case.exact()
    return {"key_cache": keys, "value_cache": values}


def test_an_argument_that_no_kernel_computes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case, query = Case.make([5], 2, 16, 32), torch.randn(5, 4, 32)
    context = PagedContext(case.kv[0], case.kv[1], case.block_tables, case.rows, case.context_lens)
    for module in (attention_decode, attention_prefill):
        monkeypatch.setattr(module, "KNOWN", KnownArgs("window"))
    args, starts = AttentionArgs(0.3, soft_cap=2.0, sinks=torch.randn(4)), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="computes attention with soft_cap, sinks"):
        attention.paged_attention_prefill(query, starts, context, args)
    with pytest.raises(NotImplementedError, match="computes attention with soft_cap, sinks"):
        attention.paged_attention_decode(query[:1], context, args)
