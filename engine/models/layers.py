"""The parts a decoder is made of. Each holds one rank's weights and declares the checkpoint tensors that fill them.

Weights are made empty: `weights.load_model` fills them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.shard import SINGLE, WHOLE, Communicator, Shard, SingleRank, Span, Stage

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})  # safetensors' names


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor that the checkpoint must hold, and the memory that one rank's part of it fills."""

    name: str
    spans: tuple[Span, ...]  # this rank's part, along each dimension
    memory: Tensor  # its shape is the spans' lengths
    dtypes: frozenset[str] = FLOAT_DTYPES  # in which it may be stored, by safetensors' names
    aliases: tuple[str, ...] = ()  # other names that it may have
    take: Callable[[Tensor], None] | None = None  # fills the memory from the part in the file, where a copy does not

    others: tuple[CheckpointTensor, ...] = ()  # further parts of the same tensor, which fill other memory

    @property
    def shape(self) -> list[int]:
        """In the checkpoint."""
        return [span.total for span in self.spans]

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(span.start, span.stop, span.step) for span in self.spans)

    def fill(self, value: Tensor) -> None:
        """From the tensor in the file."""
        part = value.reshape(self.shape)[self.index]
        if self.take is None:
            self.memory.copy_(part)
        else:
            self.take(part)
        for other in self.others:
            other.fill(value)


class CheckpointModule(nn.Module):
    """A module that says what a checkpoint holds for it: for itself, not for the modules inside it."""

    def tensors(self) -> Iterator[CheckpointTensor]:
        """What it must hold."""
        return iter(())

    def optional_tensors(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """What it may hold: names, each with a function that takes the whole tensor.

        The function raises ValueError, which says what the tensor must be.
        """
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a matrix [out, in] that a checkpoint keeps."""

    name: str  # of the matrix, in the checkpoint
    rows: Span  # of it: this rank's
    expert: Span | None = None  # the matrix is this one of those that the checkpoint's tensor stacks
    transposed: bool = False  # its float weight is stored as [in, out]
    suffix: str = "."  # what is between `name` and what a tensor is; "_": the weight is called `name` alone

    def place(self, tensor: CheckpointTensor) -> CheckpointTensor:
        """`tensor`, declared as the "weight", "bias" or other tensor of one matrix, as the checkpoint keeps it."""
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
        )

    def _named(self, what: str) -> str:
        return self.name if (self.suffix, what) == ("_", "weight") else f"{self.name}{self.suffix}{what}"


class WeightFormat(ABC):
    """How matrices of one format are stored in a checkpoint, and how they become what `kernels` multiplies by."""

    @abstractmethod
    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        """Give `matrix` the empty memory of its stored tensors: `num_rows` × `columns` of a product in `dtype`."""

    @abstractmethod
    def tensors(self, matrix: Matrix) -> Iterator[CheckpointTensor]:
        """What fills that memory."""

    def optional_tensors(self, matrix: Matrix) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """What the checkpoint may hold besides: see `CheckpointModule.optional_tensors`."""
        return iter(())

    def fill_randomly(self, matrix: Matrix, generator: torch.Generator) -> None:  # noqa: B027 (parameters are filled anyway)
        """Fill what is no parameter with weights of standard deviation 0.02."""

    @abstractmethod
    def pack(self, matrix: Matrix) -> None:
        """Set `matrix.weight`, from the filled memory, to what products take. It can no longer be filled."""


class WeightFormats(Protocol):
    """The formats of a checkpoint's matrices."""

    def of(self, names: Sequence[str]) -> WeightFormat:
        """Of the matrix whose parts have these names in the checkpoint. ModelError: they are stored differently."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where and how weights are made. `scope / "mlp"` is that of what the checkpoint keeps below "mlp"."""

    dtype: torch.dtype
    device: torch.device
    weight_formats: WeightFormats
    shard: Shard = SINGLE
    communicator: Communicator = field(default_factory=SingleRank)
    prefix: str = ""  # of the names in the checkpoint
    stage: Stage = WHOLE

    def __truediv__(self, name: str | int) -> Scope:
        return replace(self, prefix=self.name(str(name)))

    def name(self, tensor: str) -> str:
        return f"{self.prefix}.{tensor}" if self.prefix else tensor

    def only_if(self, is_here: bool) -> Scope:
        """Else of weights without memory: another stage has them."""
        return self if is_here else replace(self, device=torch.device("meta"))

    def empty(self, *shape: int) -> nn.Parameter:
        return empty(*shape, dtype=self.dtype, device=self.device)


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Matrix(CheckpointModule):
    """One rank's part of a matrix, or of a stack of as many rows each, and of its bias. Parts of a checkpoint are its rows."""

    weight: kernels.Weight  # [num_rows, in], or [num_stacked, num_rows / num_stacked, in]
    stored: dict[tuple[int, str], Tensor]  # (part, name) → what a quantised checkpoint holds, until it is packed
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
    ) -> None:
        """num_rows: that this rank has memory for; 0: for those of all parts. num_stacked: matrices; 0: it is no stack."""
        super().__init__()
        self.parts, self.columns, self.bias_parts, self.num_stacked = parts, columns, bias_parts, num_stacked
        self.dtype = scope.dtype  # of products
        self.is_here = scope.device.type != "meta"  # else another stage has it
        self.num_rows = num_rows or sum(len(part.rows) for part in parts)
        self.format = scope.weight_formats.of(list(dict.fromkeys(part.name for part in parts)))
        self.format.create(self, scope.dtype, scope.device)
        has_bias = any(len(part.rows) for part in bias_parts)
        self.bias = scope.empty(*self.shape_of_rows()) if has_bias else None

    def shape_of_rows(self, num_rows: int | None = None) -> tuple[int, ...]:
        """The first dimensions of tensors with `num_rows` for the whole stack (None: the matrix's)."""
        num_rows = self.num_rows if num_rows is None else num_rows
        return (self.num_stacked, num_rows // self.num_stacked) if self.num_stacked else (num_rows,)

    def pack(self) -> None:
        """Repack the filled weights for the products of their device. They can no longer be filled."""
        self.format.pack(self)
        packed = kernels.pack_weight(self.weight)
        if packed is not self.weight:
            del self.weight  # the name of a parameter takes nothing else
            self.weight = packed

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield from self.format.tensors(self)
        yield from by_rows("bias", self.bias_parts, torch.empty(0) if self.bias is None else self.bias.flatten())

    def optional_tensors(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        return self.format.optional_tensors(self)


def by_rows(what: str, parts: Sequence[Part], memory: Tensor, *columns: Span) -> Iterator[CheckpointTensor]:
    """A float tensor of each part, which fills the part's rows of the memory."""
    start = 0
    for part in parts:
        end = start + len(part.rows)
        yield part.place(CheckpointTensor(what, (part.rows, *columns), memory[start:end]))
        start = end


class Linear(Matrix):
    """x [T, in] → x Wᵀ + b [T, out]. Several projections of the same input are one: their rows are stacked.

    `shard` says what ranks divide: "column" the rows of W (the columns of Wᵀ) in whole units of `width`, of which several
    ranks hold the same where there are fewer than ranks; "row" the input channels, so that each rank has a summand of
    the product, which `add_to` sums; "vocab" the rows, unevenly if need be.
    """

    def __init__(
        self,
        scope: Scope,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        shard: Literal["column", "row", "vocab"] | None = None,
        width: int = 1,
        fused: str = "",
    ) -> None:
        """parts: the stacked projections' names in the checkpoint → how many rows each has on all ranks together.

        fused: the checkpoint's name of one tensor that holds all of them, one after the other.
        """
        columns = scope.shard.span("in_features", in_features) if shard == "row" else Span.whole(in_features)
        own, num_rows = [], 0
        for name, rows in parts.items():
            span = Span.whole(rows)
            if shard == "column":
                span = scope.shard.span(scope.name(name), rows // width, width=width, replicate=width > 1)
            elif shard == "vocab":
                span, num_rows = scope.shard.padded_span(rows)
            own.append(Part(name=scope.name(name), rows=span))
        if fused:
            own = _fused(scope.name(fused), own)
        is_partial = shard == "row" and scope.shard.size > 1  # the true product is the sum over ranks
        bias_parts = own if bias else []
        if is_partial and scope.shard.rank:  # rank 0 alone adds the bias
            bias_parts = [replace(part, rows=part.rows.nothing()) for part in bias_parts]
        super().__init__(scope, own, columns, num_rows=num_rows, bias_parts=bias_parts)
        self.shard, self.communicator, self.is_partial = scope.shard, scope.communicator, is_partial

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)

    def after_norm(self, x: Tensor, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        """The projection of the normed x, in `out` where that is given."""
        if not isinstance(norm, RMSNorm):
            result = self(x if norm is None else norm(x))
            return result if out is None else out.copy_(result)
        return kernels.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, out)

    def swiglu_after_norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        """silu(gate) · up, where gate and up are the two stacked projections of the normed x."""
        if not isinstance(norm, RMSNorm):
            return kernels.silu_and_mul(self.after_norm(x, norm))
        return kernels.norm_swiglu(x, norm.weight, norm.eps, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor, norm: Norm | None = None, multiplier: float = 1.0) -> Tensor:
        """residual + multiplier · the (normed) projection of x, in residual's memory. With "row", x is this rank's channels."""
        if norm is None and multiplier == 1:
            if self.is_partial:
                return self.communicator.add_sum(residual, self(x))
            return kernels.linear_add(residual, x, self.weight, self.bias)
        out = self(x)
        if self.is_partial:
            out = self.communicator.all_reduce(out)
        return kernels.add_scaled(residual, out if norm is None else norm(out), multiplier)


def _fused(name: str, parts: Sequence[Part]) -> list[Part]:
    """The parts as rows of the one matrix that holds all of them."""
    total, first, fused = sum(part.rows.total for part in parts), 0, []
    for part in parts:
        fused.append(Part(name=name, rows=Span(total, first + part.rows.start, first + part.rows.stop)))
        first += part.rows.total
    return fused


class LMHead(Linear):
    """Hidden states to logits of the whole vocabulary, of which each rank computes a part."""

    def __init__(self, scope: Scope, vocab_size: int, hidden_size: int) -> None:
        super().__init__(scope, hidden_size, {"lm_head": vocab_size}, shard="vocab")
        self.vocab_size = vocab_size

    def after_norm(self, x: Tensor, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        if self.shard.size == 1:
            return super().after_norm(x, norm, out)
        logits = self.communicator.all_gather(super().after_norm(x, norm))[:, : self.vocab_size]
        return logits.contiguous() if out is None else out.copy_(logits)


class Embedding(CheckpointModule):
    """Token ids [T] → rows [T, hidden] of weight [vocab, hidden], of which each rank holds a part."""

    def __init__(self, scope: Scope, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.shard, self.communicator, self._name = scope.shard, scope.communicator, scope.name("weight")
        self.rows, num_rows = scope.shard.padded_span(vocab_size)
        self.weight = scope.empty(num_rows, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.shard.size == 1:
            return kernels.embedding(self.weight, input_ids)
        elsewhere = (input_ids < self.rows.start) | (input_ids >= self.rows.stop)
        own = F.embedding((input_ids - self.rows.start).masked_fill(elsewhere, 0), self.weight)
        return self.communicator.all_reduce(own.masked_fill(elsewhere.unsqueeze(1), 0))

    def tensors(self) -> Iterator[CheckpointTensor]:
        columns = Span.whole(self.weight.shape[1])
        yield CheckpointTensor(self._name, (self.rows, columns), self.weight[: len(self.rows)])


class Norm(CheckpointModule):
    """A norm of x [..., n] times its stored weight plus `offset`."""

    def __init__(self, scope: Scope, size: int | Span, eps: float, offset: float = 0.0) -> None:
        """size: of x; a span: this rank's part of what ranks divide."""
        super().__init__()
        self.eps, self._name, self._offset = eps, scope.name("weight"), offset
        self._span = size if isinstance(size, Span) else Span.whole(size)
        dtype = torch.float32 if offset else scope.dtype  # in which the sum is exact
        self.weight = empty(len(self._span), dtype=dtype, device=scope.device)

    def tensors(self) -> Iterator[CheckpointTensor]:
        take = self._take if self._offset else None
        yield CheckpointTensor(self._name, (self._span,), self.weight, take=take)

    def _take(self, stored: Tensor) -> None:
        self.weight.copy_(stored.float() + self._offset)


class RMSNorm(Norm):
    """x / rms(x) · weight."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class LayerNorm(Norm):
    """(x - mean(x)) / std(x) · weight, and a bias where there is one."""

    def __init__(self, scope: Scope, size: int | Span, eps: float, offset: float = 0.0, *, bias: bool = False) -> None:
        super().__init__(scope, size, eps, offset)
        self.bias = empty(len(self._span), dtype=self.weight.dtype, device=scope.device) if bias else None
        self._bias_name = scope.name("bias")

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return F.layer_norm(wide, x.shape[-1:], self.weight, self.bias, self.eps).to(x.dtype)

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield from super().tensors()
        if self.bias is not None:
            yield CheckpointTensor(self._bias_name, (self._span,), self.bias)


class Residual(nn.Module):
    """How a sublayer reads the residual stream and adds to it: normed before or after or both, times a factor."""

    def __init__(self, before: Norm | None, after: Norm | None, multiplier: float) -> None:
        super().__init__()
        self.before, self.after, self.multiplier = before, after, multiplier

    def project(self, linear: Linear, x: Tensor) -> Tensor:
        return linear.after_norm(x, self.before)

    def swiglu(self, linear: Linear, x: Tensor) -> Tensor:
        return linear.swiglu_after_norm(x, self.before)

    def add(self, linear: Linear, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden [T, hidden] + what `linear` makes of x, in hidden's memory."""
        return linear.add_to(hidden, x, self.after, self.multiplier)

    def add_output(self, hidden: Tensor, output: Tensor) -> Tensor:
        """hidden [T, hidden] + a sublayer's finished output [T, hidden], in hidden's memory."""
        return kernels.add_scaled(hidden, output if self.after is None else self.after(output), self.multiplier)

    @property
    def is_sum(self) -> bool:
        """The output is added as it is."""
        return self.after is None and self.multiplier == 1
