"""Common code of quantised formats: they declare the tensors of each part and unpack them to one form."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from engine.models.errors import ModelError
from engine.models.matrix import FLOAT_DTYPES, CheckpointTensor, Matrix, WeightFormat
from engine.models.quantization import Scheme
from engine.models.shard import Span

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor stored for a matrix [N, K]."""

    name: str
    dtype: torch.dtype  # in memory
    dtypes: frozenset[str]  # in the file, by safetensors' names
    rows: int  # matrix rows per row of this tensor; 0: no such dimension
    columns: int  # matrix columns per column of this tensor; 0: no such dimension
    transposed: bool = False  # the columns come first
    aliases: tuple[str, ...] = ()  # other names
    inner: tuple[int, ...] = ()  # sizes of additional last dimensions
    row_words: int = 1  # rows of this tensor for `rows`
    column_words: int = 1  # columns of this tensor for `columns`

    def spans(self, rows: Span, columns: Span, names: str) -> tuple[Span, ...]:
        """Return this rank's part. Raises `ModelError`, which calls it `names`, if ranks would split a group."""
        spans = []
        if self.rows:
            spans.append(_wide(_coarse(rows, self.rows, names, cut=self.dtypes == FLOAT_DTYPES), self.row_words))
        if self.columns:
            spans.append(_wide(_coarse(columns, self.columns, names), self.column_words))
        if self.transposed:
            spans.reverse()
        return (*spans, *map(Span.whole, self.inner))


def _wide(span: Span, size: int) -> Span:
    """Convert a span of units to one of their `size` parts each."""
    return span if size == 1 else Span(span.total * size, span.start * size, span.stop * size)


def _coarse(span: Span, size: int, names: str, *, cut: bool = False) -> Span:
    """Convert `span` to units of `size`. `cut`: ranks may split a unit, which each of them then holds."""
    if size == 1:
        return span
    if not cut and (span.start % size or (span.stop % size and span.stop != span.total)):
        raise ModelError(f"{names}: ranks cannot divide its {span.total} channels, which are stored {size} together")
    return Span(-(-span.total // size), span.start // size, -(-span.stop // size))


class UnpackedRows(NamedTuple):
    """Rows of a matrix, their codes unpacked."""

    codes: Tensor  # [n, K], one element per code, also for 4-bit codes
    scale: Tensor  # [n or number of row blocks, G] float32 or float16
    zero: Tensor | None = None  # [n, G] int8 or float16
    factor: Tensor | None = None  # [n] float32
    minimum: Tensor | None = None  # [n, G] float32
    order: Tensor | None = None  # [K] int64


class QuantizedFormat(WeightFormat):
    """A quantised format. The stored tensors of each part are kept separately until they are packed."""

    ignored: Sequence[str] = ()  # stored tensors that GEMMs do not need

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def of_part(self, name: str) -> QuantizedFormat:
        """Return the format of a part, by its name in the checkpoint."""
        return self

    @abstractmethod
    def stored(self) -> Iterator[Stored]:
        """Return the tensors of one part."""

    @abstractmethod
    def unpack(self, tensors: Tensors) -> UnpackedRows:
        """Unpack one part from its stored tensors."""

    @abstractmethod
    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        """Return random values of a stored tensor such that weights have a standard deviation of about 0.02."""

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        if sum(len(part.rows) for part in matrix.parts) < matrix.num_rows:
            raise ModelError(f"{matrix.parts[0].name}: a quantised matrix cannot be divided unevenly among ranks")
        matrix.stored = {}
        formats = [self.of_part(part.name) for part in matrix.parts]
        for each in zip(*(form.stored() for form in formats), strict=True):
            name, dtype = each[0].name, each[0].dtype  # those of all parts
            shapes = [
                [len(span) for span in stored.spans(part.rows, matrix.columns, part.name)]
                for stored, part in zip(each, matrix.parts, strict=True)
            ]
            sizes = [math.prod(shape) for shape in shapes]
            memory = torch.empty(sum(sizes), dtype=dtype, device=device)  # one allocation, which is freed at once
            for i, (own, shape) in enumerate(zip(memory.split(sizes), shapes, strict=True)):
                matrix.stored[i, name] = own.view(shape)

    def tensors(self, matrix: Matrix) -> Iterator[CheckpointTensor]:
        for i, part in enumerate(matrix.parts):
            for stored in self.of_part(part.name).stored():
                spans = stored.spans(part.rows, matrix.columns, part.name)
                memory = matrix.stored[i, stored.name]
                yield part.place(CheckpointTensor(stored.name, spans, memory, stored.dtypes, stored.aliases))

    def optional_tensors(self, matrix: Matrix) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        for name in dict.fromkeys(part.name for part in matrix.parts):
            yield from ((f"{name}.{ignored}", lambda value: None) for ignored in self.ignored)

    def fill_randomly(self, matrix: Matrix, generator: torch.Generator) -> None:
        for i, part in enumerate(matrix.parts):
            form = self.of_part(part.name)
            for stored in form.stored():
                memory = matrix.stored[i, stored.name]
                memory.copy_(form.random(tuple(memory.shape), stored, generator))

    def pack(self, matrix: Matrix) -> None:
        """Pack one matrix of a stack at a time, so that few codes are unpacked at once."""
        own = [i for i, part in enumerate(matrix.parts) if len(part.rows)]
        count, kind, block = len(own) // (matrix.num_stacked or 1), self.scheme.kind, self.scheme.rows
        spans = [matrix.parts[i].rows for i in own[:count]]
        aligned = block > 1 and all(span.start % block == len(span) % block == 0 for span in spans)
        unpacked = [self._unpacked(matrix, own[at : at + count], aligned) for at in range(0, len(own), count)]
        own_or_stacked = _stack if matrix.num_stacked else _only
        codes, scale, zero, factor, minimum, order = map(own_or_stacked, zip(*unpacked, strict=True))
        assert codes is not None
        assert scale is not None
        if matrix.num_stacked and order is not None and not codes.is_cpu:
            name = matrix.parts[own[0]].name
            raise ModelError(f"{name}: experts whose channels are reordered (desc_act) are supported on CPUs alone")
        scale = scale.contiguous() if aligned else _narrowest(scale)  # cuBLAS needs block scales in float32
        if matrix.num_stacked and not aligned and not codes.is_cpu:
            scale, zero = kernels.by_groups(scale), None if zero is None else kernels.by_groups(zero)
        matrix.weight = kernels.QuantizedWeight(
            kind=kind,
            codes=codes,
            scale=scale,
            group=self.scheme.group or len(matrix.columns),
            rows=block if aligned else 1,
            zero=None if zero is None or not zero.any() else zero,
            factor=factor,
            minimum=minimum,
            order=order,
            rounds_activations=self.scheme.activations,
        )

    def _unpacked(self, matrix: Matrix, indices: Sequence[int], aligned: bool) -> UnpackedRows:
        """Unpack one matrix from its parts and release their stored tensors. 4-bit codes are packed for `kernels`."""
        names, spans = [matrix.parts[i].name for i in indices], [matrix.parts[i].rows for i in indices]
        formats = zip(indices, map(self.of_part, names), strict=True)
        parts = [
            form.unpack({stored.name: matrix.stored.pop((i, stored.name)) for stored in form.stored()})
            for i, form in formats
        ]
        codes, order = torch.cat([part.codes for part in parts]), parts[0].order
        if order is not None and not all(part.order is not None and part.order.equal(order) for part in parts):
            raise ModelError(f"{', '.join(names)}: their channels are in different orders ('g_idx')")
        scales = [
            part.scale if aligned else _for_each_row(part.scale, self.scheme.rows, span)
            for part, span in zip(parts, spans, strict=True)
        ]
        zeros = [part.zero for part in parts if part.zero is not None]
        factors = [part.factor for part in parts if part.factor is not None]
        minima = [part.minimum for part in parts if part.minimum is not None]
        pack = {"int4": kernels.pack_nibbles, "e2m1": kernels.pack_e2m1}.get(self.scheme.kind)
        return UnpackedRows(
            codes if pack is None else pack(codes),
            torch.cat(scales),
            torch.cat(zeros) if zeros else None,
            torch.cat(factors) if factors else None,
            torch.cat(minima) if minima else None,
            order,
        )


def _only(tensors: Sequence[Tensor | None]) -> Tensor | None:
    return tensors[0]


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Stack tensors; None if all are None. If only some orders are None, these matrices get the identity."""
    some = next((tensor for tensor in tensors if tensor is not None), None)
    if some is None:
        return None
    in_order = torch.arange(len(some), device=some.device)
    return torch.stack([in_order if tensor is None else tensor for tensor in tensors])


def _for_each_row(scale: Tensor, block: int, rows: Span) -> Tensor:
    """Expand scales [blocks, G] of row blocks (0: of all rows) to all `rows`."""
    if block == 0:
        return scale.expand(len(rows), -1)
    first = rows.start % block
    return scale.repeat_interleave(block, 0)[first : first + len(rows)]


def _narrowest(scale: Tensor) -> Tensor:
    """Return group scales in the smallest dtype that is exact; row scales are unchanged."""
    if scale.dtype != torch.float32 or scale.shape[-1] == 1:
        return scale.contiguous()
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype)
    return scale.contiguous()
