"""Records the kernels of a step, whatever a backend would choose to fuse: a GPU's answers, emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

QUESTIONS = ("norms_apart", "quantized_input", "route_norms_apart")


@dataclass(frozen=True)
class Backend:
    """A backend's answers about the norm before a GEMM."""

    unfused: bool = False  # a GEMM has no kernel with the norm in its prologue
    unfused_router: bool = False
    quantises: bool = False  # GEMMs read quantised activations
    group: int = 1  # channels of a scale of these


class HeldRows(kernels.QuantizedRows):
    """Quantised rows that hold the floats which they stand for."""

    value: Tensor | None

    @classmethod
    def like(cls, x: Tensor, group: int) -> HeldRows:
        return cls(torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), 1), group, len(x), x.dtype)


@contextmanager
def recorded(backend: Backend) -> Iterator[list[str]]:
    """The names of the operations that are called within the context; " q" behind those that write quantised
    activations.
    """
    calls: list[str] = []

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            held = options.get("out")
            given: list[Any] = [arg.value if isinstance(arg, HeldRows) else arg for arg in args]
            for i, arg in enumerate(given):
                if isinstance(arg, kernels.NextNorm) and arg.rounded is not None:
                    held, given[i] = arg.rounded, replace(arg, rounded=None)
            calls.append(f"{name} q" if isinstance(held, HeldRows) else name)
            if not isinstance(held, HeldRows):
                return function(*given, **options)
            if "out" in options:
                options["out"] = torch.empty_like(given[0])
            object.__setattr__(held, "value", function(*given, **options).flatten(1))
            return held

        return call

    def quantized_input(x: Tensor, *_: Any) -> HeldRows | None:
        return HeldRows.like(x, backend.group) if backend.quantises else None

    with pytest.MonkeyPatch.context() as patch:
        for name, function in list(vars(kernels).items()):
            if hasattr(function, "__wrapped__") and name not in QUESTIONS:
                patch.setattr(kernels, name, wrapped(name, function))
        patch.setattr(kernels, "norms_apart", lambda *_: backend.unfused)
        patch.setattr(kernels, "route_norms_apart", lambda *_: backend.unfused_router)
        patch.setattr(kernels, "quantized_input", quantized_input)
        yield calls
