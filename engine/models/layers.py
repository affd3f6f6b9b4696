"""The building blocks of a decoder. Each holds one rank's weights and declares the checkpoint tensors that fill them.

Weights are created empty; `weights.load_model` fills them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.shard import SINGLE, WHOLE, Communicator, Shard, SingleRank, Span, Stage, WeightAndEps

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

    others: tuple[CheckpointTensor, ...] = ()  # further parts of the same tensor, with other memory

    @property
    def shape(self) -> list[int]:
        """The shape in the checkpoint."""
        return [span.total for span in self.spans]

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(span.start, span.stop, span.step) for span in self.spans)

    def is_stored_so(self, dtype: torch.dtype) -> bool:
        """Whether a stored tensor of this dtype has the same bytes as the memory."""
        is_whole = self.shape == list(self.memory.shape) and all(span.step == 1 for span in self.spans)
        is_same = is_whole and self.memory.dtype == dtype and self.memory.is_contiguous()
        return is_same and self.take is None and not self.others

    def fill(self, value: Tensor) -> None:
        """Fill the memory from the stored tensor."""
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

        The function raises `ValueError` with what the tensor must be.
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
        )

    def _named(self, what: str) -> str:
        return self.name if (self.suffix, what) == ("_", "weight") else f"{self.name}{self.suffix}{what}"


class WeightFormat(ABC):
    """How matrices of a format are stored in a checkpoint, and how they are converted to the form that `kernels` multiplies."""

    @abstractmethod
    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the stored tensors of `matrix`: `num_rows` × `columns`, for products in `dtype`."""

    @abstractmethod
    def tensors(self, matrix: Matrix) -> Iterator[CheckpointTensor]:
        """Return the tensors that fill this memory."""

    def optional_tensors(self, matrix: Matrix) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """Return optional tensors, see `CheckpointModule.optional_tensors`."""
        return iter(())

    def fill_randomly(self, matrix: Matrix, generator: torch.Generator) -> None:  # noqa: B027 (parameters are filled anyway)
        """Fill stored tensors that are not parameters with random weights of standard deviation 0.02."""

    @abstractmethod
    def pack(self, matrix: Matrix) -> None:
        """Convert the filled memory to `matrix.weight`, the form that products take. It cannot be filled afterwards."""


class WeightFormats(Protocol):
    """The weight formats of a checkpoint's matrices."""

    def of(self, names: Sequence[str]) -> WeightFormat:
        """Return the format of a matrix with parts of these names. Raises `ModelError` if the parts have different formats."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where and how weights are created. `scope / "mlp"` is the scope of the checkpoint's names below "mlp"."""

    dtype: torch.dtype
    device: torch.device
    weight_formats: WeightFormats
    shard: Shard = SINGLE
    communicator: Communicator = field(default_factory=SingleRank)
    prefix: str = ""  # of names in the checkpoint
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
    """One rank's part of a matrix, or of a stack of equal matrices, with bias. Its rows come from parts of a checkpoint."""

    weight: kernels.Weight  # [num_rows, in], or [num_stacked, num_rows / num_stacked, in]
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
    ) -> None:
        """num_rows: rows with memory on this rank; 0: those of all parts. num_stacked: matrices in the stack; 0: no stack."""
        super().__init__()
        self.parts, self.columns, self.bias_parts, self.num_stacked = parts, columns, bias_parts, num_stacked
        self.dtype = scope.dtype  # of products
        self.is_here = scope.device.type != "meta"  # otherwise another stage has it
        self.num_rows = num_rows or sum(len(part.rows) for part in parts)
        self.format = scope.weight_formats.of(list(dict.fromkeys(part.name for part in parts)))
        self.format.create(self, scope.dtype, scope.device)
        has_bias = any(len(part.rows) for part in bias_parts)
        self.bias = scope.empty(*self.shape_of_rows()) if has_bias else None

    def shape_of_rows(self, num_rows: int | None = None) -> tuple[int, ...]:
        """Return the leading dimensions of tensors with `num_rows` rows in the whole stack (None: the matrix's rows)."""
        num_rows = self.num_rows if num_rows is None else num_rows
        return (self.num_stacked, num_rows // self.num_stacked) if self.num_stacked else (num_rows,)

    def pack(self) -> None:
        """Repack the filled weights for the products of their device. They can no longer be filled."""
        self.format.pack(self)
        packed = kernels.pack_weight(self.weight)
        if packed is not self.weight:
            del self.weight  # a parameter's name accepts only parameters
            self.weight = packed

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


class Linear(Matrix):
    """A linear layer: x [T, in] → x Wᵀ + b [T, out]. Several projections of the same input are stacked into one.

    `shard` selects what is divided among ranks. "column": the rows of W (columns of Wᵀ) in whole units of `width`; if there
    are fewer units than ranks, several ranks hold the same unit. "row": the input channels; each rank computes a partial
    product, and `add_to` sums them. "vocab": the rows, possibly unevenly.
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
        """parts: name of each stacked projection in the checkpoint → its number of rows on all ranks together.

        fused: name of a checkpoint tensor that contains all of them, one after the other.
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
        is_partial = shard == "row" and scope.shard.size > 1  # the product is the sum over ranks
        bias_parts = own if bias else []
        if is_partial and scope.shard.rank:  # only rank 0 adds the bias
            bias_parts = [replace(part, rows=part.rows.nothing()) for part in bias_parts]
        super().__init__(scope, own, columns, num_rows=num_rows, bias_parts=bias_parts)
        self.shard, self.communicator, self.is_partial = scope.shard, scope.communicator, is_partial

    def forward(self, x: Tensor | kernels.QuantizedRows) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)

    def after_norm(self, x: Tensor, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        """Project the normalised x, in `out` if given."""
        if not isinstance(norm, RMSNorm):
            result = self(x if norm is None else norm(x))
            return result if out is None else out.copy_(result)
        return kernels.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, out)

    def gated(self, x: Tensor | kernels.QuantizedRows, gate: kernels.Gate) -> Tensor:
        """Return the activated gate · up for the two stacked projections of x."""
        return kernels.linear_gated(x, self.weight, self.bias, gate)

    def gated_after_norm(self, x: Tensor, norm: Norm | None, gate: kernels.Gate) -> Tensor:
        """As `gated`, of the normalised x."""
        if not isinstance(norm, RMSNorm):
            return self.gated(x if norm is None else norm(x), gate)
        return kernels.norm_gated(x, norm.weight, norm.eps, self.weight, self.bias, gate)

    def add_to(
        self, residual: Tensor, x: Tensor | kernels.QuantizedRows, norm: Norm | None = None, multiplier: float = 1.0
    ) -> Tensor:
        """Add multiplier · the projection of the (normalised) x to residual in place. With "row", x has this rank's channels."""
        if norm is None and multiplier == 1 and not self.is_partial:
            return kernels.linear_add(residual, x, self.weight, self.bias)
        return add_normed(residual, self.summed(x), norm, multiplier)

    def summed(self, x: Tensor | kernels.QuantizedRows) -> Tensor:
        """Project x. With "row", x has this rank's channels, and the result is the sum over ranks."""
        out = self(x)
        if self.is_partial:
            out = self.communicator.all_reduce(out)
        return out

    def quantized_input(self, x: Tensor) -> kernels.QuantizedRows | None:
        """Memory for an input like x [T, in], rounded as this layer takes it; None: it takes it as it is."""
        return None if self.is_partial else kernels.quantized_input(x, self.weight, self.bias)

    def norm_before(self, x: Tensor, gate: kernels.Gate | None = None) -> NormBefore:
        """How `after_norm`, or `gated_after_norm`, wants the norm of x [T, in] to be computed."""
        rounded = kernels.quantized_input(x, self.weight, self.bias, gate)
        return kernels.norms_apart(x, self.weight, gate) if rounded is None else rounded


def _fused(name: str, parts: Sequence[Part]) -> list[Part]:
    """Return the parts as rows of one fused matrix."""
    total, first, fused = sum(part.rows.total for part in parts), 0, []
    for part in parts:
        fused.append(Part(name=name, rows=Span(total, first + part.rows.start, first + part.rows.stop)))
        first += part.rows.total
    return fused


class LMHead(Linear):
    """The output head. Each rank computes the logits of n = `num_rows` tokens, from `first_id` on; `gather` combines them.

    The last ranks have fewer tokens, or none: their columns beyond the vocabulary hold anything, NaN too.
    """

    def __init__(self, scope: Scope, vocab_size: int, hidden_size: int) -> None:
        super().__init__(scope, hidden_size, {"lm_head": vocab_size}, shard="vocab")
        self.vocab_size, self.first_id = vocab_size, scope.shard.padded_span(vocab_size)[0].start

    def gather(self, own: Tensor, out: Tensor | None = None) -> Tensor:
        """Return all logits [N, vocab], in `out` if given, from each rank's own [N, n]. One rank's own are all."""
        if self.shard.size == 1:
            return own if out is None else out.copy_(own)
        return self.communicator.all_gather(own, own.new_empty(len(own), self.vocab_size) if out is None else out)

    def gather_keys(self, keys: Tensor) -> Tensor:
        """Return the keys [N, size · K] of all ranks from each one's [N, K], see `kernels.best_keys`."""
        return self.communicator.all_gather(keys, keys.new_empty(len(keys), self.shard.size * keys.shape[1]))


class Embedding(CheckpointModule):
    """The embedding: token ids [T] → rows [T, hidden] of weight [vocab, hidden]. Each rank holds a part of the rows."""

    def __init__(self, scope: Scope, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.shard, self.communicator, self._name = scope.shard, scope.communicator, scope.name("weight")
        self.rows, num_rows = scope.shard.padded_span(vocab_size)
        self.weight = scope.empty(num_rows, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        own = kernels.embedding(self.weight, input_ids, self.rows.start)
        return own if self.shard.size == 1 else self.communicator.all_reduce(own)

    def tensors(self) -> Iterator[CheckpointTensor]:
        columns = Span.whole(self.weight.shape[1])
        yield CheckpointTensor(self._name, (self.rows, columns), self.weight[: len(self.rows)])


class Norm(CheckpointModule):
    """A norm of x [..., n] times its stored weight plus `offset`."""

    def __init__(self, scope: Scope, size: int | Span, eps: float, offset: float = 0.0) -> None:
        """size: of x; a span: this rank's part of a divided dimension."""
        super().__init__()
        self.eps, self._name, self._offset = eps, scope.name("weight"), offset
        self._span = size if isinstance(size, Span) else Span.whole(size)
        dtype = torch.float32 if offset else scope.dtype  # so that weight + offset is exact
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


def add_normed(residual: Tensor, x: Tensor, norm: Norm | None, multiplier: float) -> Tensor:
    """Add multiplier · the (normalised) x to residual in place."""
    if isinstance(norm, RMSNorm):
        return kernels.rms_norm_add(residual, x, norm.weight, norm.eps, multiplier)
    return kernels.add_scaled(residual, x if norm is None else norm(x), multiplier)


class LayerNorm(Norm):
    """(x - mean(x)) / std(x) · weight, plus an optional bias."""

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


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream [T, hidden] between sublayers, and its norm for the next one if that is computed already."""

    hidden: Tensor
    normed: Tensor | kernels.QuantizedRows | None = None


# Whether a sublayer wants the norm of its input to be computed with what comes before; memory for it: rounded, in there.
NormBefore: TypeAlias = "bool | kernels.QuantizedRows"


class Residual(nn.Module):
    """How a sublayer reads the residual stream and adds to it: with a norm before, after or both, times a factor."""

    def __init__(self, before: Norm | None, after: Norm | None, multiplier: float) -> None:
        super().__init__()
        self.before, self.after, self.multiplier = before, after, multiplier
        self._next: tuple[RMSNorm, Callable[[Tensor], NormBefore]] | None = None  # in a tuple: it is no submodule

    def precede(self, norm: Norm | None, norm_before: Callable[[Tensor], NormBefore]) -> None:
        """Compute the norm with which the next sublayer reads the sum, too, where that sublayer wants it."""
        if isinstance(norm, RMSNorm):
            self._next = norm, norm_before

    def read(self, x: Stream) -> Tensor:
        """Return what the sublayer reads of x, normalised."""
        if x.normed is not None:
            assert isinstance(x.normed, Tensor)
            return x.normed
        return x.hidden if self.before is None else cast(Tensor, self.before(x.hidden))

    def project(self, linear: Linear, x: Stream) -> Tensor:
        return linear.after_norm(x.hidden, self.before) if x.normed is None else linear(x.normed)

    def gated(self, linear: Linear, x: Stream, gate: kernels.Gate) -> Tensor:
        if x.normed is None:
            return linear.gated_after_norm(x.hidden, self.before, gate)
        return linear.gated(x.normed, gate)

    def add(self, linear: Linear, hidden: Tensor, x: Tensor | kernels.QuantizedRows) -> Stream:
        """Add the output of `linear` for x to hidden [T, hidden] in place."""
        if self.is_sum and linear.is_partial:
            assert isinstance(x, Tensor), "see `Linear.quantized_input`"
            return Stream(hidden, linear.communicator.add_product(hidden, x, linear, self._norm_apart(hidden)))
        norm = self.next_norm(hidden)
        if norm is None:
            return Stream(linear.add_to(hidden, x, self.after, self.multiplier))
        if self.is_sum:
            return Stream(hidden, kernels.linear_add_norm(hidden, x, linear.weight, linear.bias, norm))
        return self.add_output(hidden, linear.summed(x))

    def add_partial(self, communicator: Communicator, hidden: Tensor, partial: Tensor) -> Stream:
        """Add the sum of all ranks' partial outputs [T, hidden] to hidden [T, hidden] in place."""
        if not self.is_sum:
            return self.add_output(hidden, communicator.all_reduce(partial))
        return Stream(hidden, communicator.add_sum(hidden, partial, self._norm_apart(hidden)))

    def add_output(self, hidden: Tensor, output: Tensor) -> Stream:
        """Add a sublayer's finished output [T, hidden] to hidden [T, hidden] in place."""
        norm, after = self._norm_apart(hidden), self.after
        if norm is None:
            return Stream(add_normed(hidden, output, after, self.multiplier))
        assert after is None or isinstance(after, RMSNorm), "a model has norms of one kind"
        weight, eps = (None, 0.0) if after is None else (after.weight, after.eps)
        normed = kernels.add_rms_norm(hidden, output, *norm, weight, eps, self.multiplier)
        return Stream(hidden, normed)

    def next_norm(self, hidden: Tensor) -> kernels.NextNorm | None:
        """Return the next sublayer's norm if it is to be computed with the sum, which has the shape of `hidden`."""
        if self._next is None:
            return None
        norm, norm_before = self._next
        wanted = norm_before(hidden)
        if wanted is False:
            return None
        return kernels.NextNorm(norm.weight, norm.eps, None if wanted is True else wanted)

    def _norm_apart(self, hidden: Tensor) -> WeightAndEps | None:
        """As `next_norm`, for kernels that do not round it."""
        norm = self.next_norm(hidden)
        return None if norm is None or norm.rounded is not None else (norm.weight, norm.eps)

    @property
    def is_sum(self) -> bool:
        """Whether the output is added unchanged."""
        return self.after is None and self.multiplier == 1
