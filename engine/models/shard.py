"""Tensor and pipeline parallelism: the part of a model that a rank holds, and how ranks combine results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from engine.models.errors import ModelError

if TYPE_CHECKING:  # specifications are also read without PyTorch
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """A rank's part of a dimension of size `total`: every `step`-th index of [start, stop)."""

    total: int
    start: int
    stop: int
    step: int = 1

    @classmethod
    def whole(cls, total: int) -> Span:
        return cls(total, 0, total)

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.step)

    def nothing(self) -> Span:
        """Return an empty span of the same dimension."""
        return replace(self, stop=self.start)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def span(self, name: str, total: int, *, width: int = 1, replicate: bool = False) -> Span:
        """Return this rank's part, in channels, of `total` units of `width` channels each. All parts have equal length.

        `replicate`: allow fewer units than ranks; several ranks then hold the same unit. Raises `ModelError`, which
        calls the units `name`, if they cannot be divided.
        """
        if total % self.size == 0:
            start, count = self.rank * total // self.size, total // self.size
        elif replicate and self.size % total == 0:
            start, count = self.rank * total // self.size, 1
        else:
            raise ModelError(f"{name!r} ({total}) cannot be divided among {self.size} ranks")
        return Span(total * width, start * width, (start + count) * width)

    def padded_span(self, total: int) -> tuple[Span, int]:
        """Return this rank's part of `total` rows, and the number to allocate. The last ranks may have fewer, or 0."""
        num_rows = -(-total // self.size)
        start = min(self.rank * num_rows, total)
        return Span(total, start, min(start + num_rows, total)), num_rows

    def eighths(self, total: int) -> tuple[slice, ...]:
        """Return this rank's share of the eighths of `total` channels or experts: where these are in its own part.

        Deterministic mode's sums have these borders whatever the number of ranks, 1, 2, 4 or 8. Some may be empty.
        """
        each, first = EIGHTHS // self.size, self.rank * total // self.size
        borders = [total * i // EIGHTHS - first for i in range(self.rank * each, (self.rank + 1) * each + 1)]
        return tuple(slice(start, stop) for start, stop in itertools.pairwise(borders))


EIGHTHS = 8
SINGLE = Shard()


@dataclass(frozen=True, slots=True)
class Stage:
    """Pipeline stage `index` of `count`: successive layers; the first has the embedding, the last the output head."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return this stage's layers. Raises `ModelError` if there are fewer layers than stages."""
        if num_layers < self.count:
            raise ModelError(f"'num_hidden_layers' ({num_layers}) cannot be divided among {self.count} stages")
        return range(self.index * num_layers // self.count, (self.index + 1) * num_layers // self.count)


WHOLE = Stage()
WeightAndEps: TypeAlias = "tuple[Tensor, float]"  # of an RMSNorm


class Communicator(Protocol):
    """Communication between a model's ranks. Every rank makes the same calls in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, all of the same shape; may overwrite x."""

    def add_sum(self, residual: Tensor, x: Tensor, norm: WeightAndEps | None = None) -> Tensor | None:
        """Add the sum of all ranks' x to residual [T, n] in place; may overwrite x.

        `norm`: an RMSNorm of the result, which is returned if the sum's kernel can compute it, too; else None is.
        """

    def add_gemm(
        self, residual: Tensor, gemm: Callable[[slice], Tensor], norm: WeightAndEps | None = None
    ) -> Tensor | None:
        """Add the sum of all ranks' gemm(rows), as `add_sum` does. May call gemm for chunks of residual's rows."""

    def add_pieces(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum [T, n] `dtype` of each rank's own [T, n] float32 in one order, see `kernels.add_pieces`."""

    def all_gather(self, x: Tensor, out: Tensor) -> Tensor:
        """Gather the columns x [T, n] of all ranks in out [T, W], in the order of ranks: the first W of them."""

    def least(self, number: int) -> int:
        """Return the minimum of all ranks' numbers."""


class SingleRank:
    """The communicator of a model on a single rank."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def add_sum(self, residual: Tensor, x: Tensor, norm: WeightAndEps | None = None) -> Tensor | None:
        residual.add_(x)
        return None

    def add_gemm(
        self, residual: Tensor, gemm: Callable[[slice], Tensor], norm: WeightAndEps | None = None
    ) -> Tensor | None:
        return self.add_sum(residual, gemm(slice(None)), norm)

    def add_pieces(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        import kernels  # specifications are also read without PyTorch

        return kernels.add_pieces(own.unsqueeze(0), dtype)

    def all_gather(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(x[:, : out.shape[1]])

    def least(self, number: int) -> int:
        return number
