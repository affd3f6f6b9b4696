"""GEMMs of tens to hundreds of tokens with low-bit matrices: the kernel's arithmetic here, the kernel itself
on a GPU.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import reference
from kernels.cuda import linear, quantized_linear
from kernels.cuda.choice import GLUON
from kernels.gluon.common import code_bits
from kernels.gluon.linear import weight_only
from kernels.gpu import codes as codes_in_bits
from tests.kernels.gluon.linear.test_quantized_small_batch import bf16, halves, prmt, values_of
from tests.oracles.random_weights import FORMS, random_weight
from tests.support.steps_on_tensors import steps_on_tensors

if not GLUON:
    pytest.skip("this Triton's Gluon is not known", allow_module_level=True)


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = ("_allocate", "_first", "_bring", "_multiply", "_add_step", "_store", "_store_rows")
    steps_on_tensors(monkeypatch, weight_only, "_dense_quantized_kernel", helpers)
    monkeypatch.setattr(quantized_linear, "quantizes", lambda x, weight: False)


def check(form: str, num_tokens: int, n: int, k: int, device: str) -> None:
    """On rows of a larger tensor, with a bias, added to a residual, and with SwiGLU."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    weight = random_weight(form, n, k, device)
    x, bias, residual = random(num_tokens, 2 * k)[:, :k], random(n), random(num_tokens, n)
    want = x.double() @ reference.dequantize(weight.codes, weight, torch.float64).T
    norm = 1 + random(k) / 10
    normed = reference.rms_norm(x.double(), norm.double(), 1e-6)
    both = normed @ reference.dequantize(weight.codes, weight, torch.float64).T
    for got, exact, limit in (
        (linear.linear(x, weight, bias), want + bias.double(), 6e-3),
        (linear.linear_add(residual.clone(), x, weight), want + residual.double(), 6e-3),
        (linear.norm_gated(x, norm, 1e-6, weight, bias), reference.silu_and_mul(both + bias.double()), 1.2e-2),
    ):
        assert got.shape == exact.shape
        assert (got.double() - exact).norm() < limit * exact.norm()


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, without_layouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    num_launched, launch = 0, weight_only.launch

    def counted(*args: Any, **options: Any) -> None:
        nonlocal num_launched
        num_launched += 1
        launch(*args, **options)

    monkeypatch.setattr(weight_only, "launch", counted)
    monkeypatch.setattr(weight_only, "config", lambda *shape: weight_only.Config(32, 8))
    n = 256 if form == "fp8 blocks" else 300
    check(form, 40, n, 512, "cpu")
    assert num_launched == 3


def test_parts_of_the_channels(without_layouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as many that there are not enough steps for all."""
    monkeypatch.setattr(weight_only, "config", lambda *shape: weight_only.Config(32, 6, 1 if shape[-1] else 5))
    check("int4 asymmetric", 40, 200, 768, "cpu")


@pytest.mark.parametrize(
    ("form", "height"),
    [
        pytest.param("int4 asymmetric", 128, marks=pytest.mark.slow),
        ("int4 asymmetric", 192),
        ("int8 groups", 256),
        ("mxfp4", 128),
        pytest.param("mxfp4", 256, marks=pytest.mark.slow),
        pytest.param("fp8", 192, marks=pytest.mark.slow),
    ],
)
def test_tiles_of_many_tokens(form: str, height: int, without_layouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of 192; the channels in parts, of which the last is shorter."""
    monkeypatch.setattr(weight_only, "config", lambda *shape: weight_only.Config(height, 12, 1 if shape[-1] else 2))
    check(form, 260, 200, 768, "cpu")


def test_bands_of_tokens(without_layouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles side by side, and one at the end."""
    monkeypatch.setattr(weight_only, "config", lambda *shape: weight_only.Config(32, 4))
    monkeypatch.setattr(weight_only, "BAND", 2)
    check("int4", 150, 300, 512, "cpu")


def test_rows_that_end_in_a_step(without_layouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 96 bytes, as gpt-oss has; and an odd number of steps, also in parts."""
    monkeypatch.setattr(weight_only, "config", lambda *shape: weight_only.Config(32, 3, 1 if shape[-1] else 2))
    check("mxfp4", 40, 64, 192, "cpu")
    check("int4 asymmetric", 40, 64, 3 * 128, "cpu")
    check("fp8", 40, 64, 3 * 64, "cpu")


@pytest.mark.parametrize("num_tokens", [17, 64, 256, 600])
@pytest.mark.parametrize(("n", "row"), [(4096, 7168), (6144, 2048), (14336, 2048), (640, 96)])
def test_chosen_configurations_fit(num_tokens: int, n: int, row: int) -> None:
    for pieces in (1, 2):
        for swiglu in (False, True):
            chosen = weight_only.config(num_tokens, n, row, pieces, swiglu)
            assert chosen.stages >= 3  # a warpgroup waits for a step before it has left the last two
            assert chosen.stages * (128 * 64 + pieces * chosen.block_m * 128) <= 231_000


def run_ptx(text: str, inputs: list[int]) -> list[float]:
    """The bfloat16 that the PTX of `code_bits` computes for one thread's registers."""
    registers: dict[str, int] = {}
    results: dict[int, int] = {}
    first = text.count("mov.b32 {") * 2

    def value(name: str) -> int:
        if name in registers:
            return registers[name]
        if name.startswith("$"):
            return inputs[int(name[1:]) - first]
        return int(name.replace("0f", "0x"), 16) if name.startswith("0f") else int(name, 0)

    def pair(name: str) -> Tensor:
        return torch.tensor(halves(value(name)), dtype=torch.int32).short().view(torch.bfloat16)

    def packed(result: Tensor) -> int:
        low, high = result.bfloat16().view(torch.int16).tolist()
        return low & 0xFFFF | (high & 0xFFFF) << 16

    def single(name: str) -> Tensor:
        return torch.tensor([value(name)]).int().view(torch.float32)

    for line in text.split(";"):
        words = line.replace("{", " ").replace("}", " ").replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        operation, into, *names = words
        if operation == "mov.b32" and "{" in line.split("mov.b32")[1]:
            low, high = halves(value(names[1]))
            results |= {int(into[1:]): low, int(names[0][1:]): high}
        elif operation == "mov.b32":
            registers[into] = value(names[0])
        elif operation == "prmt.b32":
            registers[into] = prmt(*map(value, names))
        elif operation == "shr.u32":
            registers[into] = value(names[0]) >> value(names[1])
        elif operation == "shl.b32":
            registers[into] = value(names[0]) << value(names[1]) & 0xFFFFFFFF
        elif operation == "and.b32":
            registers[into] = value(names[0]) & value(names[1])
        elif operation == "xor.b32":
            registers[into] = value(names[0]) ^ value(names[1])
        elif operation == "lop3.b32":
            x, y, z, table = map(value, names)
            assert table in (0xEA, 0x28)
            registers[into] = x & y | z if table == 0xEA else (x ^ y) & z
        elif operation == "fma.rn.bf16x2":
            a, b, c = (pair(name).double() for name in names)
            registers[into] = packed(a * b + c)
        elif operation in ("mul.rn.bf16x2", "sub.bf16x2"):
            a, b = (pair(name).double() for name in names)
            registers[into] = packed(a * b if operation[0] == "m" else a - b)
        elif operation == "sub.f32":
            registers[into] = int((single(names[0]) - single(names[1])).view(torch.int32)) & 0xFFFFFFFF
        else:
            assert operation == "cvt.rn.bf16x2.f32"
            registers[into] = packed(torch.cat([single(names[1]), single(names[0])]))
    return [bf16(results[i]) for i in range(len(results))]


@pytest.mark.parametrize("kind", ["int4", "e2m1", "int8", "e4m3"])
def test_bits_less_zero_points_times_scales(kind: str) -> None:
    """The PTX, on every byte: values in order, the low ones with their zero point and scale, then the high ones."""
    texts = {
        "int4": code_bits.INT4_SCALED, "e2m1": code_bits.E2M1_SCALED,
        "int8": code_bits.INT8_SHIFTED, "e4m3": code_bits.E4M3_SCALED,
    }  # fmt: skip
    zeros = [3, -8] if kind == "int4" else [-37, -37] if kind == "int8" else [0, 0]
    scales = [0.75, 0.75] if kind in ("int8", "e4m3") else [0.75, 1.25]
    shifts = [-(136 + zero) for zero in zeros] if kind == "int4" else zeros
    large = 2.0**94 if kind == "e2m1" else 1.0  # see `packed_scale`
    factors = [*shifts, *(scale * large for scale in scales)]
    operands = [int(torch.tensor(v).bfloat16().view(torch.int16)) & 0xFFFF for v in factors]
    for first in range(0, 256, 4):
        codes = torch.arange(first, first + 4, dtype=torch.uint8)
        word = sum(int(code) << 8 * i for i, code in enumerate(codes))
        got = run_ptx(texts[kind].value, [word, *(each | each << 16 for each in operands)])
        parts = values_of(codes, kind)[: 2 if kind in ("int4", "e2m1") else 1]
        want = [
            ((part - zero).bfloat16() * scale).bfloat16()
            for part, zero, scale in zip(parts, zeros, scales, strict=False)
        ]
        exact = torch.cat(want).double()
        values = torch.tensor(got).double() * (2.0**32 if kind == "e2m1" else 1.0)
        assert torch.where(exact.isfinite(), values, 0).tolist() == exact.nan_to_num().tolist()


def test_bits_of_e2m1() -> None:
    """The PTX, on random words of four bytes: the values of their low codes in order, then of the high ones,
    exactly.
    """
    codes = torch.randint(256, (500, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    values = torch.cat(values_of(codes, "e2m1"), 1).double()
    for text, factor in ((codes_in_bits.E2M1_SMALL, 2.0**126), (codes_in_bits.E2M1, 1.0)):
        program = codes_in_bits.ptx(text, "abcd").value
        got = [run_ptx(program, [word & 0xFFFFFFFF]) for word in codes.view(torch.int32)[:, 0].tolist()]
        assert torch.equal(torch.tensor(got).double() * factor, values)


def test_zero_points_in_bits() -> None:
    """The kernel's constants: -(136 + zero) as bfloat16, exactly."""
    for zero in range(-8, 120):
        bits = torch.tensor(zero + 0xC308 - 0x10000, dtype=torch.int16)
        assert bits.view(torch.bfloat16).item() == -(136 + zero)


def test_what_it_does_not_apply_to(without_layouts: None) -> None:
    x = torch.zeros(24, 512, dtype=torch.bfloat16)
    assert quantized_linear.weight_only_config(x, random_weight("int4", 128, 512), False) is not None
    assert quantized_linear.weight_only_config(x.half(), random_weight("int4", 128, 512), False) is None
    assert quantized_linear.weight_only_config(x, random_weight("int4 desc_act", 128, 512), False) is None
    many = torch.zeros(600, 512, dtype=torch.bfloat16)
    assert quantized_linear.weight_only_config(many, random_weight("int4", 128, 512), False) is None
    assert quantized_linear.weight_only_config(many, random_weight("int4", 128, 512), True) is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not run Gluon")
@pytest.mark.parametrize("num_tokens", [17, 64, 100, 250, 300, 500])
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu(form: str, num_tokens: int) -> None:
    check(form, num_tokens, 1024, 2048, "cuda")
