"""Gluon kernels on torch tensors: a kernel's body is Python, and layouts say where numbers lie, not what they are.

So it runs here without layouts. That they fit each other is the compiler's to check (`compile_ahead.py`).
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor


class Pointers:
    def __init__(self, tensor: Tensor, offsets: Tensor | int = 0) -> None:
        self.tensor, self.offsets = tensor, torch.as_tensor(offsets)
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offsets: Tensor | int) -> Pointers:
        return Pointers(self.tensor, self.offsets + offsets)

    def load(self, mask: Tensor | None = None, other: float = 0.0, eviction_policy: str = "") -> Tensor:
        """Reads nothing where the mask is False, and nothing outside of the tensor's view of its memory."""
        mask = torch.tensor(True) if mask is None else mask
        mask, offsets = torch.broadcast_tensors(mask, self.offsets)
        inside = offsets[mask]
        sizes, strides = self.tensor.shape, self.tensor.stride()
        assert int(inside.min()) >= 0
        assert int(inside.max()) <= sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        memory = torch.as_strided(self.tensor, (int(inside.max()) + 1,), (1,))
        return torch.where(mask, memory[torch.where(mask, offsets, 0)], other).to(self.tensor.dtype)

    def store(self, value: Tensor, mask: Tensor) -> None:
        mask, offsets, value = torch.broadcast_tensors(mask, self.offsets, value)
        inside = offsets[mask]
        assert len(inside.unique()) == len(inside)
        torch.as_strided(self.tensor, (int(inside.max()) + 1,), (1,))[inside] = value[mask]


class Shared:
    def __init__(self, dtype: torch.dtype, shape: list[int], layout: object, value: Tensor) -> None:
        assert list(value.shape) == shape
        self.value = value

    def load(self, layout: object) -> Tensor:
        return self.value


class Kernel:
    """Launches like a Triton kernel, one program after the other."""

    def __init__(self, body: object, gluon: SimpleNamespace) -> None:
        self.body, self.gluon = body, gluon

    def __getitem__(self, grid: tuple[int]) -> object:
        def run(*args: object, num_warps: int, **constants: object) -> None:
            args = tuple(Pointers(a) if isinstance(a, Tensor) else a for a in args)
            for i in range(grid[0]):
                self.gluon.program_id = lambda axis, i=i: torch.tensor(i)
                self.body(*args, **constants)  # type: ignore[operator]

        return run


def run_on_tensors(monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel: str, helpers: tuple[str, ...]) -> None:
    """Let the kernel of that name in a module, and the functions that it calls, run on torch tensors."""

    def layout(*args: object, **options: object) -> None: ...

    gluon = SimpleNamespace(
        constexpr=object, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16, uint8=torch.uint8,
        static_range=range, rsqrt=torch.rsqrt, exp=torch.exp,
        NVMMADistributedLayout=layout, DotOperandLayout=layout, BlockedLayout=layout, SliceLayout=layout,
        SwizzledSharedLayout=layout, allocate_shared_memory=Shared, load=Pointers.load, store=Pointers.store,
        arange=lambda start, end, layout: torch.arange(start, end), convert_layout=lambda value, layout: value,
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)), sum=torch.sum,
        zeros=lambda shape, dtype, layout: torch.zeros(list(shape), dtype=dtype),
    )  # fmt: skip
    monkeypatch.setattr(module, kernel, Kernel(getattr(module, kernel).fn, gluon))
    for name in helpers:
        body = getattr(module, name).fn
        monkeypatch.setattr(module, name, body)
        monkeypatch.setitem(body.__globals__, "gl", gluon)
    monkeypatch.setattr(module, "gl", gluon)
    monkeypatch.setattr(module, "mma_v2", lambda a, b, total: total + a.float() @ b.float())
    monkeypatch.setattr(module, "_has_matrix_unit", lambda device: True)
