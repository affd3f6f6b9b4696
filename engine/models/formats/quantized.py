"""What all formats of few bits have in common: they declare the tensors of each part, and decode them to one form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from engine.models.errors import ModelError
from engine.models.layers import FLOAT_DTYPES, CheckpointTensor, Linear, WeightFormat
from engine.models.quantization import Scheme
from engine.models.shard import Span

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that the checkpoint keeps for a matrix [N, K]."""

    name: str
    dtype: torch.dtype  # in memory
    dtypes: frozenset[str]  # in the file, by safetensors' names
    rows: int  # of the matrix, for which one row of this tensor stands; 0: it has no such dimension
    columns: int  # likewise
    transposed: bool = False  # the columns come first
    aliases: tuple[str, ...] = ()  # other names

    def spans(self, rows: Span, columns: Span, names: str) -> tuple[Span, ...]:
        """This rank's part. ModelError, which calls the matrix `names`: ranks would divide what belongs together."""
        spans = [_coarse(rows, self.rows, names, cut=self.dtypes == FLOAT_DTYPES)] if self.rows else []
        if self.columns:
            spans.append(_coarse(columns, self.columns, names))
        return tuple(reversed(spans)) if self.transposed else tuple(spans)


def _coarse(span: Span, size: int, names: str, *, cut: bool = False) -> Span:
    """`span` in units of `size`. `cut`: units may be divided among ranks, which then all hold them."""
    if not cut and (span.start % size or (span.stop % size and span.stop != span.total)):
        raise ModelError(f"{names}: ranks cannot divide its {span.total} channels, which are stored {size} together")
    return Span(-(-span.total // size), span.start // size, -(-span.stop // size))


class Part(NamedTuple):
    """One of the stacked projections, decoded."""

    codes: Tensor  # [n, K], one for each channel also where they have four bits
    scale: Tensor  # [n or the scheme's blocks of them, G] float32
    zero: Tensor | None = None  # [n, G] int8
    factor: Tensor | None = None  # [n] float32
    order: Tensor | None = None  # [K] int64


class QuantizedFormat(WeightFormat):
    """A format of few bits. Its stored tensors stay apart for each part until they are packed."""

    ignored: Sequence[str] = ()  # tensors that checkpoints hold besides, and products do not need

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    @abstractmethod
    def stored(self) -> Iterator[Stored]:
        """The tensors of one part."""

    @abstractmethod
    def decode(self, tensors: Tensors) -> Part:
        """One part from its stored tensors."""

    @abstractmethod
    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        """Values of a stored tensor, so that weights have a standard deviation of about 0.02."""

    def create(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        if sum(len(rows) for _, rows in linear.parts) < linear.num_rows:
            raise ModelError(f"{linear.parts[0][0]}: a quantised matrix cannot be divided unevenly among ranks")
        linear.stored = {
            (part, stored.name): torch.empty(
                [len(span) for span in stored.spans(rows, linear.columns, name)], dtype=stored.dtype, device=device
            )
            for part, (name, rows) in enumerate(linear.parts)
            for stored in self.stored()
        }

    def tensors(self, linear: Linear) -> Iterator[CheckpointTensor]:
        for part, (name, rows) in enumerate(linear.parts):
            for stored in self.stored():
                yield CheckpointTensor(
                    f"{name}.{stored.name}",
                    stored.spans(rows, linear.columns, name),
                    linear.stored[part, stored.name],
                    stored.dtypes,
                    tuple(f"{name}.{alias}" for alias in stored.aliases),
                )

    def optional_tensors(self, linear: Linear) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        for name in dict.fromkeys(name for name, _ in linear.parts):
            yield from ((f"{name}.{ignored}", lambda value: None) for ignored in self.ignored)

    def fill_randomly(self, linear: Linear, generator: torch.Generator) -> None:
        for part in range(len(linear.parts)):
            for stored in self.stored():
                memory = linear.stored[part, stored.name]
                memory.copy_(self.random(tuple(memory.shape), stored, generator))

    def pack(self, linear: Linear) -> None:
        names, spans = [name for name, _ in linear.parts], [rows for _, rows in linear.parts]
        parts = [
            self.decode({stored.name: linear.stored.pop((part, stored.name)) for stored in self.stored()})
            for part in range(len(names))
        ]
        codes, order = torch.cat([part.codes for part in parts]), parts[0].order
        if order is not None and not all(part.order is not None and part.order.equal(order) for part in parts):
            raise ModelError(f"{', '.join(names)}: their channels are in different orders ('g_idx')")
        block = self.scheme.rows
        aligned = block > 1 and all(span.start % block == 0 and len(span) % block == 0 for span in spans)
        scales = [
            part.scale if aligned else _for_each_row(part.scale, block, span)
            for part, span in zip(parts, spans, strict=True)
        ]
        kind, zeros, factors = self.scheme.kind, [part.zero for part in parts], [part.factor for part in parts]
        linear.weight = kernels.QuantizedWeight(
            kind=kind,
            codes=kernels.pack_nibbles(codes) if kind in ("int4", "e2m1") else codes,
            scale=_narrowest(torch.cat(scales)),
            group=self.scheme.group or len(linear.columns),
            rows=block if aligned else 1,
            zero=_unless_zero(torch.cat([zero for zero in zeros if zero is not None])) if None not in zeros else None,
            factor=torch.cat([factor for factor in factors if factor is not None]) if None not in factors else None,
            order=order,
            rounds_activations=self.scheme.activations,
        )


def _for_each_row(scale: Tensor, block: int, rows: Span) -> Tensor:
    """Scales [blocks, G] of blocks of rows (0: of all rows) → of each of the `rows`."""
    if block == 0:
        return scale.expand(len(rows), -1)
    first = rows.start % block
    return scale.repeat_interleave(block, 0)[first : first + len(rows)]


def _narrowest(scale: Tensor) -> Tensor:
    """Scales of groups in the shortest dtype that holds them exactly; those of rows stay as they are."""
    if scale.dtype != torch.float32 or scale.shape[1] == 1:
        return scale.contiguous()
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype)
    return scale.contiguous()


def _unless_zero(zero: Tensor) -> Tensor | None:
    return zero if zero.any() else None
