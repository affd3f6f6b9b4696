"""Quantised matrices in the form that all backends use, for every checkpoint format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = Literal["e4m3", "int8", "int4", "e2m1", "blocks"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """W [N, K]: W[n, order[k]] = (value[n, k] - zero[n, k // group]) · scale[n // rows, k // group] · factor[n], less
    minimum[n, k // group].

    `kind` defines the value of a code: e4m3 and int8: the code itself; int4: the code minus 8; e2m1: ± 0, 0.5, 1, 1.5,
    2, 3, 4 or 6; blocks: see `BlockWeight`. Two codes of four bits share a byte: channel j and j + K / 2. int4: j's are
    its low bits. e2m1: four bytes share the bits of their eight codes, see `pack_e2m1`, and K is a multiple of 8. A
    stack of E matrices (experts) is one object whose tensors all have E as their first dimension; `stack[e]` is a
    matrix whose tensors are views.

    With a `panel`, a matrix's codes lie in memory as [K / panel, N, panel], see `in_panels`.
    """

    kind: Kind
    codes: Tensor  # e4m3 and int8: [N, K]; else [N, K / 2] uint8
    scale: Tensor  # [ceil(N / rows), ceil(K / group)] float32, float16, bfloat16 or e4m3
    group: int  # number of channels that share a scale
    rows: int = 1  # number of rows that share a scale
    zero: Tensor | None = None  # [N, ceil(K / group)] int8, or on GPUs float16: fractions of codes
    factor: Tensor | None = None  # [N] float32
    minimum: Tensor | None = None  # [N, ceil(K / group)] float32; on CPUs: GPUs have fractional zero points
    order: Tensor | None = None  # [K] int64: a permutation of the channels; None: identity
    rounds_activations: bool = False  # GEMMs may quantise x to this kind, with one scale per token
    panel: int = 0  # channels of a panel; 0: rows lie one after the other

    @property
    def is_cpu(self) -> bool:
        return self.codes.is_cpu

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_channels(self) -> int:
        return self.codes.shape[-1] * (2 if self.kind in ("int4", "e2m1") else 1)

    @property
    def nbytes(self) -> int:
        """Bytes that a GEMM reads."""
        tensors = (self.codes, self.scale, self.zero, self.factor, self.minimum, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __len__(self) -> int:
        """Return the number of rows, or of matrices in a stack."""
        return len(self.codes)

    @staticmethod
    def stack(matrices: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Copy matrices of the same form into a stack."""
        parts = ((field.name, [getattr(matrix, field.name) for matrix in matrices]) for field in fields(matrices[0]))
        stacks: dict[str, Any] = {name: torch.stack(part) for name, part in parts if isinstance(part[0], Tensor)}
        for name in {"scale", "zero"} & stacks.keys() if matrices[0].rows == 1 else ():
            stacks[name] = by_groups(stacks[name])
        return replace(matrices[0], **stacks)

    def lies_by_groups(self) -> bool:
        """Return whether a stack's scales and zero points lie as `by_groups` puts them.

        Scales of several rows lie row by row.
        """
        tensors = [self.scale] if self.zero is None else [self.scale, self.zero]
        return all((each if self.rows > 1 else each.transpose(1, 2)).is_contiguous() for each in tensors)

    def __getitem__(self, index: int) -> QuantizedWeight:
        """Return one matrix of a stack."""
        parts = ((field.name, getattr(self, field.name)) for field in fields(self))
        views: dict[str, Any] = {name: part[index] for name, part in parts if isinstance(part, Tensor)}
        return replace(self, **views)


def in_panels(stack: QuantizedWeight, panel: int) -> QuantizedWeight:
    """The stack with codes of e4m3 or int8 in panels, in the same memory: of `panel` channels, rows one after the
    other.

    What a GEMM reads of many rows at once then lies side by side, and memory sends it faster.
    """
    for codes in stack.codes:
        n, k = codes.shape
        codes.copy_(codes.view(n, k // panel, panel).transpose(0, 1).reshape(n, k))
    return replace(stack, panel=panel)


def by_rows(codes: Tensor, panel: int) -> Tensor:
    """Codes [N, K] that lie in panels, row by row."""
    n, k = codes.shape
    return codes.view(k // panel, n, panel).transpose(0, 1).reshape(n, k)


def by_groups(scale: Tensor) -> Tensor:
    """Scales [E, N, G], or zero points, as they are, but in memory [E, G, N]: threads read those of many rows at
    once.
    """
    return scale.transpose(1, 2).contiguous().transpose(1, 2)


Weight: TypeAlias = Tensor | QuantizedWeight
