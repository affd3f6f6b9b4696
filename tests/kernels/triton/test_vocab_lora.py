"""Embeddings and output heads with adapters in Triton's interpreter, against the reference implementation."""

import pytest
import torch

pytest.importorskip("triton")

from kernels import AdapterTokens, EmbeddingLora, RetrainedRows, reference
from kernels.triton.vocab_lora import adapt_embedding, retrained_logits

SLOTS, HIDDEN = 3, 72


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 16), (torch.float32, 80), (torch.float16, 16)])
def test_embeddings_with_adapters(dtype: torch.dtype, rank: int) -> None:
    torch.manual_seed(0)
    vocab, first, count = 20, 5, 4
    indices = torch.zeros(SLOTS, vocab, dtype=torch.int32)
    indices[0, 3], indices[2, :4] = 2, torch.arange(1, 5)
    weights = EmbeddingLora(
        torch.randn(SLOTS, vocab, rank).to(dtype),
        (torch.randn(SLOTS, HIDDEN, rank) / rank**0.5).to(dtype),
        torch.randn(SLOTS, count, HIDDEN).to(dtype),
        indices,
        first,
    )
    ids = torch.arange(40) % 30  # of other ranks, too
    y, slots = torch.randn(40, HIDDEN).to(dtype), (torch.arange(40) % 4 - 1).int()
    tokens = AdapterTokens(slots, SLOTS)
    want = reference.adapt_embedding(y.clone(), ids, weights, tokens)
    assert not torch.equal(want, y)
    got = adapt_embedding(y, ids, weights, tokens)
    assert got is y
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, want, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_of_retrained_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    count, vocab = 70, 200  # two programs
    ids = torch.zeros(SLOTS, count, dtype=torch.int32)
    ids[0, :3] = torch.tensor([8, 1, 200])
    ids[2] = torch.randperm(vocab)[:count].int() + 1
    rows = torch.randn(SLOTS, count, HIDDEN).to(dtype)
    rows[0, 3:] = torch.nan  # not written
    weights = RetrainedRows(rows, ids)
    x, y = torch.randn(37, HIDDEN).to(dtype), torch.randn(37, vocab + 8).to(dtype)[:, :vocab]
    tokens = AdapterTokens((torch.arange(37) % 4 - 1).int(), SLOTS)
    want = y.clone()
    for token, slot in enumerate(tokens.slots.tolist()):
        for row in range(count if slot >= 0 else 0):
            if ids[slot, row]:
                want[token, ids[slot, row] - 1] = x[token].float() @ rows[slot, row].float()
    assert not torch.equal(want, y)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(reference.retrained_logits(y.clone(), x, weights, tokens), want, atol=limit, rtol=limit)
    got = retrained_logits(y, x, weights, tokens)
    assert got is y
    torch.testing.assert_close(got, want, atol=limit, rtol=limit)
