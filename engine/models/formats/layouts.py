"""The layouts in which checkpoints store quantised matrices, one class each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

import kernels
from engine.models.errors import ModelError
from engine.models.formats.floats import FloatFormat
from engine.models.formats.quantized import QuantizedFormat, Stored, Tensors, UnpackedRows
from engine.models.matrix import FLOAT_DTYPES, CheckpointTensor, Matrix, WeightFormat
from engine.models.quantization import Scheme
from engine.models.shard import EIGHTHS

I8, I32, U8, E4M3 = (frozenset({name}) for name in ("I8", "I32", "U8", "F8_E4M3"))
DTYPES = {"e4m3": (torch.float8_e4m3fn, E4M3), "int8": (torch.int8, I8)}
STD = 0.02  # of random weights
STD_OF_CODES = {"e4m3": 64.0, "int8": 73.9, "int4": 4.6, "e2m1": 2.9}  # of uniformly random codes


def _random_codes(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    """Return random codes; no NaN for e4m3."""
    if kind == "e4m3":
        return 64 * torch.randn(shape, generator=generator, device=generator.device).clamp(-7, 7)
    return torch.randint(-128, 128, shape, generator=generator, device=generator.device)


class Plain(QuantizedFormat):
    """`weight` [N, K] e4m3 or int8, with `weight_scale` per tensor, row, group of channels, or block."""

    ignored = ("input_scale", "input_zero_point", "activation_scale", "input_scale_ub", "output_scale")

    def stored(self) -> Iterator[Stored]:
        scheme = self.scheme
        yield Stored("weight", *DTYPES[scheme.kind], 1, 1, aliases=("_weight_qdata",))  # torchao's name
        aliases = ("weight_scale_inv", "_weight_scale")  # despite its name, the first is also the scale
        yield Stored("weight_scale", torch.float32, FLOAT_DTYPES, scheme.rows, scheme.group, aliases=aliases)
        if not scheme.symmetric:
            yield Stored("weight_zero_point", torch.int8, I8, scheme.rows, scheme.group)

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        codes, scale, zero = tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
        scale = _two_dimensional(scale, self.scheme)
        if zero is not None:
            zero = _two_dimensional(zero, self.scheme).expand(len(codes), -1)
        return UnpackedRows(codes, scale, zero)

    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        if stored.name == "weight":
            return _random_codes(shape, self.scheme.kind, generator)
        return torch.full(shape, STD / STD_OF_CODES[self.scheme.kind] if stored.name == "weight_scale" else 0)


def _two_dimensional(scale: Tensor, scheme: Scheme) -> Tensor:
    """Reshape scales to [blocks of rows or 1, groups or 1]."""
    return scale.reshape(scale.shape[0] if scheme.rows else 1, -1)


class IntegerFormat(QuantizedFormat):
    """3-bit, 4-bit or 8-bit integers packed in int32 words: 3-bit ones, which become int4, in three words at a time."""

    @property
    def bits(self) -> int:
        return self.scheme.bits or (4 if self.scheme.kind == "int4" else 8)

    @property
    def words(self) -> int:
        return 3 if self.bits == 3 else 1

    @property
    def per_word(self) -> int:
        """Codes in `words` words."""
        return 32 * self.words // self.bits

    def codes(self, unsigned: Tensor) -> Tensor:
        """Convert to the codes of `QuantizedWeight`: int4 from 0 to 15, int8 signed."""
        if self.scheme.kind == "int4":
            return unsigned + 8 - (1 << self.bits - 1)
        return (unsigned - 128).to(torch.int8)

    def zero(self, unsigned: Tensor) -> Tensor:
        """Convert zero points [n, G] from unsigned codes to values."""
        return (unsigned + self.scheme.zero_offset - (1 << self.bits - 1)).to(torch.int8)

    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        """Return random values, with zero points in the middle and channels in order."""
        match stored.name:
            case "qweight" | "weight_packed":
                return torch.randint(-(2**31), 2**31, shape, generator=generator, device=generator.device)
            case "scales" | "weight_scale":
                return torch.full(shape, STD / math.sqrt((4**self.bits - 1) / 12))  # of uniformly random codes
            case "g_idx" | "weight_g_idx":
                return torch.arange(shape[0]) // (self.scheme.group or shape[0])
        middle = (1 << self.bits - 1) - self.scheme.zero_offset
        joined = sum(middle << self.bits * i for i in range(self.per_word))
        words = [joined >> 32 * i & 0xFFFFFFFF for i in range(self.words)]
        signed = torch.tensor([word - (1 << 32) if word >= 1 << 31 else word for word in words])
        return signed.repeat(shape[-1] // self.words).expand(shape)


def _codes_of_words(words: Tensor, bits: int, dim: int, order: Callable[[int], int] = int) -> Tensor:
    """Unpack int32 words into unsigned codes along `dim`, lowest bits first, or in `order`."""
    if bits == 3:
        words = words.unflatten(dim, (-1, 3)).long() & 0xFFFFFFFF
        low, middle, high = words.unbind(dim + 1)
        pairs = low | middle << 32, middle | high << 32, high
        codes = torch.stack([pairs[3 * i // 32] >> 3 * i % 32 & 7 for i in range(32)], dim + 1).to(torch.int16)
        return codes.flatten(dim, dim + 1)
    per_word = 32 // bits
    shifts = [bits * order(i) for i in range(per_word)]
    codes = torch.stack([words >> shift & ((1 << bits) - 1) for shift in shifts], dim + 1).to(torch.int16)
    return codes.flatten(dim, dim + 1)


def _order(group_of: Tensor, group: int) -> Tensor | None:
    """Return the channels sorted by group, with `group` channels each; None if they are in order."""
    order = group_of.argsort(stable=True)
    in_order = torch.arange(len(order), device=order.device)
    if not torch.equal(group_of[order].long(), in_order // group):
        raise ModelError("'g_idx' must give every group as many channels; with tensor parallelism it cannot be divided")
    return None if torch.equal(order, in_order) else order


class Packed(IntegerFormat):
    """compressed-tensors' pack-quantized: `weight_packed` [N, K / 8], `weight_scale` [N, G]."""

    ignored = ("weight_shape", "input_scale")

    def stored(self) -> Iterator[Stored]:
        group = self.scheme.group
        yield Stored("weight_packed", torch.int32, I32, 1, self.per_word)
        yield Stored("weight_scale", torch.float32, FLOAT_DTYPES, 1, group)
        if not self.scheme.symmetric:
            yield Stored("weight_zero_point", torch.int32, I32, self.per_word, group)
        if self.scheme.reordered:
            yield Stored("weight_g_idx", torch.int32, I32, 0, 1)

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        codes, scale = _codes_of_words(tensors["weight_packed"], self.bits, 1), tensors["weight_scale"]
        scale, zero, order = scale.reshape(len(codes), -1), None, None
        if not self.scheme.symmetric:
            zero = self.zero(_codes_of_words(tensors["weight_zero_point"].reshape(-1, scale.shape[1]), self.bits, 0))
        if self.scheme.reordered:
            order = _order(tensors["weight_g_idx"], self.scheme.group)
            codes = codes if order is None else codes[:, order]
        return UnpackedRows(self.codes(codes), scale, zero, order=order)


class GPTQ(IntegerFormat):
    """`qweight` [K / 8, N], `qzeros` [G, N / 8], `scales` [G, N], and `g_idx` [K] with desc_act.

    Of three bits, `qweight` [3K / 32, N] and `qzeros` [G, 3N / 32].
    """

    @property
    def ignored(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.scheme.reordered else ("g_idx",)

    def stored(self) -> Iterator[Stored]:
        group, words = self.scheme.group, self.words
        yield Stored("qweight", torch.int32, I32, 1, self.per_word, transposed=True, column_words=words)
        yield Stored("qzeros", torch.int32, I32, self.per_word, group, transposed=True, row_words=words)
        yield Stored("scales", torch.float32, FLOAT_DTYPES, 1, group, transposed=True)
        if self.scheme.reordered:
            yield Stored("g_idx", torch.int32, I32, 0, 1)

    def growth(self, matrix: Matrix, capability: tuple[int, int] | None) -> int:
        """Codes of three bits take four in memory."""
        stored = (tensor.nbytes for (_, name), tensor in matrix.stored.items() if name == "qweight")
        return sum(stored) // 3 if self.bits == 3 else 0

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        codes, order = _codes_of_words(tensors["qweight"], self.bits, 0).T, None
        scale = tensors["scales"].reshape(-1, len(codes)).T
        zero = _codes_of_words(tensors["qzeros"].reshape(scale.shape[1], -1), self.bits, 1).T
        if self.scheme.reordered:
            order = _order(tensors["g_idx"], self.scheme.group or codes.shape[1])
            codes = codes if order is None else codes[:, order]
        return UnpackedRows(self.codes(codes), scale, self.zero(zero), order=order)


class AWQ(IntegerFormat):
    """`qweight` [K, N / 8], `qzeros` [G, N / 8], `scales` [G, N]; a word holds rows 0, 2, 4, 6, 1, 3, 5, 7 of eight."""

    def stored(self) -> Iterator[Stored]:
        group = self.scheme.group
        yield Stored("qweight", torch.int32, I32, self.per_word, 1, transposed=True)
        if not self.scheme.symmetric:
            yield Stored("qzeros", torch.int32, I32, self.per_word, group, transposed=True)
        yield Stored("scales", torch.float32, FLOAT_DTYPES, 1, group, transposed=True)

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        codes, zero = _codes_of_words(tensors["qweight"], 4, 1, self._bits_of).T, None
        scale = tensors["scales"].reshape(-1, len(codes)).T
        if not self.scheme.symmetric:
            zero = self.zero(_codes_of_words(tensors["qzeros"].reshape(scale.shape[1], -1), 4, 1, self._bits_of).T)
        return UnpackedRows(codes, scale, zero)

    @staticmethod
    def _bits_of(row: int) -> int:
        return row // 2 + row % 2 * 4


class GEMV(AWQ):
    """AWQ's gemv: `qweight` [N, K / 8], `qzeros` [N, G / 8] and `scales` [N, G], these two with unused columns to a
    multiple of 8 groups, of 16 for groups of 64, of 32 for groups of 32. A word holds channels in order.
    """

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        if len(matrix.columns) != matrix.columns.total:
            raise ModelError(
                f"{matrix.parts[0].name}: AWQ's gemv layout cannot be divided by input channels among ranks"
            )
        super().create(matrix, dtype, device)

    def stored(self) -> Iterator[Stored]:
        padded = 8 * self.scheme.group * max(128 // self.scheme.group, 1)  # channels of the groups of a unit
        words = max(128 // self.scheme.group, 1)
        yield Stored("qweight", torch.int32, I32, 1, self.per_word)
        yield Stored("qzeros", torch.int32, I32, 1, padded, column_words=words)
        yield Stored("scales", torch.float32, FLOAT_DTYPES, 1, padded, column_words=8 * words)

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        codes = _codes_of_words(tensors["qweight"], 4, 1)
        count = codes.shape[1] // self.scheme.group
        zero = self.zero(_codes_of_words(tensors["qzeros"], 4, 1)[:, :count])
        return UnpackedRows(codes, tensors["scales"][:, :count], zero)


class FP4(QuantizedFormat):
    """e2m1, two codes per byte. nvfp4: e4m3 scales per 16 channels and a global one; mxfp4: powers of two per 32.

    `weight_packed` [N, K / 2] (ModelOpt: `weight`), even channels in the low bits; `weight_scale` [N, G].
    """

    ignored = ("input_scale", "input_global_scale")

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        if len(matrix.columns) % 8:
            raise ModelError(
                f"{matrix.parts[0].name}: {self.scheme.kind} needs a multiple of 8 input channels, "
                f"got {len(matrix.columns)}"
            )
        super().create(matrix, dtype, device)

    def stored(self) -> Iterator[Stored]:
        nvfp4 = bool(self.scheme.global_scale)
        yield Stored("weight_packed", torch.uint8, U8, 1, 2, aliases=("weight",))
        dtype, dtypes = (torch.float8_e4m3fn, E4M3) if nvfp4 else (torch.uint8, U8)
        yield Stored("weight_scale", dtype, dtypes, 1, self.scheme.group)
        if nvfp4:
            yield Stored(self.scheme.global_scale, torch.float32, FLOAT_DTYPES, 0, 0)

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        pairs, scale, factor = tensors["weight_packed"], tensors["weight_scale"], None
        codes = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)
        if self.scheme.global_scale:
            one = tensors[self.scheme.global_scale].reshape(1)
            factor = (1 / one if self.scheme.divided else one).expand(len(codes))
        else:
            scale = torch.exp2(scale.float() - 127)
        return UnpackedRows(codes, scale, factor=factor)

    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        match stored.name:
            case "weight_packed":
                return torch.randint(0, 256, shape, generator=generator, device=generator.device)
            case "weight_scale":
                return torch.full(shape, 1 if self.scheme.global_scale else 120)
        scale = STD / STD_OF_CODES["e2m1"]
        return torch.full(shape, 1 / scale if self.scheme.divided else scale)


class Blocks(FP4):
    """gpt-oss's mxfp4: `blocks` [N, K / 32, 16] of 32 channels each, and `scales` [N, K / 32]."""

    def stored(self) -> Iterator[Stored]:
        yield Stored("blocks", torch.uint8, U8, 1, 32, inner=(16,))
        yield Stored("scales", torch.uint8, U8, 1, 32)

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        return super().unpack({"weight_packed": tensors["blocks"].flatten(1), "weight_scale": tensors["scales"]})

    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        plain = {"blocks": "weight_packed", "scales": "weight_scale"}[stored.name]
        return super().random(shape, replace(stored, name=plain), generator)


class Online(WeightFormat):
    """A float `weight` [N, K], quantised at load time: per row, or to int4 in groups of channels.

    Of a matrix whose sums are computed in eighths, each row has a scale for every eighth.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        rows, columns, group = matrix.shape_of_rows(), len(matrix.columns), self.scheme.group
        if group and columns % group:
            name = matrix.parts[0].name
            raise ModelError(f"{name}: int4 needs a multiple of {group} input channels, got {columns}")
        if group:
            codes = torch.empty(*rows, columns // 2, dtype=torch.uint8, device=device)
            scale = torch.empty(*rows, columns // group, dtype=torch.bfloat16, device=device)
        else:
            group = self._width(matrix)
            codes = torch.empty(*rows, columns, dtype=DTYPES[self.scheme.kind][0], device=device)
            scale = torch.empty(*rows, columns // group, dtype=torch.float32, device=device)
        matrix.weight = self._made_of(codes, scale, group)

    @staticmethod
    def _width(matrix: Matrix) -> int:
        """Return how many channels of a row share a scale, if it is not the scheme that says so."""
        columns, total = len(matrix.columns), matrix.columns.total
        if not matrix.eighths or total % EIGHTHS == 0:
            return columns // (len(matrix.eighths) or 1)
        if columns < total:
            name = matrix.parts[0].name
            raise ModelError(f"{name}: deterministic ranks need a multiple of {EIGHTHS} input channels, got {total}")
        return columns

    def _made_of(self, codes: Tensor, scale: Tensor, group: int) -> kernels.QuantizedWeight:
        return kernels.QuantizedWeight(
            self.scheme.kind, codes, scale, group, rounds_activations=self.scheme.activations
        )

    def _quantise(self, value: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Quantise value [n, K] to the codes and scales of `QuantizedWeight`. width: see `_width`."""
        if self.scheme.kind == "int4":
            codes, scale = kernels.quantize_groups(value, self.scheme.group)
            return kernels.pack_nibbles(codes), scale
        codes, scale = kernels.quantize_rows(value.reshape(-1, width), DTYPES[self.scheme.kind][0])
        return codes.view(value.shape), scale.view(len(value), value.shape[1] // width)

    def tensors(self, matrix: Matrix) -> Iterator[CheckpointTensor]:
        weight, start = self._weight(matrix), 0
        stacks = [each if each.dim() > 2 else each[None] for each in (weight.codes, weight.scale)]
        for part in matrix.parts:
            index = min(start // stacks[0].shape[1], len(stacks[0]) - 1)  # a part is of one matrix, or empty
            first = start - index * stacks[0].shape[1]
            codes, scale = (stack[index, first : first + len(part.rows)] for stack in stacks)
            start += len(part.rows)

            def fill(value: Tensor, codes: Tensor = codes, scale: Tensor = scale) -> None:
                quantised = self._quantise(value.to(codes.device).contiguous(), weight.group)
                codes.copy_(quantised[0])
                scale.copy_(quantised[1])

            yield part.place(CheckpointTensor("weight", (part.rows, matrix.columns), codes, take=fill))

    def fill_randomly(self, matrix: Matrix, generator: torch.Generator) -> None:
        weight = self._weight(matrix)
        weight.codes.copy_(_random_codes(tuple(weight.codes.shape), self.scheme.kind, generator))
        weight.scale.fill_(STD / STD_OF_CODES[self.scheme.kind])

    def pack(self, matrix: Matrix) -> None:
        """Put the scales of a stack as GEMMs read them. All else already has their form."""
        weight = self._weight(matrix)
        if weight.scale.dim() > 2:
            matrix.weight = replace(weight, scale=kernels.by_groups(weight.scale))

    def quantised(self, weight: Tensor) -> kernels.QuantizedWeight:
        """Quantise a float matrix [N, K]."""
        width = self.scheme.group or weight.shape[1]
        return self._made_of(*self._quantise(weight, width), width)

    @staticmethod
    def _weight(matrix: Matrix) -> kernels.QuantizedWeight:
        assert isinstance(matrix.weight, kernels.QuantizedWeight)
        return matrix.weight


class Shared(FloatFormat):
    """A float matrix that another module also reads. A quantised copy for GEMMs is made once it is filled."""

    def __init__(self, online: Online) -> None:
        self.online = online

    def pack(self, matrix: Matrix) -> None:
        weight = matrix.weight
        assert isinstance(weight, Tensor)
        del matrix.weight  # a parameter's name accepts only parameters
        matrix.weight = self.online.quantised(weight)
