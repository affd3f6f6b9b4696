"""Work around the layers of a step on a CPU, and captured steps."""

import subprocess
import sys

import pytest
import torch

from kernels import reference
from kernels.cpu import matmul, step
from tests.support.unwritten import unwritten_is_unknown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding(backend: str, dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 24).to(dtype), torch.randint(0, 50, (70,))
    assert torch.equal(step.embedding(table, ids), table[ids])


def test_embedding_of_ids_of_other_ranks(backend: str) -> None:
    table, ids = torch.randn(50, 24), torch.randint(0, 200, (70,))
    want = torch.where(((ids >= 60) & (ids < 110))[:, None], table[(ids - 60).clamp(0, 49)], 0)
    assert torch.equal(step.embedding(table, ids, 60), want)
    assert torch.equal(reference.embedding(table, ids, 60), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [5, 16, 1000])
def test_greedy_sample(backend: str, dtype: torch.dtype, vocab_size: int) -> None:
    logits = torch.randint(-9, 9, (40, vocab_size)).to(dtype)  # many ties
    logits[1] = -torch.inf
    logits[2, 3], logits[3, 4], logits[4, 2] = torch.nan, torch.inf, -torch.inf
    assert torch.equal(step.greedy_sample(logits), reference.greedy_sample(logits))


def test_tokens_are_stored_in_their_rows(backend: str) -> None:
    records, rows, tokens = torch.arange(40).view(10, 4), torch.tensor([7, 0, 3]), torch.tensor([-5, 11, 12])
    want = records.clone()
    want[rows, 1] = tokens
    step.store_tokens(records[:, 1], rows, tokens)
    assert torch.equal(records, want)


def test_recorded_work_is_done_again_in_the_same_memory(backend: str) -> None:
    table, ids, weight = torch.randn(9, 32), torch.tensor([1, 2]), matmul.pack_weight(torch.randn(48, 32))
    with unwritten_is_unknown():  # to fill what is empty would be computing
        result, again, _ = step.record(lambda: matmul.linear(step.embedding(table, ids)[:, :], weight))
    if backend == "no compiler":
        assert again is None
        return
    assert again is not None
    ids.copy_(torch.tensor([5, 7]))
    want = matmul.linear(table[[5, 7]], weight)
    again()
    assert torch.equal(result, want)


@pytest.mark.parametrize("copies", [False, True])
def test_work_that_copies_what_cannot_be_viewed_is_not_recorded(backend: str, copies: bool) -> None:
    table, ids = torch.randn(9, 32), torch.tensor([1, 2])
    with unwritten_is_unknown(), torch.inference_mode():
        _, again, _ = step.record(lambda: step.embedding(table, ids)[:, : 16 if copies else 32].reshape(-1))
    assert (again is None) == (copies or backend == "no compiler")


def test_work_that_pytorch_computes_in_part_is_not_recorded(backend: str) -> None:
    table, ids = torch.randn(9, 32), torch.tensor([1, 2])
    result, again, _ = step.record(lambda: step.embedding(table, ids).mul_(2))
    assert again is None
    assert torch.equal(result, 2 * table[1:3])


def test_a_recording_does_not_import_the_compiler() -> None:
    """PyTorch's takes more than a second, and 300 MB."""
    code = """
import sys, torch
from kernels.cpu.step import record
result, replay, _ = record(lambda: torch.ones(4)[:2])
assert result.tolist() == [1, 1]
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
