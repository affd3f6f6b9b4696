"""Norms and rotary embeddings of the CPU's own kernels against the reference implementations."""

from typing import Any

import pytest
import torch

from kernels import reference
from kernels.cpu import rotary
from tests.support.attention_calls import spread_rope

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed heads": {"q_norm": torch.randn(32), "k_norm": torch.randn(32), "eps": 1e-5},
    "interleaved": {"interleaved": True},
    "no rotation": {"cos_sin": None},
    "a part of the channels": {"cos_sin": torch.randn(64, 12)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 35])
def test_rope_and_store(backend: str, case: str, dtype: torch.dtype, num_tokens: int) -> None:
    options = {"cos_sin": torch.randn(64, 32), **CASES[case]}
    for name in ("q_norm", "k_norm"):
        if name in options and num_tokens == 1:  # else they are wide, as norms with an offset are
            options[name] = options[name].to(dtype)
    qkv = torch.randn(num_tokens, (3 + 2 * 2) * 32).to(dtype)
    positions, slots = torch.randint(0, 64, (num_tokens,)).int(), torch.randperm(64)[:num_tokens]
    if num_tokens > 1:
        slots[3] = -1
    results = []
    for module in (rotary, reference):
        caches = torch.full((2, 16, 2, 4, 32), 7.0, dtype=dtype)
        query = spread_rope(module.rope_and_store)(
            qkv.clone(), positions, options["cos_sin"], *caches, slots, num_heads=3, num_kv_heads=2,
            **{name: value for name, value in options.items() if name != "cos_sin"},
        )  # fmt: skip
        results.append((query, caches))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 100), (40, 64), (2, 5, 16), (0, 64)])
def test_rms_norm(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    for w in (weight.to(dtype), weight):
        got, want = (module.rms_norm(x, w, 1e-5) for module in (rotary, reference))
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0.01 if dtype == torch.bfloat16 else 1e-5)
