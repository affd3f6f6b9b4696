"""Tensor parallelism: which part of a model one rank holds, and how ranks combine their results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from engine.models.errors import ModelError

if TYPE_CHECKING:  # specifications are read where PyTorch is not loaded
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Every `step`-th of the indices [start, stop) of a dimension of `total`: what one rank holds of it."""

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
        """No index of the same dimension."""
        return replace(self, stop=self.start)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` ranks that hold a model together."""

    rank: int = 0
    size: int = 1

    def span(self, name: str, total: int, *, width: int = 1, replicate: bool = False) -> Span:
        """This rank's part of `total` units of `width` channels each, in channels; all ranks' parts are equally long.

        `replicate`: fewer units than ranks are allowed, and several ranks hold the same one. ModelError calls the
        units `name` where they cannot be divided.
        """
        if total % self.size == 0:
            start, count = self.rank * total // self.size, total // self.size
        elif replicate and self.size % total == 0:
            start, count = self.rank * total // self.size, 1
        else:
            raise ModelError(f"{name!r} ({total}) cannot be divided among {self.size} ranks")
        return Span(total * width, start * width, (start + count) * width)

    def padded_span(self, total: int) -> tuple[Span, int]:
        """This rank's part of `total` rows and how many it has memory for; the last ranks may hold fewer, or none."""
        num_rows = -(-total // self.size)
        start = min(self.rank * num_rows, total)
        return Span(total, start, min(start + num_rows, total)), num_rows


SINGLE = Shard()


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` of a pipeline of `count`: successive layers of a model. The first has the embedding, the last the head."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Those of this stage. ModelError when there are fewer layers than stages."""
        if num_layers < self.count:
            raise ModelError(f"'num_hidden_layers' ({num_layers}) cannot be divided among {self.count} stages")
        return range(self.index * num_layers // self.count, (self.index + 1) * num_layers // self.count)


WHOLE = Stage()


class Communicator(Protocol):
    """How the ranks of one model meet. Every rank makes the same calls in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which have one shape; it may take x's memory."""

    def add_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the sum of all ranks' x, in residual's memory."""

    def all_gather(self, x: Tensor) -> Tensor:
        """x [T, n] of each rank → [T, size · n], in the order of ranks."""

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""


class SingleRank:
    """The communicator of a model that one rank holds."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def add_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual.add_(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def least(self, number: int) -> int:
        return number
