"""GEMMs of up to 16 tokens with GGUF's blocks: the kernel's arithmetic here, the kernel itself on a GPU."""

import functools
import operator
import os
import re
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.models.gguf.blocks import TYPES
from kernels import reference
from kernels.cuda import block_linear, linear
from kernels.cuda.choice import GLUON
from kernels.data.block_weight import BLOCK_KINDS, BlockKind, BlockWeight, unit_channels
from kernels.gluon.common import block_bits as bits
from kernels.gluon.linear import block_small_batch as few
from tests.kernels.gluon.linear.test_quantized_small_batch import check_small_batch
from tests.oracles.random_weights import random_blocks
from tests.support.gluon_on_tensors import run_on_tensors

if not GLUON:
    pytest.skip("this Triton's Gluon is not known", allow_module_level=True)

HELPERS = (
    "warps", "middle", "last", "_split_in_four", "_words_above", "_weights", "_load_unit", "_load_piece",
    "_scale_words", "_add_unit", "_add_unit_of_one", "_load_own", "_sums_of_own", "_load_x", "_multiply",
    "inverse_rms",
)  # fmt: skip


def decode_word(words: Tensor, high: Tensor, kind: str, layout: object = None) -> tuple[Tensor, Tensor]:
    """Stand-in for the kernel's PTX, see `test_bits`: of both halves of each word's bytes, in the order 0, 2, 1, 3."""
    if kind == "q8_0":
        values = torch.stack([(words << 24 - 8 * byte) >> 24 for byte in (0, 2, 1, 3)], -1).flatten(2)
        return values.to(torch.bfloat16), values.to(torch.bfloat16)
    found = []
    for half in (0, 1):
        codes = torch.stack([words >> 8 * byte + 4 * half & 15 for byte in (0, 2, 1, 3)], -1)
        if kind != "q4_k":
            width = 1 if kind == "q5_k" else 2
            at = [16 * (e % 2) + 2 * width * (e // 2) + width * half for e in range(4)]
            codes |= torch.stack([high >> shift & (1 << width) - 1 for shift in at], -1) << 4
        found.append((128 + codes).flatten(2).to(torch.bfloat16))
    return found[0], found[1]


def bytes_of(words: Tensor) -> Tensor:
    return torch.stack([words >> 8 * i & 255 for i in range(4)], -1)


def six_bit_words(b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    four = 0x0F0F0F0F
    return (
        b & 0x3F3F3F3F, d & four | b >> 2 & 0x30303030, c & 0x3F3F3F3F, d >> 4 & four | c >> 2 & 0x30303030,
    )  # fmt: skip


def six_bit_scales(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    codes = [each for words in six_bit_words(b, c, d) for each in bytes_of(words).unbind(-1)]
    return [each * float16_of(a, i // 8) / (1 if i < 8 else 128) for i, each in enumerate(codes)]


def eight_bit_scales(a: Tensor, b: Tensor, c: Tensor, d: Tensor, factor: Tensor) -> list[Tensor]:
    codes = torch.stack([bytes_of(each) for each in (a, b, c, d)], -2).flatten(-2).to(torch.int8)
    return [each * factor for each in codes.float().unbind(-1)]


def float16_of(words: Tensor, half: int) -> Tensor:
    return (words >> 16 * half).to(torch.int16).view(torch.float16).float()


def byte_times(words: Tensor, index: Tensor, factor: Tensor) -> Tensor:
    return (words >> 8 * index & 255) * factor


def signed_byte(words: Tensor, index: Tensor) -> Tensor:
    return (words >> 8 * index).to(torch.int8).float()


def in_column(x: Tensor, column: Tensor, wanted: int) -> Tensor:
    return torch.where(column == wanted, x, 0.0)


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_tensors(monkeypatch, few, "_few_blocks_kernel", HELPERS)
    for name in ("_own_words", "_shared_words", "_piece_of_x"):
        monkeypatch.setattr(few, name, lambda warps, count: None)
    replaced = (
        decode_word, six_bit_words, six_bit_scales, eight_bit_scales, float16_of, byte_times, signed_byte, in_column,
    )  # fmt: skip
    for each in replaced:
        monkeypatch.setattr(few, each.__name__, each)
    monkeypatch.setattr(few, "offset", bits.offset.fn)
    monkeypatch.setattr(few, "ROWS", 16)
    monkeypatch.setattr(few, "num_multiprocessors", lambda device: 2)


def matrix(kind: BlockKind, n: int, k: int, device: str) -> tuple[BlockWeight, Tensor]:
    """A matrix, and its values in float64."""
    blocks = random_blocks(kind, n, k, device)
    weight = block_linear.packed([blocks], [kind.upper()])
    assert weight is not None
    return weight, TYPES[kind.upper()].decode(blocks.flatten(1)).double()


def check(kind: BlockKind, num_tokens: int, n: int, k: int, device: str) -> None:
    one, two = matrix(kind, n, k, device), matrix(kind, 2 * n, k, device)
    check_small_batch(one, two, num_tokens, 6e-3, lambda x: block_linear.is_small_batch(x, one[0]))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("num_tokens", "n", "units"), [(1, 40, 3), (1, 16, 31), (1, 16, 35), (5, 40, 3), (11, 24, 5)])
def test_every_type(kind: BlockKind, num_tokens: int, n: int, units: int, without_layouts: Any) -> None:
    check(kind, num_tokens, n, units * unit_channels(kind), "cpu")


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_parts_of_several_types(num_tokens: int, without_layouts: Any) -> None:
    kinds: list[BlockKind] = ["q4_k", "q4_k", "q6_k"]
    blocks = [random_blocks(kind, 24, 512, seed=i) for i, kind in enumerate(kinds)]
    names = [kind.upper() for kind in kinds]
    weight = block_linear.packed(blocks, names)
    assert weight is not None
    assert [len(part) for part in weight.parts] == [48, 24]
    exact = torch.cat([TYPES[name].decode(each.flatten(1)).double() for name, each in zip(names, blocks, strict=True)])
    dtype = torch.bfloat16 if num_tokens <= 16 else torch.float32  # which the interpreter multiplies
    x, residual, bias = (torch.randn(shape).to(dtype) for shape in ((num_tokens, 512), (num_tokens, 72), 72))
    want = x.double() @ exact.T + bias.double()
    cases = [
        (linear.linear(x, weight, bias), want),
        (linear.linear_gated(x, weight, bias), reference.silu_and_mul(want)),
        (linear.linear_add(residual.clone(), x, weight, bias), residual.double() + want),
    ]
    for i, (got, wanted) in enumerate(cases):
        assert (got.double() - wanted).norm() < 1e-2 * wanted.norm(), i


def test_what_is_not_packed() -> None:
    assert block_linear.packed([random_blocks("q8_0", 4, 32)], ["Q8_0"]) is None
    assert block_linear.packed([random_blocks("q8_0", 4, 128)], ["Q8_0"]) is not None
    assert block_linear.packed([torch.zeros(4, 1, 18, dtype=torch.uint8)], ["Q4_0"]) is None
    assert block_linear.pack_blocks(random_blocks("q4_k", 4, 256), [], ["Q4_K"], torch.bfloat16) is None


def run_ptx(text: str, *operands: int | float) -> dict[str, Any]:
    """Run straight PTX on Python numbers. The operands follow the results, `$0` and on."""
    count = len(set(re.findall(r"\$\d+", text))) - len(operands)
    registers: dict[str, Any] = {f"${count + i}": value for i, value in enumerate(operands)}

    def value(name: str) -> Any:
        if name.startswith("0f"):
            return struct.unpack(">f", bytes.fromhex(name[2:]))[0]
        return registers[name] if name in registers else int(name, 0)

    def word(name: str) -> int:
        found = value(name)
        return struct.unpack("<I", struct.pack("<f", found))[0] if isinstance(found, float) else found & 0xFFFFFFFF

    for line in text.strip("{} \n").replace("{ ", "").split(";"):
        if not line.strip() or line.split()[0] == ".reg":
            continue
        if pair := re.match(r"\s*mov\.b32 \{(\S+), (\S+)\}, (\S+)", line):
            found = word(pair[3])
            registers[pair[1]], registers[pair[2]] = found & 0xFFFF, found >> 16
            continue
        operation, names = line.split(maxsplit=1)
        into, *sources = (name.strip() for name in names.split(","))
        if "f32" in operation.split("."):
            numbers = [float16(word(name)) if "cvt" in operation else as_float(value(name)) for name in sources]
            done: dict[str, Callable[..., float]] = {
                "cvt": lambda a: a,
                "mov": lambda a: a,
                "fma": lambda a, b, c: a * b + c,
            }
            done |= {"mul": operator.mul, "sub": operator.sub}
            exact = done[operation.split(".")[0]](*numbers)
            registers[into] = struct.unpack("<f", struct.pack("<f", exact))[0]
        elif operation.endswith(".bf16x2"):
            halves = [[bf16(word(name) >> shift & 0xFFFF) for name in sources] for shift in (0, 16)]
            registers[into] = sum(to_bf16(a * b + sum(c)) << 16 * i for i, (a, b, *c) in enumerate(halves))
        else:
            registers[into] = integer(operation, [word(name) for name in sources])
    return registers


def integer(operation: str, numbers: list[int]) -> int:
    name = operation.split(".")[0]
    if name == "lop3":
        a, b, c, table = numbers
        inputs = [
            (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1
        ]
        return functools.reduce(operator.or_, inputs) & 0xFFFFFFFF
    if name == "prmt":
        taken = [number >> 8 * i & 255 for number in numbers[:2] for i in range(4)]
        return sum(taken[numbers[2] >> 4 * i & 7] << 8 * i for i in range(4))
    one = {"shl": operator.lshift, "shr": operator.rshift, "and": operator.and_, "xor": operator.xor}
    return int(numbers[0] if name == "mov" else one[name](*numbers)) & 0xFFFFFFFF


def as_float(number: int | float) -> float:
    return number if isinstance(number, float) else struct.unpack("<f", struct.pack("<I", number & 0xFFFFFFFF))[0]


def float16(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0])


def bf16(bits: int) -> float:
    return as_float(bits << 16)


def to_bf16(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0]) >> 16


TEXTS = {"q4_k": bits.Q4_WORDS, "q5_k": bits.Q5_WORDS, "q6_k": bits.Q6_WORDS, "q8_0": bits.Q8_WORDS}


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_bits_of_codes(kind: BlockKind) -> None:
    """The kernel's PTX, run by `run_ptx`, does what this file's stand-in does."""
    for word, high in torch.randint(-(2**31), 2**31, (64, 2), generator=torch.Generator().manual_seed(0)).tolist():
        operands = [word] if kind in ("q4_k", "q8_0") else [word, high]
        text = TEXTS[kind].value
        found = run_ptx(text, *operands)
        words = [torch.tensor([[[each]]], dtype=torch.int32) for each in (word, high)]
        want = torch.cat(decode_word(*words, kind), 2).flatten().tolist()
        count = 4 if kind == "q8_0" else 8
        assert [bf16(found[f"${i}"]) for i in range(count)] == want[:count]


def test_bits_of_scales() -> None:
    random = torch.Generator().manual_seed(0)
    for numbers in torch.randint(-(2**31), 2**31, (64, 4), generator=random).tolist():
        numbers[0] &= 0x33FF33FF  # finite float16
        words = [torch.tensor([[each]], dtype=torch.int32) for each in numbers]
        found = run_ptx(bits.SIX_BITS.value, *numbers)
        assert [found[f"${i}"] for i in range(16)] == [float(each) for each in six_bit_scales(*words)]
        found = run_ptx(bits.SIX_BIT_WORDS.value, *numbers[1:])
        assert [found[f"${i}"] for i in range(4)] == [int(each) for each in six_bit_words(*words[1:])]
        found = run_ptx(bits.EIGHT_BITS.value, *numbers, 0.125)
        assert [found[f"${i}"] for i in range(16)] == [
            float(each) for each in eight_bit_scales(*words, torch.tensor(0.125))
        ]
        for i in range(4):
            index = torch.tensor(i)
            found = run_ptx(bits.BYTE_TIMES.value, numbers[1], i + 0x7440, 0.375, -0.375 * 2**23)
            assert found["$0"] == float(byte_times(words[1], index, torch.tensor(0.375)))
            found = run_ptx(bits.SIGNED_BYTE.value, numbers[1], i + 0x7440)
            assert found["$0"] == float(signed_byte(words[1], index))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not run Gluon")
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 13, 16])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_on_a_gpu(kind: BlockKind, num_tokens: int) -> None:
    check(kind, num_tokens, 1000, 2048, "cuda")
