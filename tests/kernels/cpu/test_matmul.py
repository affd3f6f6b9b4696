"""Products of packed weights against the reference implementation's of plain ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import QuantizedWeight, pack_nibbles, reference
from kernels.cpu import matmul
from kernels.cpu.choice import Choices
from kernels.cpu.library import layout, library
from kernels.cpu.packed_weight import NativeWeight
from kernels.cpu.scale_steps import in_steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "shape"), [(1, (64, 48)), (3, (100, 37)), (40, (64, 48)), (23, (96, 80))])
def test_products_of_packed_weights(backend: str, dtype: torch.dtype, num_tokens: int, shape: tuple[int, int]) -> None:
    n, k = shape
    x, residual = torch.randn(num_tokens, k).to(dtype), torch.randn(num_tokens, n).to(dtype)
    weight, bias, norm = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(k).to(dtype)
    packed = matmul.pack_weight(weight)
    assert isinstance(packed, NativeWeight) == (backend != "no compiler")
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for b in (None, bias):
        for name, arguments in (
            ("linear", (x,)),
            ("linear_add", (residual, x)),
            ("linear_gated", (x,)),
            ("norm_linear", (x, norm, 1e-5)),
            ("norm_gated", (x, norm, 1e-5)),
        ):
            got, want = (
                getattr(module, name)(*(a.clone() if torch.is_tensor(a) else a for a in arguments), w, b)
                for module, w in ((matmul, packed), (reference, weight))
            )
            torch.testing.assert_close(got, want, **tolerance)
        got = matmul.linear_gated(x, packed, b, "gelu_tanh")
        torch.testing.assert_close(got, reference.linear_gated(x, weight, b, "gelu_tanh"), **tolerance)
        got = matmul.norm_gated(x, norm, 1e-5, packed, b, "gelu_tanh")
        torch.testing.assert_close(got, reference.norm_gated(x, norm, 1e-5, weight, b, "gelu_tanh"), **tolerance)
    into = residual.clone()
    assert matmul.linear_add(into, x, packed) is into
    assert matmul.norm_linear(x, norm, 1e-5, packed, out=into) is into
    wide = matmul.norm_linear(x, norm.float(), 1e-5, packed)  # the weight of a norm with an offset
    torch.testing.assert_close(wide, reference.norm_linear(x, norm.float(), 1e-5, weight), **tolerance)


def test_products_of_no_tokens(backend: str) -> None:
    for weight in (torch.randn(64, 256), torch.randn(64, 256).bfloat16(), integers("int4", 64, 256, 128)):
        dtype = weight.dtype if isinstance(weight, Tensor) else torch.bfloat16
        x, packed = torch.empty(0, 256, dtype=dtype), matmul.pack_weight(weight)
        assert matmul.linear(x, packed).shape == (0, 64)
        assert matmul.norm_gated(x, torch.ones(256, dtype=dtype), 1e-5, packed).shape == (0, 32)
        assert matmul.linear_add(torch.empty(0, 64, dtype=dtype), x, packed).shape == (0, 64)


def test_wide_weights_stay_as_they_are(backend: str) -> None:
    weight = torch.randn(4, 4, dtype=torch.float64)
    assert matmul.pack_weight(weight) is weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [False, True])
def test_a_token_alone_gets_what_it_gets_among_others(backend: str, dtype: torch.dtype, gate: bool) -> None:
    """However many tokens, and however many rows of the weight, are multiplied at once."""
    if backend == "no compiler":
        pytest.skip("oneDNN's sums depend on the number of tokens")
    product = matmul.linear_gated if gate else matmul.linear
    for rows in (48, 640):
        x, packed = torch.randn(21, 64).to(dtype), matmul.pack_weight(torch.randn(rows, 64).to(dtype))
        together = product(x, packed)
        for count in (1, 2, 3, 4, 5, 8, 9):
            assert torch.equal(together, torch.cat([product(part, packed) for part in x.split(count)])), (rows, count)


def test_tokens_in_blocks_get_what_they_get_alone(backend: str) -> None:
    """So much of x is multiplied in several blocks; on AMX fewer tokens with int4 by other instructions, too."""
    if backend == "no compiler":
        pytest.skip("oneDNN's sums depend on the number of tokens")
    codes = [integers("int4", 70, 2048, 128), integers("int8", 70, 2048, 2048)]
    for weight in (torch.randn(70, 2048), torch.randn(70, 2048).bfloat16(), *codes):
        dtype = weight.dtype if isinstance(weight, Tensor) else torch.bfloat16
        x, packed = torch.randn(300, 2048).to(dtype), matmul.pack_weight(weight)
        together = matmul.linear(x, packed)
        assert torch.equal(together, torch.cat([matmul.linear(part, packed) for part in x.split(50)]))


def integers(kind: Any, n: int, k: int, group: int) -> QuantizedWeight:
    codes = torch.randint(-128, 128, (n, k)).to(torch.int8)
    if kind == "int4":
        codes = pack_nibbles(torch.randint(0, 16, (n, k)))
    return QuantizedWeight(kind, codes, torch.rand(n, -(-k // group)) / 100, group)


def blocks(kind: Any, n: int, k: int, group: int, codes: tuple[int, int], has_minima: bool = False) -> QuantizedWeight:
    """Scales and minima are whole multiples of one for each 256 channels, as in GGUF."""
    factor = (torch.rand(n, k // 256, 1) / 1000).half().float()
    steps = [(torch.randint(-64 * (1 - has_minima), 64, (n, k // 256, 256 // group)) * factor).flatten(1) for _ in "sm"]
    values = torch.randint(*codes, (n, k), dtype=torch.uint8 if kind == "int4" else torch.int8)
    weight = QuantizedWeight(kind, pack_nibbles(values) if kind == "int4" else values, steps[0], group)
    none = torch.full((n, k // group), -8, dtype=torch.int8) if kind == "int4" else None
    return replace(weight, minimum=steps[1], zero=none) if has_minima else weight


WEIGHTS = {
    "four bits in blocks of 256": blocks("int4", 100, 512, 32, (0, 16), has_minima=True),
    "five bits in blocks of 256": blocks("int8", 64, 256, 32, (0, 32), has_minima=True),
    "six bits in blocks of 256": blocks("int8", 70, 512, 16, (-32, 32)),
    "eight bits in blocks of 256": blocks("int8", 64, 512, 32, (-128, 128), has_minima=True),
    "int8 by rows": integers("int8", 80, 256, 256),
    "int8 in groups": replace(integers("int8", 64, 192, 64), factor=torch.rand(64) + 1),
    "int8 in blocks": replace(integers("int8", 64, 256, 128), scale=torch.rand(4, 2) / 100, rows=16),
    "int8 in groups of 16": integers("int8", 70, 256, 16),
    "int8 with minima": replace(integers("int8", 64, 192, 32), minimum=torch.rand(64, 6)),
    "int4 with minima": replace(integers("int4", 64, 256, 32), minimum=torch.rand(64, 8) - 0.5),
    "int4 in groups": integers("int4", 100, 256, 32),
    "int4 with short scales": replace(integers("int4", 64, 256, 128), scale=(torch.rand(64, 2) / 100).bfloat16()),
    "int4 with zero points": replace(integers("int4", 64, 256, 64), zero=torch.randint(-8, 8, (64, 4)).to(torch.int8)),
    "int4 by rows with zero points": replace(
        integers("int4", 64, 256, 256), zero=torch.randint(-8, 8, (64, 1)).to(torch.int8)
    ),
}


def in_eight_bits(x: Tensor, group: int) -> Tensor:
    """x as GEMMs read it: eight bits and a scale for each group of a token."""
    groups = x.float().unflatten(1, (-1, group))
    scale = groups.abs().amax(2, keepdim=True) / 127
    return ((groups / scale).round() * scale).flatten(1)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 24])
def test_products_of_integers(backend: str, name: str, dtype: torch.dtype, num_tokens: int) -> None:
    weight = WEIGHTS[name]
    packed = matmul.pack_weight(weight)
    if backend == "no compiler":
        assert packed is weight
        return
    assert isinstance(packed, NativeWeight)
    x = torch.randn(num_tokens, weight.num_channels).to(dtype)
    exact = reference.dequantize(weight.codes, weight, torch.float32)
    got, want = matmul.linear(x, packed), in_eight_bits(x, min(weight.group, 128)) @ exact.T
    # An x of bfloat16 may lie in the middle between two codes, and be rounded to either.
    torch.testing.assert_close(got.float(), want, atol=2e-3 if dtype == torch.float32 else 0.2, rtol=0.01)
    assert (got.float() - want).norm() <= 0.01 * want.norm()
    error = got.float() - x.float() @ exact.T
    assert error.norm() <= 0.05 * want.norm()


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_of_integers_by_pytorch(backend: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """x is not rounded then, and the weight is dequantised."""
    native = library()
    if native is None:
        return
    weight = WEIGHTS[name]
    x, exact = torch.randn(7, weight.num_channels), reference.dequantize(weight.codes, weight, torch.float32)
    packed = matmul.pack_weight(weight)
    assert isinstance(packed, NativeWeight)
    monkeypatch.setattr(native, "choices", Choices({f"{packed.kind} products": (0.1, 0.1, 0.1)}))
    monkeypatch.setattr(native, "call", lambda called, *_: pytest.fail(called))
    torch.testing.assert_close(matmul.linear(x, packed), x @ exact.T, atol=1e-4, rtol=1e-4)


def test_blocks_are_as_small_as_in_a_file(backend: str) -> None:
    """A byte for each group, the scale of 256 channels as a float, six bits where codes need no more."""
    if library() is None:
        return
    for name, kind, bits in (("four", "int4", 4 + 16 / 32 + 64 / 256), ("six", "int6", 6 + 8 / 16 + 32 / 256)):
        packed = matmul.pack_weight(WEIGHTS[f"{name} bits in blocks of 256"])
        assert isinstance(packed, NativeWeight)
        assert packed.kind == kind
        num_bytes = packed.nbytes + sum(each.nbytes for each in packed.others if each is not None)
        rows = -(-packed.num_rows // layout().tile_rows) * layout().tile_rows
        assert num_bytes * 8 == rows * packed.num_channels * bits


@pytest.mark.parametrize("factor", [0.0, 2.0**-24, 6.1e-5, 0.37, 65504.0])
def test_scales_in_steps_are_not_rounded(factor: float) -> None:
    codes = torch.tensor([[0, 3, 63, -128, 5, 7, 127, 1], [0, 0, 0, 0, 0, 0, 2, -4], [0, 0, 0, 0, 0, 0, 0, 0]])
    for sign in (1, -1):
        scale = codes * (sign * torch.tensor(factor).half().float())
        found = in_steps(scale, 32)
        assert found is not None
        assert torch.equal(found.codes * found.factor, scale)
    assert in_steps(codes * torch.tensor(factor).half().float(), 64) is not None
    assert in_steps(torch.tensor([[1.0, 129.0]]), 128) is None
    assert in_steps(torch.tensor([[1.0, 2.0**-30]]), 128) is None
    assert in_steps(torch.ones(1, 3), 128) is None


def test_what_is_not_finite_stays_so(backend: str) -> None:
    """The check for faults finds it in the logits."""
    for weight in (torch.randn(32, 64), WEIGHTS["int8 by rows"], WEIGHTS["int4 in groups"]):
        packed = matmul.pack_weight(weight)
        x = torch.randn(3, 64 if isinstance(weight, Tensor) else weight.num_channels)
        x[0, 7], x[1, 9] = torch.nan, torch.inf
        finite = matmul.linear(x, packed).isfinite()
        assert not finite[:2].any()
        assert finite[2].all()


@pytest.mark.parametrize("kind", ["e4m3", "order"])
def test_other_codes_stay_as_they_are(backend: str, kind: str) -> None:
    weight = integers("int8", 32, 64, 64)
    if kind == "order":
        weight = replace(weight, order=torch.randperm(64))
    else:
        weight = replace(weight, kind="e4m3", codes=weight.codes.float().to(torch.float8_e4m3fn))
    assert matmul.pack_weight(weight) is weight
