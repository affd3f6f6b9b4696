"""GEMMs of tens to hundreds of tokens with GGUF's blocks: the kernel's arithmetic here, the kernel itself on a GPU."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import reference
from kernels.cuda import linear
from kernels.cuda.choice import GLUON
from kernels.data.block_weight import BLOCK_KINDS, BlockKind, BlockWeight, unit_channels
from kernels.gluon.common import block_bits as bits
from kernels.gluon.common import weight_only as quantized_steps
from kernels.gluon.linear import block_weight_only, weight_only
from tests.kernels.gluon.linear.test_block_small_batch import (
    bf16,
    decode_word,
    eight_bit_scales,
    float16_of,
    matrix,
    run_ptx,
    six_bit_scales,
)
from tests.support.gluon_on_tensors import run_on_tensors
from tests.support.steps_on_tensors import steps_on_tensors

if not GLUON:
    pytest.skip("this Triton's Gluon is not known", allow_module_level=True)

HELPERS = ("_own_row", "_load_unit", "_four", "_scales", "_by_word", "_bits_above", "_weights", "_multiply")
SHARED = ("_allocate", "_first", "_bring", "_add_step", "_store")
OF_STEPS = ("_operand", "words_of_halves", "_layout", "half_words")


def twice(value: Tensor) -> Tensor:
    return value.bfloat16()


def decode_word_scaled(
    words: Tensor, high: Tensor, scales: tuple[Tensor, ...], kind: str, layout: object = None
) -> tuple[Tensor, Tensor]:
    """Stand-in for the kernel's PTX, see `test_bits`."""
    zero = {"q8_0": 0, "q6_k": 160}.get(kind, 128)
    found = []
    for half, codes in enumerate(decode_word(words, high, kind)):
        weights = (codes.float() - zero).reshape(-1, 4, 4, 2, 2).transpose(3, 4) * scales[half][..., None, None].float()
        if kind in ("q4_k", "q5_k"):
            weights = weights + scales[2 + half][..., None, None].float()
        found.append(weights.bfloat16())
    return found[0], found[1]


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = (*SHARED, "_multiply", "_store_rows")
    steps_on_tensors(monkeypatch, weight_only, "_dense_quantized_kernel", helpers)
    run_on_tensors(monkeypatch, block_weight_only, "_block_weight_only_kernel", HELPERS, weight_only)
    monkeypatch.setattr(weight_only, "gl", vars(block_weight_only)["gl"])
    for names, module in ((SHARED, weight_only), (OF_STEPS, quantized_steps)):
        for name in names:
            monkeypatch.setattr(block_weight_only, name, vars(module)[name])
    for name in ("_of_rows", "_of_quarters"):
        monkeypatch.setattr(block_weight_only, name, lambda count: None)
    for each in (twice, decode_word_scaled, eight_bit_scales, float16_of, six_bit_scales):
        monkeypatch.setattr(block_weight_only, each.__name__, each)


def check(kind: BlockKind, num_tokens: int, n: int, units: int, device: str) -> None:
    """On rows of a larger tensor, with a bias, added to a residual, and with SwiGLU."""
    generator, k = torch.Generator().manual_seed(0), units * unit_channels(kind)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    weight, exact = matrix(kind, n, k, device)
    x, bias, residual, norm = random(num_tokens, 2 * k)[:, :k], random(n), random(num_tokens, n), 1 + random(k) / 10
    want = x.double() @ exact.T
    both = reference.rms_norm(x.double(), norm.double(), 1e-6) @ exact.T + bias.double()
    for got, wanted, limit in (
        (linear.linear(x, weight, bias), want + bias.double(), 6e-3),
        (linear.linear_add(residual.clone(), x, weight), want + residual.double(), 6e-3),
        (linear.norm_linear(x, norm, 1e-6, weight, bias), both, 8e-3),
        (linear.norm_gated(x, norm, 1e-6, weight, bias), reference.silu_and_mul(both), 1.2e-2),
    ):
        assert got.shape == wanted.shape
        assert (got.double() - wanted).norm() < limit * wanted.norm()


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("parts", [1, 2])
def test_every_type(kind: BlockKind, parts: int, without_layouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the channels in parts, of which the last is shorter."""
    config = weight_only.Config(32, 4)
    monkeypatch.setattr(
        block_weight_only, "config", lambda count, rows, swiglu: config if swiglu else config._replace(parts=parts)
    )
    check(kind, 40, 152, 3, "cpu")


def test_parts_of_several_types(without_layouts: None) -> None:
    (one, first), (two, second) = matrix("q4_k", 24, 512, "cpu"), matrix("q6_k", 24, 512, "cpu")
    weight = BlockWeight.of([*one.parts, *two.parts])
    x, residual, norm = torch.randn(20, 512).bfloat16(), torch.randn(20, 48).bfloat16(), torch.ones(512).bfloat16()
    want = x.double() @ torch.cat([first, second]).T
    normed = want / x.double().pow(2).mean(1, True).sqrt()
    cases = [
        (linear.linear(x, weight), want),
        (
            linear.norm_gated(x, norm, 0.0, weight),
            reference.silu_and_mul(normed),
        ),
        (linear.linear_add(residual.clone(), x, weight), residual.double() + want),
    ]
    for got, wanted in cases:
        assert (got.double() - wanted).norm() < 1.6e-2 * wanted.norm()


TEXTS: dict[str, Any] = {
    "q4_k": bits.Q4_SCALED, "q5_k": bits.Q5_SCALED, "q6_k": bits.Q6_SCALED, "q8_0": bits.Q8_SCALED,
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_bits(kind: BlockKind) -> None:
    """The kernel's PTX, with scales that are powers of two, so that nothing is rounded."""
    scales = [0x3E80, 0x4080, 0xC000, 0x3F00]  # 1/4, 4, and for minima -2 and 1/2
    numbers = [torch.full((1, 1, 1), bf16(each)) for each in scales]
    for word, high in torch.randint(-(2**31), 2**31, (64, 2), generator=torch.Generator().manual_seed(0)).tolist():
        twofold = [each << 16 | each for each in scales]
        operands = {"q8_0": [word, *twofold[:1] * 2], "q4_k": [word, *twofold]}.get(kind, [word, high, *twofold])
        if kind == "q6_k":
            operands = operands[:4]
        found = run_ptx(TEXTS[kind].value, *operands)
        words = [torch.tensor(each, dtype=torch.int32).expand(1, 4, 4) for each in (word, high)]
        want = decode_word_scaled(*words, tuple(numbers), kind)
        count = 4 if kind == "q8_0" else 8
        wanted = torch.cat([each[0, 0, 0].T.flatten() for each in want])[:count]
        assert [bf16(found[f"${i}"]) for i in range(count)] == wanted.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not run Gluon")
@pytest.mark.parametrize("num_tokens", [17, 64, 180, 256])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_on_a_gpu(kind: BlockKind, num_tokens: int) -> None:
    check(kind, num_tokens, 1000, 12, "cuda")
