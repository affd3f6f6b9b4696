"""Adapters of a layer in Triton's interpreter, against merged matrices in float64."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernels import AdapterTokens, reference
from kernels.cuda import lora
from kernels.cuda.choice import CHOICE
from kernels.data.activation import Gate
from kernels.data.lora import LoraWeights
from kernels.triton.lora import both, gates, is_one_launch, lora_add
from tests.oracles.random_adapters import merged, random_slots


@pytest.mark.parametrize(
    ("num_tokens", "rank", "channels", "group_rows", "dtype"),
    [
        (1, 16, 96, (80,), torch.float32),  # fewer channels than a step of the loop
        (5, 16, 700, (96, 32, 32), torch.float32),  # several parts of the channels
        (70, 32, 128, (70, 70), torch.float32),  # several tiles of a slot
        (33, 48, 512, (72, 24, 24), torch.float32),  # no power of two
        (9, 16, 256, (128,), torch.float16),
    ],
)
def test_adapters_change_their_tokens_as_merged_matrices_do(
    num_tokens: int, rank: int, channels: int, group_rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights = random_slots(4, rank, channels, group_rows, dtype=dtype)
    slots = torch.randint(-1, 4, (num_tokens,), dtype=torch.int32)
    slots[0] = 2
    x = torch.randn(num_tokens, channels + 8).to(dtype)[:, :channels]  # rows that lie apart
    y = torch.randn(num_tokens, sum(group_rows) + 8).to(dtype)[:, : sum(group_rows)]
    want = merged(y, x, weights, slots)
    again, tokens = y.clone(), AdapterTokens(slots, 4)
    got = lora_add(y, x, weights, tokens)
    assert got is y
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want, atol=limit, rtol=limit)
    if is_one_launch(weights, tokens):
        for _ in range(2):  # each launch has counters of its own
            torch.testing.assert_close(both(again.clone(), x, weights, tokens), got, atol=limit, rtol=limit)


@pytest.mark.parametrize(("rows", "has_gate"), [((512, 512), True), ((512,), True), ((40, 24), False)])
def test_the_gated_activation_follows_the_adapters(rows: tuple[int, ...], has_gate: bool) -> None:
    torch.manual_seed(0)
    weights, slots = random_slots(4, 16, 96, rows), torch.randint(-1, 4, (37,), dtype=torch.int32)
    matrix, x, scale = torch.randn(sum(rows), 96) / 10, torch.randn(37, 96), 1 + torch.randn(96) / 10
    tokens = AdapterTokens(slots, 4)
    assert gates(weights, tokens) == has_gate
    normed = reference.rms_norm(x.double(), scale.double(), 1e-6)
    want = merged(normed @ matrix.double().T, normed, weights, slots)
    got = lora.adapted_linear(x, matrix, None, weights, tokens, norm=(scale, 1e-6), gate="silu")
    torch.testing.assert_close(got.double(), reference.gate_and_mul(want, "silu"), atol=1e-4, rtol=1e-4)
    residual = torch.randn(37, sum(rows))
    want += residual.double()
    got = lora.adapted_linear(x, matrix, None, weights, tokens, norm=(scale, 1e-6), residual=residual)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("rows", "rank", "gate"),
    [
        ((96, 32, 32), 16, None), ((300,), 16, None), ((64, 64), 16, "silu"), ((128,), 48, "silu"),
        ((40, 24), 16, "silu"), ((256, 256), 16, "silu"),
    ],
)  # fmt: skip
def test_one_gemm_computes_the_weight_and_a_of_all_slots(
    rows: tuple[int, ...], rank: int, gate: Gate | None, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "CHOICE", replace(CHOICE, extended_tokens=64, extended_share=4.0, extended_wide=wide))
    torch.manual_seed(0)
    weights, slots = random_slots(3, rank, 96, rows), torch.randint(-1, 3, (37,), dtype=torch.int32)
    matrix, x = torch.randn(sum(rows), 96) / 10, torch.randn(37, 96)
    extended = lora.extended_weight(matrix, weights.down.shape[:2].numel())
    assert extended is not None
    extended[sum(rows) :] = weights.down.flatten(0, 1)
    # What the two kernels would read is no number, so that they cannot have run.
    weights = replace(weights, extended=extended, down=torch.full_like(weights.down, torch.nan))
    want = merged(x.double() @ matrix.double().T, x, replace(weights, down=_after(extended, sum(rows), weights)), slots)
    want = want if gate is None else reference.gate_and_mul(want, gate)
    got = lora.adapted_linear(x, extended[: sum(rows)], None, weights, AdapterTokens(slots, 3), gate=gate)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


def _after(extended: torch.Tensor, first: int, weights: LoraWeights) -> torch.Tensor:
    return extended[first:].view(weights.down.shape)


def test_large_steps_have_large_tiles() -> None:
    torch.manual_seed(0)
    slots = torch.full((1030,), -1, dtype=torch.int32)
    slots[500:600] = 1
    weights, tokens = random_slots(2, 16, 64, (64,)), AdapterTokens(slots, 2)
    x, y = torch.randn(1030, 64), torch.randn(1030, 64)
    want = merged(y, x, weights, slots)
    torch.testing.assert_close(lora_add(y, x, weights, tokens).double(), want, atol=1e-5, rtol=1e-5)
