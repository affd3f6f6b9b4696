"""The norm, activation, rotary and KV store kernels in Triton's interpreter, against the reference implementation in
float64.

The interpreter rounds float32 to bfloat16 towards zero, so a stored value may be off by one unit in the last place,
which is twice what a GPU's may be; `close` allows for as many roundings as the operation makes.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import KV_SCALES, NextNorm, WideCopy, reference
from kernels.cuda import linear, vision
from kernels.cuda.choice import CHOICE
from kernels.triton import activation, kv_cache, norm, rotary, rotation
from tests.support.attention_calls import spread_rope
from tests.support.paged import as_a_layer_of_one_tensor
from tests.support.unwritten import unwritten_is_unknown

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def close(got: Any, want: Any, roundings: Any, scale: float | None = None) -> None:
    """`scale`: of terms that cancel, which leave errors of their size; None: the largest result."""
    unit = roundings * torch.finfo(got.dtype).eps
    if scale is None:
        scale = float(want.abs().nan_to_num().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want.double(), rtol=unit, atol=unit * scale / 4, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 2, 1536), (1, 16384), (0, 64)], ids=str)
def test_norms(shape: Any, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5), 3)
    x_weight = torch.rand(shape[-1])  # float32 also of other rows, as with an offset
    for factor in (1.0, 0.22):
        sums = residual.clone()
        assert norm.rms_norm_add(sums, x, x_weight, 1e-5, factor) is sums
        added = reference.rms_norm(x.double(), x_weight.double(), 1e-5)
        close(sums, residual.double() + factor * added, 4)
        totals = residual.clone()
        normed = norm.add_rms_norm(totals, x, weight, 1e-6, x_weight, 1e-5, factor)
        assert totals.equal(sums)
        close(normed, reference.rms_norm(sums.double(), weight.double(), 1e-6), 3)
        sums = residual.clone()
        normed = norm.add_rms_norm(sums, x, weight, 1e-5, factor=factor)
        close(sums, residual.double() + factor * x.double(), 1)
        close(normed, reference.rms_norm(sums.double(), weight.double(), 1e-5), 3)


@pytest.mark.parametrize("num_tokens", [5, 600])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_norm_after_a_product_and_a_sum(num_tokens: int, biased: bool) -> None:
    residual, x, weight = torch.randn(num_tokens, 64), torch.randn(num_tokens, 32), torch.randn(64, 32)
    bias, of_norm = torch.randn(64) if biased else None, torch.randn(64)
    total = residual.double()
    want = reference.linear_add_norm(
        total, x.double(), weight.double(), None if bias is None else bias.double(), NextNorm(of_norm.double(), 1e-6)
    )
    got = linear.linear_add_norm(residual, x, weight, bias, NextNorm(of_norm, 1e-6))
    assert isinstance(want, torch.Tensor)
    torch.testing.assert_close(residual, total.float())
    torch.testing.assert_close(got, want.float())


def test_norm_before_a_sum_with_the_weights_of_an_offset() -> None:
    """They are float32, and the norm is rounded once more than in float32: all values here are exact in bfloat16."""
    x, residual = torch.ones(2, 64, dtype=torch.bfloat16), torch.full((2, 64), 256.0, dtype=torch.bfloat16)
    weight = torch.full((64,), 1 + 2**-9 + 2**-10)
    assert norm.rms_norm_add(residual, x, weight, 0.0).eq(256).all()


def test_norm_of_rows_with_a_stride() -> None:
    packed, weight = torch.randn(5, 100), torch.randn(40)
    x, residual = packed[:, :40], packed[:, 50:90]
    close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), 3)
    want = packed.clone()
    reference.rms_norm_add(want[:, 50:90], want[:, :40], weight, 1e-5)
    norm.rms_norm_add(residual, x, weight, 1e-5)
    close(packed, want, 4)
    normed = reference.add_rms_norm(want[:, 50:90], want[:, :40], weight, 1e-5)
    close(norm.add_rms_norm(residual, x, weight, 1e-5), normed, 4)
    close(packed, want, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 2600), (2, 2, 6), (0, 64)], ids=str)
def test_gated_activations(shape: Any, dtype: torch.dtype) -> None:
    x = 10 * torch.randn(shape).to(dtype)
    close(activation.gate_and_mul(x, "silu"), reference.silu_and_mul(x.double()), 3)
    gate, up = (x / 8).double().chunk(2, dim=-1)
    largest = float((gate * up).abs().max()) if x.numel() else 0.0  # 1 + tanh(gate) may be next to nothing
    close(activation.gate_and_mul(x / 8, "gelu_tanh"), reference.gelu_and_mul((x / 8).double()), 4, largest)


@pytest.mark.filterwarnings("ignore:overflow")  # exp(200) is inf, as on a GPU, which does not warn
def test_silu_of_large_numbers() -> None:
    x = torch.tensor([[-1e4, 1e4, -200.0, 200.0, 1.0, 1.0, 1.0, 1.0]])
    assert activation.gate_and_mul(x, "silu").tolist() == [[0, 1e4, 0, 200]]
    assert activation.gate_and_mul(x, "gelu_tanh").tolist() == [[0, 1e4, 0, 200]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "size"), [(1, 3, 10), (7, 16, 72), (0, 2, 8)])
def test_rotations_of_image_tokens(num_tokens: int, num_heads: int, size: int, dtype: torch.dtype) -> None:
    """In place, in rows of a packed projection, whose other columns stay."""
    qkv = torch.randn(num_tokens, 3 * num_heads * size).to(dtype)
    angles = torch.randn(num_tokens, size // 2)
    before, query, key = qkv.clone(), *(part.unflatten(1, (num_heads, size)) for part in qkv.chunk(3, 1)[:2])
    for part in (query, key):
        want = reference.rotate_halves(part.double(), angles.cos(), angles.sin())
        close(rotation.rotate_halves(part, angles.cos(), angles.sin()), want, 3)
        close(part, want, 3)
    assert torch.equal(qkv.chunk(3, 1)[2], before.chunk(3, 1)[2])


@pytest.mark.parametrize("fused", [False, True])
def test_both_forms_of_rotations_of_image_tokens(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "CHOICE", replace(CHOICE, rotated_patches=5 if fused else 6))
    x, angles = torch.randn(5, 3, 10), torch.randn(5, 5)
    want = reference.rotate_halves(x.double(), angles.cos(), angles.sin())
    found = vision.rotate_halves(x, angles.cos(), angles.sin())
    close(found, want, 3)
    assert (found is x) == fused


class Step:
    """A packed projection whose rows have a stride, and a cache of NaN that some tokens are to be written to."""

    def __init__(
        self,
        num_heads: Any,
        num_kv_heads: Any,
        head_dim: Any,
        dtype: torch.dtype = torch.float32,
        num_tokens: Any = 5,
        block_size: Any = 4,
    ) -> None:
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = torch.randn(num_tokens, width + 16).to(dtype)[:, :width]
        self.positions = torch.randint(0, 40, (num_tokens,))
        self.caches = torch.full((2, num_tokens, num_kv_heads, block_size, head_dim), NAN, dtype=dtype)
        self.slots = torch.randperm(num_tokens * block_size)[:num_tokens]
        self.slots[1:2] = -1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "num_heads", "num_kv_heads"),
    [
        (16, 16, 4, 2),
        (64, 64, 9, 3),
        (80, 80, 4, 4),
        (80, 32, 2, 1),
        (128, 128, 16, 8),
        (256, 64, 12, 1),
        (128, 0, 4, 2),
    ],
)
def test_rope_and_store(
    head_dim: int, rotary_dim: int, num_heads: int, num_kv_heads: int, normed: bool, dtype: torch.dtype
) -> None:
    step = Step(num_heads, num_kv_heads, head_dim, dtype)
    table = torch.randn(40, rotary_dim) if rotary_dim else None
    norms = dict(zip(("q_norm", "k_norm"), torch.randn(2, head_dim).to(dtype), strict=True)) if normed else {}
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    exact = step.caches.double()
    query = spread_rope(rotary.rope_and_store)(
        step.qkv, step.positions, table, *step.caches, step.slots, **heads, **norms
    )
    want = spread_rope(reference.rope_and_store)(
        step.qkv.double().contiguous(), step.positions, table, *exact, step.slots,
        **heads, **{name: weight.double() for name, weight in norms.items()},
    )  # fmt: skip
    assert query.shape == want.shape
    close(query, want, 4)
    close(step.caches, exact, 4)


def test_rope_takes_int32_positions_and_one_norm() -> None:
    step = Step(4, 2, 16)
    table, weight, other = torch.randn(40, 16), torch.randn(16), step.caches.clone()
    got = spread_rope(rotary.rope_and_store)(
        step.qkv, step.positions.int(), table, *step.caches, step.slots, num_heads=4, num_kv_heads=2, k_norm=weight
    )
    want = spread_rope(reference.rope_and_store)(
        step.qkv.contiguous(), step.positions, table, *other, step.slots, num_heads=4, num_kv_heads=2, k_norm=weight
    )
    close(got, want, 4)
    close(step.caches, other, 4)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32)])
def test_rope_of_interleaved_pairs(head_dim: int, rotary_dim: int) -> None:
    """Pairs are channels 2i and 2i + 1; the norm's weights stay with their channels."""
    step = Step(4, 2, head_dim)
    table, weights, exact = torch.randn(40, rotary_dim), torch.randn(2, head_dim), step.caches.double()
    options = {"num_heads": 4, "num_kv_heads": 2, "interleaved": True}
    got = spread_rope(rotary.rope_and_store)(
        step.qkv, step.positions, table, *step.caches, step.slots, q_norm=weights[0], k_norm=weights[1], **options
    )
    want = spread_rope(reference.rope_and_store)(
        step.qkv.double().contiguous(), step.positions, table, *exact, step.slots,
        q_norm=weights[0].double(), k_norm=weights[1].double(), **options,
    )  # fmt: skip
    close(got, want, 4)
    close(step.caches, exact, 4)


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (3, 80), (12, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv(dtype: torch.dtype, num_kv_heads: int, head_dim: int, num_tokens: int) -> None:
    step = Step(1, num_kv_heads, head_dim, dtype, num_tokens)
    _, key, value = step.qkv.unflatten(1, (1 + 2 * num_kv_heads, head_dim)).split((1, num_kv_heads, num_kv_heads), 1)
    want = step.caches.clone()
    kv_cache.store_kv(key, value, *step.caches, step.slots)
    reference.store_kv(key, value, *want, step.slots)
    torch.testing.assert_close(step.caches, want, equal_nan=True, rtol=0, atol=0)


def quantised(step: Any) -> Any:
    """The step's caches as e4m3, and uneven scales."""
    return step.caches.to(torch.float8_e4m3fn), torch.rand(2, step.caches.shape[2]) + 0.05


def same_bits(got: Any, want: Any) -> None:
    assert got.view(torch.uint8).equal(want.view(torch.uint8))


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (3, 80), (12, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_in_e4m3(dtype: torch.dtype, num_kv_heads: int, head_dim: int, exact_float8: None) -> None:
    """Every bit, saturation and what is not finite included."""
    step = Step(1, num_kv_heads, head_dim, dtype, 6)
    step.qkv[0, head_dim : head_dim + 8] = torch.tensor([1e4, -1e4, 448.0, 0.0, -0.0, 1e-9, NAN, float("-inf")])
    _, key, value = step.qkv.unflatten(1, (1 + 2 * num_kv_heads, head_dim)).split((1, num_kv_heads, num_kv_heads), 1)
    caches, scale = quantised(step)
    want = caches.clone()
    kv_cache.store_kv(key, value, *caches, step.slots, scale)
    reference.store_kv(key, value, *want, step.slots, scale)
    same_bits(caches, want)


@pytest.mark.parametrize("scale", [1.0, 0.0371, 1e-15, 1e15])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_is_divided_as_by_division(dtype: torch.dtype, scale: float, exact_float8: None) -> None:
    """All of a dtype, by scales of eight heads. Of NaN there is one, which is not that of unwritten memory."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 8, 128)
    x = torch.where(x.isnan(), NAN, x)
    scales = (scale * torch.rand(2, 8).add_(0.5)).clamp_(*KV_SCALES)
    caches, want = (torch.zeros(2, 4, 8, 16, 128, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in "ab")
    kv_cache.store_kv(x, x, caches[0], caches[1], torch.arange(64), scales)
    reference.store_kv(x, x, want[0], want[1], torch.arange(64), scales)
    same_bits(caches, want)


@pytest.mark.parametrize("rotary_dim", [0, 40, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rope_and_store_in_e4m3(dtype: torch.dtype, rotary_dim: int, exact_float8: None) -> None:
    """Keys are rounded to the model's dtype first, as they are where the cache holds that; few land on the other
    side.
    """
    step = Step(4, 3, 80, dtype)
    table = torch.randn(40, rotary_dim) if rotary_dim else None
    caches, scale = quantised(step)
    want = caches.clone()
    options = {"num_heads": 4, "num_kv_heads": 3, "k_norm": torch.randn(80).to(dtype), "kv_scale": scale}
    spread_rope(rotary.rope_and_store)(step.qkv, step.positions, table, *caches, step.slots, **options)
    spread_rope(reference.rope_and_store)(step.qkv.contiguous(), step.positions, table, *want, step.slots, **options)
    same_bits(caches[1], want[1])
    got, expected = caches[0].float(), want[0].float()
    torch.testing.assert_close(got, expected, rtol=0.13, atol=2**-9, equal_nan=True)
    assert ((got != expected) & ~expected.isnan()).float().mean() < 0.02


def test_bfloat16_queries_for_an_e4m3_cache_are_float16(exact_float8: None) -> None:
    """QuantizedRows once, from float32."""
    step, table = Step(4, 3, 80, torch.bfloat16), torch.randn(40, 80)
    caches, scale = quantised(step)
    got = spread_rope(rotary.rope_and_store)(
        step.qkv, step.positions, table, *caches, step.slots, num_heads=4, num_kv_heads=3, kv_scale=scale
    )
    assert got.dtype == torch.float16
    query, key, _ = step.qkv.double().unflatten(1, (10, 80)).split((4, 3, 3), 1)
    exact, _ = reference.rope(query, key, step.positions, table.double())
    torch.testing.assert_close(got.double(), exact, rtol=2**-11, atol=1e-5)


@pytest.mark.parametrize("module", [reference, rotary], ids=["reference", "triton"])
@pytest.mark.parametrize("rotary_dim", [0, 40, 80])
def test_what_goes_into_an_e4m3_cache_goes_into_wide_pages(module: Any, rotary_dim: int, exact_float8: None) -> None:
    """Except those of tokens without a slot there, or in the cache."""
    step = Step(4, 3, 80, torch.float16)
    table = torch.randn(40, rotary_dim) if rotary_dim else None
    caches, scale = quantised(step)
    slots = torch.randperm(2 * 32)[: len(step.slots)]
    slots[1] = -1
    pages = torch.full((2, 2, 3, 32, 80), NAN, dtype=torch.float16)
    spread_rope(module.rope_and_store)(
        step.qkv.contiguous(), step.positions, table, *caches, step.slots, num_heads=4, num_kv_heads=3, kv_scale=scale,
        wide=WideCopy(pages, slots),
    )  # fmt: skip
    size, both = caches.shape[3], (slots >= 0) & (step.slots >= 0)
    want = caches.half()[:, step.slots[both] // size, :, step.slots[both] % size]
    same_bits(pages[:, slots[both] // 32, :, slots[both] % 32], want)
    pages[:, slots[both] // 32, :, slots[both] % 32] = NAN
    assert pages.isnan().all()


@pytest.mark.parametrize("module", [reference, kv_cache], ids=["reference", "triton"])
@pytest.mark.parametrize("e4m3", [False, True], ids=["float32", "e4m3"])
def test_a_cache_may_be_a_layer_of_one_tensor(module: Any, e4m3: bool, exact_float8: None) -> None:
    step = Step(4, 2, 16)
    qkv, key, value = step.qkv.contiguous(), *step.qkv.unflatten(1, (8, 16)).split((4, 2, 2), 1)[1:]
    want, scale = quantised(step) if e4m3 else (step.caches, None)
    strided = as_a_layer_of_one_tensor(want)
    module.store_kv(key, value, *strided, step.slots, scale)  # type: ignore[has-type]
    reference.store_kv(key, value, *want, step.slots, scale)  # type: ignore[has-type]
    same_bits(strided.contiguous(), want)
    rope = spread_rope((reference if module is reference else rotary).rope_and_store)
    options = {"num_heads": 4, "num_kv_heads": 2, "kv_scale": scale}
    rope(qkv, step.positions, None, *strided, step.slots, **options)  # type: ignore[has-type]
    spread_rope(reference.rope_and_store)(qkv, step.positions, None, *want, step.slots, **options)  # type: ignore[has-type]
    same_bits(strided.contiguous(), want)


def test_slots_beyond_two_to_the_31_elements() -> None:
    """Key and value blocks interleave in one allocation, of which two pages are touched."""
    block = 16 * 64
    num_blocks = 2**31 // (2 * block) + 2
    with unwritten_is_unknown():  # 4 GiB that are never touched
        caches = torch.empty(num_blocks, 2, 1, 16, 64, dtype=torch.float16).unbind(1)
    step = Step(2, 1, 64, torch.float16, num_tokens=2)
    slots = torch.tensor([num_blocks * 16 - 3, num_blocks * 16 - 2])
    assert (num_blocks - 1) * caches[0].stride(0) > 2**31
    _, key, value = step.qkv.view(2, 4, 64).split((2, 1, 1), 1)
    kv_cache.store_kv(key, value, *caches, slots)
    assert caches[0][-1, :, 13:15].equal(key.transpose(0, 1))
    assert caches[1][-1, :, 13:15].equal(value.transpose(0, 1))
    caches[0][-1], caches[1][-1] = 0, 0
    spread_rope(rotary.rope_and_store)(step.qkv, step.positions, None, *caches, slots, num_heads=2, num_kv_heads=1)
    assert caches[0][-1, :, 13:15].equal(key.transpose(0, 1))
    assert caches[1][-1, :, 13:15].equal(value.transpose(0, 1))
