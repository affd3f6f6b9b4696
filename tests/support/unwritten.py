"""Memory that nothing has written yet, filled with a pattern, so that whatever reads it shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# By size in bytes: a quiet NaN of float8_e4m3fn, of float16 and bfloat16, of float32, of float64; as integers, no
# index.
PATTERNS = {1: 0x7F, 2: 0x7FE5, 4: 0x7FE5E5E5, 8: 0x7FFDE5E5E5E5E5E5}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALLOCATIONS: dict[tuple[Any, str], Callable[..., Tensor]] = {
    (torch, "empty"): torch.empty,
    (torch, "empty_like"): torch.empty_like,
    (torch, "empty_strided"): torch.empty_strided,
    (torch.Tensor, "new_empty"): torch.Tensor.new_empty,
}


def unwritten_is_nan() -> contextlib.AbstractContextManager[None]:
    """In its block `torch.empty` and its like give NaN, of integers a huge one: what reads it before it writes goes
    wrong.
    """
    return _replaced({place: _filled(allocate) for place, allocate in _ALLOCATIONS.items()})


def unwritten_is_unknown() -> contextlib.AbstractContextManager[None]:
    """In its block they give what PyTorch gives: to time kernels within the other one's."""
    return _replaced(_ALLOCATIONS)


def holds_unwritten(data: Any) -> bool:
    """Return whether an element of a numpy array is the pattern of its size. Of single bytes any may be a value:
    False.
    """
    size = data.dtype.itemsize
    return size > 1 and bool((data.view(f"i{size}") == PATTERNS[size]).any())


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_filled(*args: Any, **options: Any) -> Tensor:
        tensor = allocate(*args, **options)
        if not tensor.is_meta and tensor.dtype != torch.bool and tensor.itemsize in PATTERNS:
            tensor.detach().view(_INTEGERS[tensor.itemsize]).fill_(PATTERNS[tensor.itemsize])
        return tensor

    return allocate_filled


@contextlib.contextmanager
def _replaced(functions: dict[tuple[Any, str], Callable[..., Tensor]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name in functions]
    for (owner, name), function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
