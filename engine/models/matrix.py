"""Matrices of a decoder: one rank's weights, and the checkpoint tensors that fill them.

Weights are created empty; `weights.load_model` fills them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

import kernels
from engine.models.shard import SINGLE, WHOLE, Communicator, Shard, SingleRank, Span, Stage

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})  # safetensors' names


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor that the checkpoint must contain, and the memory for this rank's part of it."""

    name: str
    spans: tuple[Span, ...]  # this rank's part in each dimension
    memory: Tensor  # has the shape of the spans' lengths
    dtypes: frozenset[str] = FLOAT_DTYPES  # allowed stored dtypes, by safetensors' names
    aliases: tuple[str, ...] = ()  # alternative names
    take: Callable[[Tensor], None] | None = None  # fills the memory from the stored part; None: a copy
    turns: bool = False  # files also hold it with the last two dimensions swapped
    others: tuple[CheckpointTensor, ...] = ()  # further parts of the same tensor, with other memory

    @property
    def shape(self) -> list[int]:
        """The shape in the checkpoint."""
        return [span.total for span in self.spans]

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(span.start, span.stop, span.step) for span in self.spans)

    @property
    def is_copied(self) -> bool:
        """Return True if the memory gets the stored values as they are, rounded to its dtype."""
        return self.take is None and not self.others and self.memory.is_floating_point()

    def is_stored_so(self, dtype: torch.dtype) -> bool:
        """Return True if a stored tensor of this dtype has the same bytes as the memory."""
        is_whole = self.shape == list(self.memory.shape) and all(span.step == 1 for span in self.spans)
        is_same = is_whole and self.memory.dtype == dtype and self.memory.is_contiguous()
        return is_same and self.take is None and not self.others

    def fill(self, value: Tensor) -> None:
        """Fill the memory from the stored tensor."""
        if self.turns and list(value.shape) != self.shape:
            value = value.transpose(-1, -2)
        part = value.reshape(self.shape)[self.index]
        if self.take is None:
            self.memory.copy_(part)
        else:
            self.take(part)
        for other in self.others:
            other.fill(value)


class CheckpointModule(nn.Module):
    """A module that declares its checkpoint tensors, without those of its submodules."""

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Return the tensors that the checkpoint must contain."""
        return iter(())

    def optional_tensors(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """Return the tensors that the checkpoint may contain: name → function that takes the whole tensor.

        The function raises `ValueError`, which says what the tensor must be.
        """
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a matrix [out, in] in the checkpoint."""

    name: str  # of the matrix in the checkpoint
    rows: Span  # this rank's rows
    expert: Span | None = None  # index of the matrix in a stacked tensor of the checkpoint
    transposed: bool = False  # the float weight is stored as [in, out]
    suffix: str = "."  # separates `name` and the kind of tensor; "_": the weight is called just `name`

    def place(self, tensor: CheckpointTensor) -> CheckpointTensor:
        """Convert `tensor`, declared for a single matrix, to the form in which the checkpoint stores it."""
        spans, memory, take, what = tensor.spans, tensor.memory, tensor.take, tensor.name
        turned = self.transposed and what == "weight"
        if turned:
            spans, memory = spans[::-1], memory.T
        if self.expert is not None:
            spans, memory = (self.expert, *spans), memory.unsqueeze(0)

        def taken(value: Tensor) -> None:
            assert take is not None
            value = value if self.expert is None else value.squeeze(0)
            take(value.T if turned else value)

        return replace(
            tensor,
            name=self._named(what),
            spans=spans,
            memory=memory,
            take=None if take is None else taken,
            aliases=tuple(map(self._named, tensor.aliases)),
            turns=turned and self.expert is not None,
        )

    def _named(self, what: str) -> str:
        return self.name if (self.suffix, what) == ("_", "weight") else f"{self.name}{self.suffix}{what}"


class WeightFormat(ABC):
    """A storage format of matrices: their tensors in a checkpoint, and the conversion to the form that GEMMs read."""

    @abstractmethod
    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the stored tensors of `matrix`: `num_rows` × `columns`, for GEMMs in `dtype`."""

    @abstractmethod
    def tensors(self, matrix: Matrix) -> Iterator[CheckpointTensor]:
        """Return the tensors that fill this memory."""

    def optional_tensors(self, matrix: Matrix) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """Return optional tensors, see `CheckpointModule.optional_tensors`."""
        return iter(())

    def fill_randomly(self, matrix: Matrix, generator: torch.Generator) -> None:  # noqa: B027 (most have none)
        """Fill stored tensors that are not parameters with random weights of standard deviation 0.02."""

    def growth(self, matrix: Matrix, capability: tuple[int, int] | None) -> int:
        """Return by how many bytes `pack` makes weights larger, on a GPU of this compute capability; None: no GPU."""
        return 0

    @abstractmethod
    def pack(self, matrix: Matrix) -> None:
        """Convert the filled memory to `matrix.weight`, the form that GEMMs read. It cannot be filled afterwards."""

    def pack_experts(self, gate_up: Matrix, down: Matrix) -> None:
        """Convert an MoE's packed stacks, which have no biases, to the form that `kernels.experts` reads fastest."""
        packed = kernels.pack_experts(gate_up.uncompressed, down.uncompressed, gate_up.dtype)
        gate_up.set_weight(packed[0])
        down.set_weight(packed[1])


class WeightFormats(Protocol):
    """The weight formats of a checkpoint's matrices."""

    def of(self, names: Sequence[str]) -> WeightFormat:
        """Return the format of a matrix with parts of these names. Raises `ModelError` if their formats differ."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Device, dtype, formats and rank for which weights are created, and the prefix of their names.

    `scope / "mlp"` is the scope of the checkpoint's names below "mlp".
    """

    dtype: torch.dtype
    device: torch.device
    weight_formats: WeightFormats
    shard: Shard = SINGLE
    communicator: Communicator = field(default_factory=SingleRank)
    prefix: str = ""  # of names in the checkpoint
    transposed: bool = False  # matrices are stored as [in, out]
    stage: Stage = WHOLE

    def __truediv__(self, name: str | int) -> Scope:
        return replace(self, prefix=self.name(str(name)))

    def name(self, tensor: str) -> str:
        return f"{self.prefix}.{tensor}" if self.prefix else tensor

    def only_if(self, is_here: bool) -> Scope:
        """Return a scope whose weights have memory only if `is_here`: otherwise another stage has them."""
        return self if is_here else replace(self, device=torch.device("meta"))

    def empty(self, *shape: int) -> nn.Parameter:
        return empty(*shape, dtype=self.dtype, device=self.device)


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Matrix(CheckpointModule):
    """One rank's part of a matrix, or of a stack of equal matrices, with bias. Its rows are parts of a checkpoint."""

    weight: kernels.ExpertWeight  # [num_rows, in], or [num_stacked, num_rows / num_stacked, in]
    stored: dict[tuple[int, str], Tensor]  # (part, name) → tensor of a quantised checkpoint, until packed
    bias: nn.Parameter | None  # [num_rows], or [num_stacked, num_rows / num_stacked]

    def __init__(
        self,
        scope: Scope,
        parts: Sequence[Part],
        columns: Span,
        *,
        num_rows: int = 0,
        bias_parts: Sequence[Part] = (),
        num_stacked: int = 0,
        eighths: tuple[slice, ...] = (),
    ) -> None:
        """num_rows: rows to allocate; 0: those of all parts. num_stacked: matrices in the stack; 0: no stack.

        eighths: columns whose sums are computed apart, see `Shard.eighths`; none: all together.
        """
        super().__init__()
        self.eighths = eighths
        self.parts, self.columns, self.bias_parts, self.num_stacked = parts, columns, bias_parts, num_stacked
        self.dtype = scope.dtype  # of activations
        self.is_here = scope.device.type != "meta"  # otherwise another stage has it
        self.num_rows = num_rows or sum(len(part.rows) for part in parts)
        self.format = scope.weight_formats.of(list(dict.fromkeys(part.name for part in parts)))
        self.format.create(self, scope.dtype, scope.device)
        has_bias = any(len(part.rows) for part in bias_parts)
        self.bias = scope.empty(*self.shape_of_rows()) if has_bias else None

    def shape_of_rows(self, num_rows: int | None = None) -> tuple[int, ...]:
        """Return the leading dimensions of tensors with `num_rows` rows in the whole stack; None: the matrix's rows."""
        num_rows = self.num_rows if num_rows is None else num_rows
        return (self.num_stacked, num_rows // self.num_stacked) if self.num_stacked else (num_rows,)

    def pack(self) -> None:
        """Repack the filled weights for the GEMMs of their device. They can no longer be filled."""
        self.format.pack(self)
        self.set_weight(kernels.pack_weight(self.uncompressed))

    @property
    def uncompressed(self) -> kernels.Weight:
        """The weight before `WeightFormat.pack_experts`."""
        assert not isinstance(self.weight, kernels.CompressedWeight)
        return self.weight

    def set_weight(self, weight: kernels.ExpertWeight) -> None:
        """Replace the weight, and free the old one's memory."""
        if weight is not self.weight:
            del self.weight  # a parameter's name accepts only parameters
            self.weight = weight

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield from self.format.tensors(self)
        yield from by_rows("bias", self.bias_parts, torch.empty(0) if self.bias is None else self.bias.flatten())

    def optional_tensors(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        return self.format.optional_tensors(self)


def by_rows(what: str, parts: Sequence[Part], memory: Tensor, *columns: Span) -> Iterator[CheckpointTensor]:
    """Declare a float tensor for each part, which fills the part's rows of the memory."""
    start = 0
    for part in parts:
        end = start + len(part.rows)
        yield part.place(CheckpointTensor(what, (part.rows, *columns), memory[start:end]))
        start = end
