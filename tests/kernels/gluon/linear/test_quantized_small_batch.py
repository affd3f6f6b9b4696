"""GEMMs of up to 16 tokens with low-bit matrices: the kernel's arithmetic here, the kernel itself on a GPU."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import QuantizedWeight, reference
from kernels.cuda import linear, quantized_linear
from kernels.cuda.choice import GLUON
from kernels.gluon.linear import quantized_small_batch as few
from tests.oracles.random_weights import FORMS, random_weight
from tests.support.gluon_on_tensors import run_on_tensors

if not GLUON:
    pytest.skip("this Triton's Gluon is not known", allow_module_level=True)


def decode(words: Tensor, kind: str, layout: object = None) -> tuple[Tensor, Tensor]:
    """Stand-in for the kernel's PTX, see `test_bits`, in the order of `code_bits._in_order`."""
    codes = words.contiguous().view(torch.uint8)
    low, high = values_of(codes.unflatten(2, (4, -1, 8)).transpose(2, 3).reshape(codes.shape), kind)
    return low, high


def values_of(codes: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """uint8 codes → their values, or those of the low (or only) codes, and of the high ones."""
    if kind in ("e4m3", "int8"):
        values = codes.view(torch.float8_e4m3fn if kind == "e4m3" else torch.int8).to(torch.bfloat16)
        return values, values
    words = codes.reshape(-1, 4)
    weight = QuantizedWeight(kind, words, torch.ones(len(words), 1), 8)  # type: ignore[arg-type]
    low, high = reference.dequantize(words, weight, torch.bfloat16).chunk(2, 1)
    return low.reshape(codes.shape), high.reshape(codes.shape)


def scale_of(loaded: Tensor) -> Tensor:
    return loaded.view(torch.float8_e4m3fn).float() if loaded.dtype == torch.uint8 else loaded.float()


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = (
        "warps", "middle", "last", "_add_products", "_load_step", "_arranged", "_load_x", "inverse_rms",
        "_code_pointers", "_group_pointers",
    )  # fmt: skip
    run_on_tensors(monkeypatch, few, "_few_quantized_kernel", helpers)
    monkeypatch.setattr(few, "decode_words", decode)
    monkeypatch.setattr(few, "_word_layout", lambda warps, rows, words: None)
    monkeypatch.setattr(few, "_x_layout", lambda warps, channels, tokens: None)
    monkeypatch.setattr(few, "num_multiprocessors", lambda device: 2)
    monkeypatch.setattr(few, "scale_of", scale_of)


Matrix = tuple[QuantizedWeight, Tensor]  # and its values [N, K] in float64


def check_small_batch(one: Matrix, two: Matrix, num_tokens: int, limit: float, takes: Callable[[Tensor], bool]) -> None:
    """Check all operations through the package's own dispatch, on rows of a larger tensor and with a bias.

    one: N rows; two: N rows of a gate, then N of up. limit: of the error. takes: whether the kernel computes x.
    """
    generator, (n, k) = torch.Generator().manual_seed(0), one[1].shape
    device = one[1].device

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    x, scale = random(num_tokens, 2 * k)[:, :k], 1 + random(k) / 10
    bias, residual = random(2 * n), random(num_tokens, n)
    assert takes(x)
    product = x.double() @ one[1].T
    normed = reference.rms_norm(x.double(), scale.double(), 1e-6)
    gated = normed @ two[1].T
    cases = [
        (linear.linear(x, one[0]), product),
        (linear.linear(x, one[0], bias[:n]), product + bias[:n].double()),
        (linear.norm_linear(x, scale, 1e-6, one[0], bias[:n]), normed @ one[1].T + bias[:n].double()),
        (linear.norm_gated(x, scale, 1e-6, two[0]), reference.silu_and_mul(gated)),
        (linear.norm_gated(x, scale, 1e-6, two[0], bias), reference.silu_and_mul(gated + bias.double())),
        (linear.linear_add(residual.clone(), x, one[0], bias[:n]), residual.double() + product + bias[:n].double()),
    ]
    for i, (got, want) in enumerate(cases):
        assert got.shape == want.shape
        assert (got.double() - want).norm() < limit * want.norm(), i


def check(form: str, num_tokens: int, n: int, k: int, device: str) -> None:
    one, two = random_weight(form, n, k, device), random_weight(form, 2 * n, k, device)
    exact, wide = (reference.dequantize(each.codes, each, torch.float64) for each in (one, two))

    def takes(x: Tensor) -> bool:
        of = quantized_linear.small_batch_config
        return of(x, one, False) is not None and of(x, two, True) is not None

    check_small_batch((one, exact), (two, wide), num_tokens, 8e-3, takes)


@pytest.mark.parametrize("form", [name for name in FORMS if name not in ("int4 desc_act", "nvfp4")])
@pytest.mark.parametrize(("num_tokens", "n"), [(1, 128), (11, 200)])
def test_every_form(form: str, num_tokens: int, n: int, without_layouts: Any) -> None:
    if form == "fp8 blocks":
        n = 128 * num_tokens
    check(form, num_tokens, n, 768, "cpu")


@pytest.mark.parametrize(
    ("n", "k"), [(4096, 14336), (6144, 4096), (28672, 4096), (1024, 896), (640, 192), (5120, 25600)]
)
def test_chosen_configurations_divide_the_channels(n: int, k: int) -> None:
    for form in FORMS:
        weight = random_weight(form, 128, k)
        for swiglu in (False, True):
            config = few._choose(n, weight.codes.shape[1], k, weight.group, weight.scale.shape[1], 8, swiglu)
            if config is not None:
                assert weight.codes.shape[1] % (config.chunk * config.warps) == 0
                assert (
                    weight.scale.shape[1] == 1 or weight.group % config.chunk == 0 or config.chunk % weight.group == 0
                )


def test_what_it_does_not_apply_to(without_layouts: Any) -> None:
    weight, x = random_weight("int4", 128, 512), torch.zeros(8, 512, dtype=torch.bfloat16)
    assert quantized_linear.small_batch_config(x, weight, False) is not None
    assert quantized_linear.small_batch_config(x.float(), weight, False) is None
    assert quantized_linear.small_batch_config(torch.zeros(17, 512, dtype=torch.bfloat16), weight, False) is None
    assert quantized_linear.small_batch_config(x, random_weight("int4 desc_act", 128, 512), False) is None
    assert (
        quantized_linear.small_batch_config(x, random_weight("nvfp4", 128, 512), False) is None
    )  # groups of 16: the other kernel's


def prmt(low: int, high: int, selector: int) -> int:
    taken = [low >> 8 * i & 255 for i in range(4)] + [high >> 8 * i & 255 for i in range(4)]
    return sum(taken[selector >> 4 * i & 7] << 8 * i for i in range(4))


def bf16(bits: int) -> float:
    return float(torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16).double())


def halves(register: int) -> list[int]:
    return [register & 0xFFFF, register >> 16]


@pytest.mark.parametrize("first", range(0, 256, 4))
def test_bits(first: int) -> None:
    """The arithmetic of the kernel's PTX, on integers: every byte's values, in order."""
    codes = torch.arange(first, first + 4, dtype=torch.uint8)
    word = sum(int(code) << 8 * i for i, code in enumerate(codes))
    spread = [prmt(0, word, 0x5040), prmt(0, word, 0x7060)]
    got = [bf16(h) * 2.0**120 for each in spread for h in halves(each & 0x80008000 | each >> 4 & 0x07F007F0)]
    want = codes.view(torch.float8_e4m3fn).double()
    assert torch.tensor(got).double().where(want.isfinite(), 0).tolist() == want.nan_to_num().tolist()
    spread = [prmt(word, 0, 0x4140), prmt(word, 0, 0x4342)]
    decoded = [
        [bf16(h) - 136 for each in spread for h in halves(each >> shift & 0x000F000F | 0x43004300)] for shift in (0, 4)
    ]
    assert [each.tolist() for each in values_of(codes, "int4")] == decoded
    word ^= 0x80808080
    floats = [prmt(word, 0x4B000000, selector) for selector in (0x7440, 0x7441, 0x7442, 0x7443)]
    values = torch.tensor(floats, dtype=torch.int32).view(torch.float32) - (2**23 + 128)
    assert values.tolist() == codes.view(torch.int8).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not run Gluon")
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 13, 16])
@pytest.mark.parametrize("form", [name for name in FORMS if name not in ("int4 desc_act", "nvfp4")])
def test_on_a_gpu(form: str, num_tokens: int) -> None:
    check(form, num_tokens, 1024, 2048, "cuda")
