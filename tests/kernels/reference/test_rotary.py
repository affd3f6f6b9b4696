"""Rotary embedding against Hugging Face's, and what goes into the KV cache."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels import reference
from tests.support.attention_calls import spread_rope

NAN = float("nan")


def test_rope_equals_hugging_face() -> None:
    angles = torch.rand(50, 8) * 6
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    q, k, positions = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randint(0, 50, (9,), dtype=torch.int32)
    want = apply_rotary_pos_emb(q, k, cos[positions], sin[positions], unsqueeze_dim=1)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    torch.testing.assert_close(reference.rope(q, k, positions, table), want)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 8, 16])
def test_rope_and_store_is_norm_rotation_and_store(rotary_dim: int, normed: bool) -> None:
    qkv, positions = torch.randn(5, 8 * 16), torch.tensor([3, 0, 9, 4, 4])
    table = torch.randn(10, rotary_dim) if rotary_dim else None
    norms = dict(zip(("q_norm", "k_norm"), torch.randn(2, 16), strict=True)) if normed else {}
    slots, caches = torch.tensor([5, -1, 0, 11, 6]), torch.full((2, 3, 2, 4, 16), NAN)
    query = spread_rope(reference.rope_and_store)(
        qkv, positions, table, *caches, slots, num_heads=4, num_kv_heads=2, **norms
    )
    q, k, v = qkv.view(5, 8, 16).split((4, 2, 2), 1)
    if normed:
        q, k = reference.rms_norm(q, norms["q_norm"], 1e-6), reference.rms_norm(k, norms["k_norm"], 1e-6)
    if table is not None:
        half = rotary_dim // 2
        cos, sin = table[positions].unsqueeze(1).split(half, -1)

        def rotate(x: Any) -> Tensor:
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

        q, k = rotate(q), rotate(k)
    torch.testing.assert_close(query, q)
    want = torch.full_like(caches, NAN)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[0, slot // 4, :, slot % 4], want[1, slot // 4, :, slot % 4] = k[token], v[token]
    torch.testing.assert_close(caches, want, equal_nan=True)


def test_e4m3_rounds_to_nearest_saturates_and_keeps_what_is_not_finite_as_nan() -> None:
    x = torch.tensor([0.0, 1.0625, 1.1875, 17.0, 2**-9, 2**-11, 448.0, 900.0, 1e30, -1e30, NAN, math.inf])
    want = torch.tensor([0.0, 1.0, 1.25, 16.0, 2**-9, 0.0, 448.0, 448.0, 448.0, -448.0, NAN, NAN])
    scale = torch.tensor([1.0, 4.0])
    got = reference.to_e4m3(torch.stack((x, 4 * x)), scale)
    assert got.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(got.float(), want.expand(2, -1), rtol=0, atol=0, equal_nan=True)
    assert reference.to_e4m3(x[None, 7:10].bfloat16(), scale[:1]).float().tolist() == [[448.0, 448.0, -448.0]]


def test_interleaved_pairs_are_halves_in_another_order() -> None:
    q, k, table = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(9, 12)
    positions = torch.randint(0, 9, (5,))
    order = torch.tensor([0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11, 12, 13, 14, 15])
    halves = reference.rope(q[..., order], k[..., order], positions, table)
    pairs = reference.rope(q, k, positions, table, interleaved=True)
    for got, want in zip(pairs, halves, strict=True):
        torch.testing.assert_close(got[..., order], want)
