"""Attention on a CPU, the reference implementation and the fast one, against a loop over tokens in float64."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import BlockSparse, reference
from kernels.cpu import attention as cpu
from kernels.cpu import native_attention as native
from tests.support.attention_calls import spread
from tests.support.paged import as_a_layer_of_one_tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


class Paged:
    """Random contexts in shuffled blocks; every slot that belongs to no context holds NaN, every unused table entry
    2^30.
    """

    def __init__(
        self,
        lens: Any,
        num_kv_heads: Any = 2,
        block_size: Any = 4,
        head_dim: Any = 20,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        counts = [-(-n // block_size) for n in lens]
        num_blocks = sum(counts) + 2
        free = torch.randperm(num_blocks).tolist()
        self.block_tables = torch.full((len(lens) + 3, max(counts) + 1), 2**30, dtype=torch.int32)
        self.rows = torch.randperm(len(lens) + 3)[: len(lens)].int()
        self.context_lens = torch.tensor(lens, dtype=torch.int32)
        self.caches = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), NAN, dtype=dtype)
        self.contexts = torch.randn(2, sum(lens), num_kv_heads, head_dim, dtype=dtype).split(lens, 1)
        for row, n, count, kv in zip(self.rows.tolist(), lens, counts, self.contexts, strict=True):
            blocks = [free.pop() for _ in range(count)]
            self.block_tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            for i in range(n):
                self.caches[:, blocks[i // block_size], :, i % block_size] = kv[:, i]

    def release(self, oldest: list[int]) -> None:
        """Release the blocks wholly before each sequence's oldest key in use: they hold NaN, and their entries are -1.
        Where such an entry points, in C++ and in PyTorch, there are blocks of NaN.
        """
        for row, first in zip(self.rows.tolist(), oldest, strict=True):
            released = self.block_tables[row, : max(first, 0) // self.caches.shape[3]]
            self.caches[:, released.long()] = NAN
            released.fill_(-1)
        none = torch.full_like(self.caches[:, :1], NAN)
        self.caches = torch.cat([none, self.caches, none], 1)[:, 1:]

    def attend(
        self,
        sequence: Any,
        query: Any,
        position: Any,
        scale: Any,
        window: Any,
        soft_cap: Any,
        slopes: Any,
        sinks: Any,
        sparse: Any,
    ) -> Any:
        """One token of one sequence, query [H, D] at `position`, the slow and sure way."""
        out = torch.zeros_like(query, dtype=torch.float64)
        key, value = self.contexts[sequence].double()
        first = max(position - window + 1, 0) if window else 0
        for head in range(len(query)):
            kv_head = head * key.shape[1] // len(query)
            scores, seen = [], []
            for i in range(first, position + 1):
                if sparse is not None:
                    block, age = i // sparse.block, position // sparse.block - i // sparse.block
                    if age >= sparse.local and (block + head * sparse.head_step + 1) % sparse.stride:
                        continue
                seen.append(i)
                score = float(key[i, kv_head] @ query[head].double()) * scale
                score = soft_cap * math.tanh(score / soft_cap) if soft_cap else score
                scores.append(score - (float(slopes[head]) * (position - i) if slopes is not None else 0))
            scores += [float(sinks[head])] if sinks is not None else []
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)[: len(seen)]
            for i, weight in zip(seen, weights.tolist(), strict=True):
                out[head] += weight * value[i, kv_head]
        return out


def feature_names(options: Any) -> Any:
    return "+".join(options) or "causal"


FEATURES = [
    {},
    {"window": 9},
    {"soft_cap": 2.0},
    {"alibi_slopes": torch.rand(6) + 0.1},
    {"sinks": torch.randn(6) * 3},
    {"sparse": BlockSparse(block=4, local=2, stride=3, head_step=1)},
    {"window": 9, "soft_cap": 2.0, "alibi_slopes": torch.rand(6) + 0.1, "sinks": torch.randn(6)},
    {"alibi_slopes": torch.rand(6) + 0.1, "sparse": BlockSparse(block=8, local=1, stride=2, head_step=0)},
]
BIASED = {"distance_bias": torch.randn(6, 2 * 70 + 1), "window": 100}
WHOLE_TILES = [  # of the CPU's own kernel
    {"sparse": BlockSparse(block=64, local=2, stride=4, head_step=1)},
    {"sparse": BlockSparse(block=64, local=1, stride=3, head_step=0)},
    {"sparse": BlockSparse(block=128, local=1, stride=2, head_step=1, first_head=5), "soft_cap": 2.0},
]


def slow(paged: Any, queries: Any, options: Any) -> Tensor:
    """queries: (sequence, position, query [H, D]) -> [len(queries), H, D]."""
    window, soft_cap = options.get("window", 0), options.get("soft_cap", 0.0)
    by_head = options.get("alibi_slopes"), options.get("sinks"), options.get("sparse")
    return torch.stack([paged.attend(i, q, at, 0.3, window, soft_cap, *by_head) for i, at, q in queries])


ALL = pytest.mark.parametrize("module", [reference, cpu, native], ids=["reference", "cpu", "native"])


@pytest.fixture(params=["reference", "cpu, by head", "cpu, small groups", "cpu, large groups"])
def decode_module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "reference":
        return reference
    elements = {"cpu, by head": 1, "cpu, small groups": 200, "cpu, large groups": 1 << 20}
    monkeypatch.setattr(cpu, "GATHER_ELEMENTS", elements[request.param])
    return cpu


@pytest.fixture(params=["reference", "cpu, small tiles", "cpu, large tiles"])
def prefill_module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "reference":
        return reference
    monkeypatch.setattr(cpu, "MASK_ELEMENTS", {"cpu, small tiles": 1, "cpu, large tiles": 1 << 22}[request.param])
    return cpu


@pytest.mark.parametrize("options", FEATURES, ids=feature_names)
def test_decode_attends_as_a_loop_does(decode_module: Any, options: dict[str, Any]) -> None:
    lens = [1, 37, 0, 8, 33, 38, 40, 3, 4, 17]
    paged = Paged(lens)
    query = torch.randn(len(lens), 6, 20, dtype=torch.float64)
    got = spread(decode_module.paged_attention_decode)(
        query, *paged.caches, paged.block_tables, paged.rows, paged.context_lens, scale=0.3, **options
    )
    used = [i for i, n in enumerate(lens) if n]
    torch.testing.assert_close(got[used], slow(paged, [(i, lens[i] - 1, query[i]) for i in used], options))
    assert not got[2].any()


@pytest.mark.parametrize("options", FEATURES, ids=feature_names)
def test_prefill_attends_as_a_loop_does(prefill_module: Any, options: dict[str, Any]) -> None:
    lens, counts = [5, 40, 0, 40, 23, 1], [5, 1, 2, 33, 20, 1]  # whole prompts, one token, padding, chunks
    paged = Paged(lens)
    starts = torch.tensor([2, *counts]).cumsum(0)
    query = torch.randn(int(starts[-1]) + 3, 6, 20, dtype=torch.float64)
    out = torch.full_like(query, 7.0)
    got = spread(prefill_module.paged_attention_prefill)(
        query, *paged.caches, paged.block_tables, paged.rows, starts.int(), paged.context_lens,
        scale=0.3, out=out, **options,
    )  # fmt: skip
    assert got is out
    assert (out[:2] == 7).all()
    assert (out[-3:] == 7).all()
    for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
        mine = slice(int(starts[i]), int(starts[i + 1]))
        if n == 0:
            assert not out[mine].any()
        else:
            queries = [(i, n - count + t, q) for t, q in enumerate(query[mine])]
            torch.testing.assert_close(out[mine], slow(paged, queries, options))


@pytest.mark.parametrize("window", [1, 9, 40])
@ALL
def test_no_block_before_the_window_is_read(module: Any, window: int) -> None:
    """One after another, as prompts and as decodes in groups."""
    lens, counts = [5, 140, 40, 300, 41, 301], [5, 1, 33, 200, 1, 2]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), 6, 16)
    for decodes in (False, True):
        paged = Paged(lens, block_size=4, head_dim=16, dtype=torch.float32)
        tables = (paged.rows, *(() if decodes else (starts,)), paged.context_lens)
        name = "paged_attention_decode" if decodes else "paged_attention_prefill"
        attend, x = spread(getattr(module, name)), query[: len(lens)] if decodes else query
        want = attend(x, *paged.caches, paged.block_tables, *tables, scale=0.3, window=window)
        query_lens = [1] * len(lens) if decodes else counts
        paged.release([n - new + 1 - window for n, new in zip(lens, query_lens, strict=True)])
        got = attend(x, *paged.caches, paged.block_tables, *tables, scale=0.3, window=window)
        torch.testing.assert_close(got, want)
        assert want.isfinite().all()


@pytest.mark.parametrize("options", [FEATURES[0], FEATURES[-1]], ids=feature_names)
@pytest.mark.parametrize("dtype", DTYPES)
@ALL
def test_attention_in_every_dtype(module: Any, dtype: torch.dtype, options: Any) -> None:
    lens = [70, 3, 64]
    paged = Paged(lens, block_size=16, head_dim=64, dtype=dtype)
    query = torch.randn(3, 6, 64).to(dtype)
    tables = (*paged.caches, paged.block_tables, paged.rows)
    decoded = spread(module.paged_attention_decode)(query, *tables, paged.context_lens, scale=0.3, **options)
    prefilled = spread(module.paged_attention_prefill)(
        query, *tables, torch.arange(4, dtype=torch.int32), paged.context_lens, scale=0.3, **options
    )
    want = slow(paged, [(i, n - 1, query[i]) for i, n in enumerate(lens)], options)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for got in (decoded, prefilled):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [*FEATURES, *WHOLE_TILES, BIASED], ids=feature_names)
@pytest.mark.parametrize(("head_dim", "block_size", "dtype"), [(16, 4, torch.float32), (80, 16, torch.bfloat16)])
def test_native_attention_is_the_reference_implementations(
    backend: str, options: dict[str, Any], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Contexts longer than a tile of keys, chunks of more queries than a tile has, one that sees no key of a tile."""
    lens, counts = [5, 140, 0, 40, 300], [5, 1, 2, 33, 200]
    paged = Paged(lens, block_size=block_size, head_dim=head_dim, dtype=dtype)
    starts = torch.tensor([2, *counts]).cumsum(0).int()
    query = torch.randn(int(starts[-1]) + 3, 6, head_dim).to(dtype)
    tables, tolerance = (paged.block_tables, paged.rows), 1e-5 if dtype == torch.float32 else 0.02
    outs = [torch.full_like(query, 7.0) for _ in range(2)]
    for module, out in zip((reference, native), outs, strict=True):
        spread(module.paged_attention_prefill)(
            query, *paged.caches, *tables, starts, paged.context_lens, scale=0.3, out=out, **options
        )
    torch.testing.assert_close(outs[1], outs[0], atol=tolerance, rtol=tolerance)
    got, want = (
        spread(module.paged_attention_decode)(
            query[:5], *paged.caches, *tables, paged.context_lens, scale=0.3, **options
        )
        for module in (native, reference)
    )
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_blocks_that_no_head_of_a_group_sees_are_not_read(backend: str) -> None:
    """A token has the bits that it has when it is decoded alone."""
    if backend == "no compiler":
        pytest.skip("PyTorch reads them")
    lens, counts = [900, 700], [300, 1]
    sparse = BlockSparse(block=64, local=2, stride=6, head_step=1)  # 3 of 6 blocks for a KV head of 3 heads
    paged = Paged(lens, block_size=16, head_dim=64, dtype=torch.float32)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), 6, 64)
    lengths = (paged.block_tables, paged.rows, starts, paged.context_lens)
    attend = spread(native.paged_attention_prefill)
    want = attend(query, *paged.caches, *lengths, scale=0.3, sparse=sparse)
    for row, n, count in zip(paged.rows.tolist(), lens, counts, strict=True):
        blocks = torch.arange(-(-n // 64))
        for kv_head in range(2):
            heads = 3 * kv_head + torch.arange(3)
            vertical = ((blocks + heads[:, None] + 1) % 6 == 0).any(0)
            unseen = blocks[((n - count) // 64 - blocks >= 2) & ~vertical]
            assert len(unseen)
            pages = paged.block_tables[row, (unseen[:, None] * 4 + torch.arange(4)).flatten()]
            paged.caches[:, pages.long(), kv_head] = NAN
    got = attend(query, *paged.caches, *lengths, scale=0.3, sparse=sparse)
    assert got.equal(want)
    last = (query[starts[1:] - 1], *paged.caches, paged.block_tables, paged.rows, paged.context_lens)
    assert spread(native.paged_attention_decode)(*last, scale=0.3, sparse=sparse).equal(want[starts[1:] - 1])


@pytest.mark.parametrize("options", FEATURES, ids=feature_names)
def test_attention_over_an_e4m3_cache_is_attention_over_what_it_holds(
    decode_module: Any, options: dict[str, Any]
) -> None:
    lens = [1, 9, 40, 4, 7]
    paged, scale = Paged(lens, dtype=torch.float32), torch.rand(2, 2) + 0.1
    whole = (paged.block_tables, paged.rows)
    caches = (paged.caches / scale.view(2, 1, 2, 1, 1)).to(torch.float8_e4m3fn)
    held = caches.float() * scale.view(2, 1, 2, 1, 1)
    query, start = torch.randn(5, 6, 20), torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
    for attend, lengths in (
        (spread(decode_module.paged_attention_decode), (paged.context_lens,)),
        (spread(decode_module.paged_attention_prefill), (start, paged.context_lens)),
    ):
        got = attend(query, *caches, *whole, *lengths, scale=0.3, kv_scale=scale, **options)
        assert got.equal(attend(query, *held, *whole, *lengths, scale=0.3, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_attention_reads_an_e4m3_cache(backend: str, dtype: torch.dtype) -> None:
    """A request alone has the bits that it has beside others."""
    lens, scale = [5, 140, 40, 300], torch.rand(2, 2) + 0.1
    paged = Paged(lens, head_dim=64, dtype=torch.float32)
    caches = (paged.caches / scale.view(2, 1, 2, 1, 1)).to(torch.float8_e4m3fn)
    query = torch.randn(4, 6, 64).to(dtype)

    def decoded(module: Any, some: slice) -> Tensor:
        whole = (paged.block_tables, paged.rows[some], paged.context_lens[some])
        found: Tensor = spread(module.paged_attention_decode)(
            query[some], *caches, *whole, scale=0.3, kv_scale=scale, window=200
        )
        return found

    together, tolerance = decoded(native, slice(None)), 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(together, decoded(reference, slice(None)), atol=tolerance, rtol=tolerance)
    for i in range(0 if backend == "no compiler" else 4):
        assert decoded(native, slice(i, i + 1)).equal(together[i : i + 1])


def test_native_attention_reads_every_code_of_e4m3(backend: str) -> None:
    """With one key, the output is the value."""
    paged = Paged([1], head_dim=256, dtype=torch.float32)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    caches = torch.zeros_like(paged.caches).to(torch.float8_e4m3fn)
    caches[1].view(torch.uint8)[:] = codes.view(torch.uint8)
    whole = (paged.block_tables, paged.rows, paged.context_lens)
    got = spread(native.paged_attention_decode)(
        torch.zeros(1, 6, 256), *caches, *whole, scale=0.3, kv_scale=torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    )
    torch.testing.assert_close(got, (2 * codes.float()).expand_as(got), rtol=0, atol=0, equal_nan=True)


@ALL
@pytest.mark.parametrize("num_keys", [16, 1024])
def test_what_an_e4m3_cache_costs_attention(module: Any, num_keys: int) -> None:
    """Relative error of attention over random keys and values: about the 2.6 % that rounding to three bits makes of
    each.
    """
    paged, query = Paged([num_keys], head_dim=64, dtype=torch.float32), torch.randn(1, 8, 64)
    whole, scale = (paged.block_tables, paged.rows, paged.context_lens), torch.ones(2, 2)
    caches = paged.caches.to(torch.float8_e4m3fn)
    want = spread(module.paged_attention_decode)(query, *paged.caches, *whole, scale=0.125)
    got = spread(module.paged_attention_decode)(query, *caches, *whole, scale=0.125, kv_scale=scale)
    assert 0.005 < (got - want).norm() / want.norm() < 0.06


@ALL
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn], ids=["float32", "e4m3"])
def test_a_cache_may_be_a_layer_of_one_tensor(module: Any, kv_dtype: torch.dtype) -> None:
    lens = [1, 9, 40, 4, 7]
    paged = Paged(lens, dtype=torch.float32)
    scale = torch.ones(2, 2) if kv_dtype == torch.float8_e4m3fn else None
    query, start = torch.randn(5, 6, 20), torch.arange(6, dtype=torch.int32)
    contiguous = paged.caches.to(kv_dtype)
    strided = as_a_layer_of_one_tensor(contiguous)
    assert not strided[0].is_contiguous()
    for attend, lengths in (
        (spread(module.paged_attention_decode), (paged.context_lens,)),
        (spread(module.paged_attention_prefill), (start, paged.context_lens)),
    ):
        whole = (paged.block_tables, paged.rows, *lengths)
        want = attend(query, *contiguous, *whole, scale=0.3, kv_scale=scale)
        assert attend(query, *strided, *whole, scale=0.3, kv_scale=scale).equal(want)


@ALL
def test_blocks_before_the_window_are_not_read(module: Any) -> None:
    lens, query_lens, window = [37, 5, 20, 33], [1, 3, 20, 9], 9
    paged = Paged(lens)
    options = {"scale": 0.3, "window": window}
    query, decodes = torch.randn(33, 6, 20, dtype=torch.float64), torch.arange(4) * 8
    start = torch.tensor([0, *query_lens]).cumsum(0).int()
    whole = (paged.block_tables, paged.rows)
    want = spread(module.paged_attention_prefill)(query, *paged.caches, *whole, start, paged.context_lens, **options)
    wanted = spread(module.paged_attention_decode)(query[decodes], *paged.caches, *whole, paged.context_lens, **options)
    for row, n, count in zip(paged.rows.tolist(), lens, query_lens, strict=True):
        paged.block_tables[row, : max(n - count + 1 - window, 0) // 4] = 2**30
    got = spread(module.paged_attention_prefill)(query, *paged.caches, *whole, start, paged.context_lens, **options)
    assert got.equal(want)
    for row, n in zip(paged.rows.tolist(), lens, strict=True):
        paged.block_tables[row, : max(n - window, 0) // 4] = 2**30
    got = spread(module.paged_attention_decode)(query[decodes], *paged.caches, *whole, paged.context_lens, **options)
    assert got.equal(wanted)


SEES_LATER = [
    {},
    {"window": 9},
    {"window": 1},
    {"soft_cap": 2.0},
    {"alibi_slopes": torch.rand(6) + 0.1, "window": 30},
    {"distance_bias": torch.randn(6, 2 * 40 + 1)},
]


@pytest.mark.parametrize("options", SEES_LATER, ids=feature_names)
@ALL
def test_tokens_of_an_encoder_see_later_ones(module: Any, options: Any) -> None:
    """Whole prompts, within a window to both sides; padding gives 0."""
    lens = [5, 140, 0, 1, 64, 65]
    paged = Paged(lens, block_size=4, head_dim=16, dtype=torch.float32)
    starts = torch.tensor([0, *lens]).cumsum(0)
    query = torch.randn(int(starts[-1]), 6, 16)
    got = spread(module.paged_attention_prefill)(
        query, *paged.caches, paged.block_tables, paged.rows, starts.int(), paged.context_lens,
        scale=0.3, causal=False, **options,
    )  # fmt: skip
    for i, n in enumerate(lens):
        key, value = (x.double().repeat_interleave(3, 1).transpose(0, 1) for x in paged.contexts[i])  # [H, n, D]
        scores = query[starts[i] : starts[i + 1]].double().transpose(0, 1) @ key.mT * 0.3
        if cap := options.get("soft_cap"):
            scores = cap * (scores / cap).tanh()
        if (bias := options.get("distance_bias")) is not None:
            reach = bias.shape[1] // 2
            later = torch.arange(n) - torch.arange(n)[:, None]
            scores += bias[:, later.clamp(-reach, reach) + reach]
        distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
        if (slopes := options.get("alibi_slopes")) is not None:
            scores -= slopes[:, None, None] * distance
        if window := options.get("window"):
            scores[:, distance >= window] = -math.inf
        want = (scores.softmax(-1) @ value).transpose(0, 1).float()
        torch.testing.assert_close(got[starts[i] : starts[i + 1]], want, atol=1e-5, rtol=1e-5)
