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
from engine.models.shard import SINGLE, Communicator, Shard, SingleRank, Span

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

    @property
    def shape(self) -> list[int]:
        """In the checkpoint."""
        return [span.total for span in self.spans]

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(span.start, span.stop) for span in self.spans)

    def fill(self, value: Tensor) -> None:
        """From the tensor in the file."""
        part = value.reshape(self.shape)[self.index]
        if self.take is None:
            self.memory.copy_(part)
        else:
            self.take(part)


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


class WeightFormat(ABC):
    """How Linears of one format are stored in a checkpoint, and how their weights become what `kernels` multiplies by."""

    @abstractmethod
    def create(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Give `linear` the empty memory of its stored tensors: `num_rows` × `columns` of a product in `dtype`."""

    @abstractmethod
    def tensors(self, linear: Linear) -> Iterator[CheckpointTensor]:
        """What fills that memory."""

    def optional_tensors(self, linear: Linear) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """What the checkpoint may hold besides: see `CheckpointModule.optional_tensors`."""
        return iter(())

    def fill_randomly(self, linear: Linear, generator: torch.Generator) -> None:  # noqa: B027 (parameters are filled anyway)
        """Fill what is no parameter with weights of standard deviation 0.02."""

    @abstractmethod
    def pack(self, linear: Linear) -> None:
        """Set `linear.weight`, from the filled memory, to what the products of its device take. It can no longer be filled."""


class WeightFormats(Protocol):
    """The formats of a checkpoint's Linears."""

    def for_linear(self, names: Sequence[str]) -> WeightFormat:
        """The format of the Linear whose parts have these names in the checkpoint. ModelError: they are stored differently."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where and how weights are made. `scope / "mlp"` is that of what the checkpoint keeps below "mlp"."""

    dtype: torch.dtype
    device: torch.device
    weight_formats: WeightFormats
    shard: Shard = SINGLE
    communicator: Communicator = field(default_factory=SingleRank)
    prefix: str = ""  # of the names in the checkpoint

    def __truediv__(self, name: str | int) -> Scope:
        return replace(self, prefix=self.name(str(name)))

    def name(self, tensor: str) -> str:
        return f"{self.prefix}.{tensor}" if self.prefix else tensor

    def empty(self, *shape: int) -> nn.Parameter:
        return empty(*shape, dtype=self.dtype, device=self.device)


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(CheckpointModule):
    """x [T, in] → x Wᵀ + b [T, out]. Several projections of the same input are one: their rows are stacked.

    `shard` says what ranks divide: "column" the rows of W (the columns of Wᵀ) in whole units of `width`, of which several
    ranks hold the same where there are fewer than ranks; "row" the input channels, so that each rank has a summand of
    the product, which `add_to` sums; "vocab" the rows, unevenly if need be.
    """

    weight: kernels.Weight
    stored: dict[tuple[str, str], Tensor]  # (part, name) → what a quantised checkpoint holds, until it is packed
    bias: nn.Parameter | None

    def __init__(
        self,
        scope: Scope,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        shard: Literal["column", "row", "vocab"] | None = None,
        width: int = 1,
    ) -> None:
        """parts: the stacked projections' names in the checkpoint → how many rows each has on all ranks together."""
        super().__init__()
        self.shard, self.communicator = scope.shard, scope.communicator
        self.is_partial = shard == "row" and self.shard.size > 1  # the true product is the sum over ranks
        self.columns = Span.whole(in_features)
        names = {scope.name(part): rows for part, rows in parts.items()}
        self.parts = {name: Span.whole(rows) for name, rows in names.items()}
        self.num_rows = sum(names.values())  # that this rank has memory for
        if shard == "row":
            self.columns = self.shard.span("in_features", in_features)
        elif shard == "column":
            self.parts = {
                name: self.shard.span(name, rows // width, width=width, replicate=width > 1)
                for name, rows in names.items()
            }
            self.num_rows = sum(map(len, self.parts.values()))
        elif shard == "vocab":
            [(name, rows)] = names.items()
            self.parts[name], self.num_rows = self.shard.padded_span(rows)
        self.bias_parts = dict(self.parts) if bias else {}
        if self.is_partial and self.shard.rank:  # rank 0 alone adds the bias
            self.bias_parts = {name: Span(span.total, 0, 0) for name, span in self.bias_parts.items()}
        self.format = scope.weight_formats.for_linear(list(names))
        self.format.create(self, scope.dtype, scope.device)
        self.bias = scope.empty(self.num_rows) if any(map(len, self.bias_parts.values())) else None

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)

    def after_norm(self, x: Tensor, norm: RMSNorm, out: Tensor | None = None) -> Tensor:
        """The projection of the normed x, in `out` where that is given."""
        return kernels.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, out)

    def swiglu_after_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """silu(gate) · up, where gate and up are the two stacked projections of the normed x."""
        return kernels.norm_swiglu(x, norm.weight, norm.eps, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the projection of x, in residual's memory. With "row", x is this rank's channels."""
        if not self.is_partial:
            return kernels.linear_add(residual, x, self.weight, self.bias)
        return residual.add_(self.communicator.all_reduce(kernels.linear(x, self.weight, self.bias)))

    def pack(self) -> None:
        """Repack the filled weights for the products of their device. They can no longer be filled."""
        self.format.pack(self)

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield from self.format.tensors(self)
        yield from stacked("bias", self.bias_parts, torch.empty(0) if self.bias is None else self.bias)

    def optional_tensors(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        return self.format.optional_tensors(self)


def stacked(name: str, parts: Mapping[str, Span], memory: Tensor, *columns: Span) -> Iterator[CheckpointTensor]:
    """One float tensor for each part, "<part>.<name>", which fills the part's rows of the memory."""
    start = 0
    for part, span in parts.items():
        end = start + len(span)
        yield CheckpointTensor(f"{part}.{name}", (span, *columns), memory[start:end])
        start = end


class LMHead(Linear):
    """Hidden states to logits of the whole vocabulary, of which each rank computes a part."""

    def __init__(self, scope: Scope, vocab_size: int, hidden_size: int) -> None:
        super().__init__(scope, hidden_size, {"lm_head": vocab_size}, shard="vocab")
        self.vocab_size = vocab_size

    def after_norm(self, x: Tensor, norm: RMSNorm, out: Tensor | None = None) -> Tensor:
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
            return F.embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.rows.start) | (input_ids >= self.rows.stop)
        own = F.embedding((input_ids - self.rows.start).masked_fill(elsewhere, 0), self.weight)
        return self.communicator.all_reduce(own.masked_fill(elsewhere.unsqueeze(1), 0))

    def tensors(self) -> Iterator[CheckpointTensor]:
        columns = Span.whole(self.weight.shape[1])
        yield CheckpointTensor(self._name, (self.rows, columns), self.weight[: len(self.rows)])


class RMSNorm(CheckpointModule):
    """x [..., n] → x / rms(x) · weight."""

    def __init__(self, scope: Scope, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self._name = eps, scope.name("weight")
        self.weight = scope.empty(size)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, (Span.whole(len(self.weight)),), self.weight)
