"""The torch twins: attention against a loop over tokens in float64, the rest against Hugging Face's own modules."""

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import kernels
from kernels import reference
from kernels.cpu import attention, matmul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


class Paged:
    """Random contexts in shuffled blocks; every slot that belongs to no context holds NaN, every unused table entry 2^30."""

    def __init__(self, lens, num_kv_heads=2, block_size=4, head_dim=20, dtype=torch.float64):
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

    def attend(self, sequence, query, position, scale, window, soft_cap, slopes):
        """One token of one sequence, query [H, D] at `position`, the slow and sure way."""
        out = torch.zeros_like(query, dtype=torch.float64)
        key, value = self.contexts[sequence].double()
        first = max(position - window + 1, 0) if window else 0
        for head in range(len(query)):
            kv_head = head * key.shape[1] // len(query)
            scores = []
            for i in range(first, position + 1):
                score = float(key[i, kv_head] @ query[head].double()) * scale
                score = soft_cap * math.tanh(score / soft_cap) if soft_cap else score
                scores.append(score - (float(slopes[head]) * (position - i) if slopes is not None else 0))
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            for i, weight in enumerate(weights.tolist(), first):
                out[head] += weight * value[i, kv_head]
        return out


def feature_names(options):
    return "+".join(options) or "causal"


FEATURES = [
    {},
    {"window": 9},
    {"soft_cap": 2.0},
    {"alibi_slopes": torch.rand(6) + 0.1},
    {"window": 9, "soft_cap": 2.0, "alibi_slopes": torch.rand(6) + 0.1},
]


def slow(paged, queries, options):
    """queries: (sequence, position, query [H, D]) -> [len(queries), H, D]."""
    window, soft_cap = options.get("window", 0), options.get("soft_cap", 0.0)
    return torch.stack(
        [paged.attend(i, q, at, 0.3, window, soft_cap, options.get("alibi_slopes")) for i, at, q in queries]
    )


@pytest.mark.parametrize("gather", [1, 200, 1 << 20], ids=["by head", "small groups", "large groups"])
@pytest.mark.parametrize("options", FEATURES, ids=feature_names)
def test_decode_attends_as_a_loop_does(options, gather, monkeypatch):
    monkeypatch.setattr(attention, "GATHER_ELEMENTS", gather)
    lens = [1, 37, 0, 8, 33, 38, 40, 3, 4, 17]
    paged = Paged(lens)
    query = torch.randn(len(lens), 6, 20, dtype=torch.float64)
    got = kernels.paged_attention_decode(
        query, *paged.caches, paged.block_tables, paged.rows, paged.context_lens, scale=0.3, **options
    )
    used = [i for i, n in enumerate(lens) if n]
    torch.testing.assert_close(got[used], slow(paged, [(i, lens[i] - 1, query[i]) for i in used], options))
    assert not got[2].any()


@pytest.mark.parametrize("elements", [1, 1 << 22], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("options", FEATURES, ids=feature_names)
def test_prefill_attends_as_a_loop_does(options, elements, monkeypatch):
    monkeypatch.setattr(attention, "MASK_ELEMENTS", elements)
    lens, counts = [5, 40, 0, 40, 23, 1], [5, 1, 2, 33, 20, 1]  # whole prompts, one token, padding, chunks
    paged = Paged(lens)
    starts = torch.tensor([2, *counts]).cumsum(0)
    query = torch.randn(int(starts[-1]) + 3, 6, 20, dtype=torch.float64)
    out = torch.full_like(query, 7.0)
    got = kernels.paged_attention_prefill(
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


@pytest.mark.parametrize("options", [FEATURES[0], FEATURES[-1]], ids=feature_names)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_every_dtype(dtype, options):
    lens = [70, 3, 64]
    paged = Paged(lens, block_size=16, head_dim=64, dtype=dtype)
    query = torch.randn(3, 6, 64).to(dtype)
    tables = (*paged.caches, paged.block_tables, paged.rows)
    decoded = kernels.paged_attention_decode(query, *tables, paged.context_lens, scale=0.3, **options)
    prefilled = kernels.paged_attention_prefill(
        query, *tables, torch.arange(4, dtype=torch.int32), paged.context_lens, scale=0.3, **options
    )
    want = slow(paged, [(i, n - 1, query[i]) for i, n in enumerate(lens)], options)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for got in (decoded, prefilled):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Qwen3RMSNorm])
def test_norms_equal_hugging_face(norm, dtype):
    module = norm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x, residual = torch.randn(2, 3, 7, 96).to(dtype)
    with torch.no_grad():
        assert kernels.rms_norm(x, module.weight, 1e-5).equal(module(x))
        normed, total = kernels.add_rms_norm(x, residual, module.weight, 1e-5)
        assert total.equal(residual + x)
        assert normed.equal(module(residual + x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_equals_hugging_face(dtype):
    gate, up = torch.randn(2, 5, 40).to(dtype)
    want = torch.nn.functional.silu(gate) * up
    # Equal but for the last bits of float32: exp's differ between rows with and without a stride.
    torch.testing.assert_close(kernels.silu_and_mul(torch.cat((gate, up), -1)), want, rtol=1e-6, atol=1e-6)


def test_rope_equals_hugging_face():
    angles = torch.rand(50, 8) * 6
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    q, k, positions = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randint(0, 50, (9,), dtype=torch.int32)
    want = apply_rotary_pos_emb(q, k, cos[positions], sin[positions], unsqueeze_dim=1)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    torch.testing.assert_close(reference.rope(q, k, positions, table), want)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 8, 16])
def test_rope_and_store_is_norm_rotation_and_store(rotary_dim, normed):
    qkv, positions = torch.randn(5, 8 * 16), torch.tensor([3, 0, 9, 4, 4])
    table = torch.randn(10, rotary_dim) if rotary_dim else None
    norms = dict(zip(("q_norm", "k_norm"), torch.randn(2, 16), strict=True)) if normed else {}
    slots, caches = torch.tensor([5, -1, 0, 11, 6]), torch.full((2, 3, 2, 4, 16), NAN)
    query = kernels.rope_and_store(qkv, positions, table, *caches, slots, num_heads=4, num_kv_heads=2, **norms)
    q, k, v = qkv.view(5, 8, 16).split((4, 2, 2), 1)
    if normed:
        q, k = kernels.rms_norm(q, norms["q_norm"], 1e-6), kernels.rms_norm(k, norms["k_norm"], 1e-6)
    if table is not None:
        half = rotary_dim // 2
        cos, sin = table[positions].unsqueeze(1).split(half, -1)

        def rotate(x):
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

        q, k = rotate(q), rotate(k)
    torch.testing.assert_close(query, q)
    want = torch.full_like(caches, NAN)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[0, slot // 4, :, slot % 4], want[1, slot // 4, :, slot % 4] = k[token], v[token]
    torch.testing.assert_close(caches, want, equal_nan=True)


def test_e4m3_rounds_to_nearest_saturates_and_keeps_what_is_not_finite_as_nan():
    x = torch.tensor([0.0, 1.0625, 1.1875, 17.0, 2**-9, 2**-11, 448.0, 900.0, 1e30, -1e30, NAN, math.inf])
    want = torch.tensor([0.0, 1.0, 1.25, 16.0, 2**-9, 0.0, 448.0, 448.0, 448.0, -448.0, NAN, NAN])
    scale = torch.tensor([1.0, 4.0])
    got = reference.to_e4m3(torch.stack((x, 4 * x)), scale)
    assert got.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(got.float(), want.expand(2, -1), rtol=0, atol=0, equal_nan=True)
    assert reference.to_e4m3(x[None, 7:10].bfloat16(), scale[:1]).float().tolist() == [[448.0, 448.0, -448.0]]


@pytest.mark.parametrize("gather", [1, 1 << 20], ids=["by head", "grouped"])
@pytest.mark.parametrize("options", FEATURES, ids=feature_names)
def test_attention_over_an_e4m3_cache_is_attention_over_what_it_holds(options, gather, monkeypatch):
    monkeypatch.setattr(attention, "GATHER_ELEMENTS", gather)
    lens = [1, 9, 40, 4, 7]
    paged, scale = Paged(lens, dtype=torch.float32), torch.rand(2, 2) + 0.1
    whole = (paged.block_tables, paged.rows)
    caches = (paged.caches / scale.view(2, 1, 2, 1, 1)).to(torch.float8_e4m3fn)
    held = caches.float() * scale.view(2, 1, 2, 1, 1)
    query, start = torch.randn(5, 6, 20), torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
    for attend, lengths in (
        (kernels.paged_attention_decode, (paged.context_lens,)),
        (kernels.paged_attention_prefill, (start, paged.context_lens)),
    ):
        got = attend(query, *caches, *whole, *lengths, scale=0.3, kv_scale=scale, **options)
        assert got.equal(attend(query, *held, *whole, *lengths, scale=0.3, **options))


@pytest.mark.parametrize("num_keys", [16, 1024])
def test_what_an_e4m3_cache_costs_attention(num_keys):
    """Relative error of attention over random keys and values: about the 2.6 % that rounding to three bits makes of each."""
    paged, query = Paged([num_keys], head_dim=64, dtype=torch.float32), torch.randn(1, 8, 64)
    whole, scale = (paged.block_tables, paged.rows, paged.context_lens), torch.ones(2, 2)
    caches = paged.caches.to(torch.float8_e4m3fn)
    want = kernels.paged_attention_decode(query, *paged.caches, *whole, scale=0.125)
    got = kernels.paged_attention_decode(query, *caches, *whole, scale=0.125, kv_scale=scale)
    assert 0.005 < (got - want).norm() / want.norm() < 0.06


def test_token_logprobs():
    logits, chosen = torch.randn(4, 50).bfloat16(), torch.tensor([3, 0, 49, 7])
    logprob, rank, top_ids, top_logprobs = kernels.token_logprobs(logits, chosen, 5)
    want = logits.float().log_softmax(-1)
    torch.testing.assert_close(logprob, want[range(4), chosen])
    torch.testing.assert_close(top_logprobs, want.sort(descending=True).values[:, :5])
    torch.testing.assert_close(want.gather(1, top_ids), top_logprobs)
    assert rank.tolist() == [1 + sum(x > row[c] for x in row) for row, c in zip(logits, chosen, strict=True)]
    assert kernels.token_logprobs(logits, chosen, 0)[2].shape == (4, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_packed_weights_give_the_same_products(dtype: torch.dtype, num_tokens: int) -> None:
    x, residual = torch.randn(num_tokens, 48).to(dtype), torch.randn(num_tokens, 64).to(dtype)
    weight, bias, norm = torch.randn(64, 48).to(dtype), torch.randn(64).to(dtype), torch.randn(48).to(dtype)
    packed = matmul.pack_weight(weight)
    assert packed.shape == weight.shape
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for b in (None, bias):
        for run in (
            lambda w, b=b: matmul.linear(x, w, b),
            lambda w, b=b: matmul.linear_add(residual.clone(), x, w, b),
            lambda w, b=b: matmul.norm_linear(x, norm, 1e-5, w, b),
            lambda w, b=b: matmul.norm_swiglu(x, norm, 1e-5, w, b),
        ):
            torch.testing.assert_close(run(packed), run(weight), **tolerance)
    into = residual.clone()
    assert matmul.linear_add(into, x, packed) is into


def test_wide_weights_stay_as_they_are() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64)
    assert matmul.pack_weight(weight) is weight
