"""Work on a CPU that can be done again in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

R = TypeVar("R")


class Recorded(NamedTuple, Generic[R]):
    """Work that was done once, and what does it again."""

    result: R
    replay: Callable[[], None] | None  # in the same memory; None: PyTorch computed a part of it
    num_bytes: int = 0  # of that memory
