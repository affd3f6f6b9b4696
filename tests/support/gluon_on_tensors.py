"""Gluon kernels on torch tensors: a kernel's body is Python, and layouts say where numbers lie, not what they are.

So it runs here without layouts. That they fit each other is the compiler's to check (`compile_ahead.py`).
"""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from kernels.gluon.common import activation


class Pointers:
    def __init__(self, tensor: Tensor, offsets: Tensor | int = 0) -> None:
        self.tensor, self.offsets = tensor, torch.as_tensor(offsets)
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offsets: Tensor | int) -> Pointers:
        return Pointers(self.tensor, self.offsets + offsets)

    def load(self, mask: Tensor | None = None, other: float = 0.0, **options: str) -> Tensor:
        """Reads nothing where the mask is False, and nothing outside of the tensor's view of its memory."""
        mask = torch.tensor(True) if mask is None else mask
        mask, offsets = torch.broadcast_tensors(mask, self.offsets)
        inside = offsets[mask]
        if not inside.numel():
            return torch.full(mask.shape, other).to(self.tensor.dtype)
        sizes, strides = self.tensor.shape, self.tensor.stride()
        assert int(inside.min()) >= 0
        assert int(inside.max()) <= sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        memory = torch.as_strided(self.tensor, (int(inside.max()) + 1,), (1,))
        loaded = memory[torch.where(mask, offsets, 0)]
        return torch.where(mask, loaded, torch.tensor(other).to(loaded.dtype))

    def store(self, value: Tensor | int, mask: Tensor | None = None) -> None:
        mask = torch.tensor(True) if mask is None else mask
        values = torch.as_tensor(value).to(self.tensor.dtype)
        mask, offsets, values = torch.broadcast_tensors(mask, self.offsets, values)
        inside = offsets[mask]
        assert len(inside.unique()) == len(inside)
        if not len(inside):
            return
        torch.as_strided(self.tensor, (int(inside.max()) + 1,), (1,))[inside] = values[mask]

    def atomic_add(self, value: int, **options: str) -> Tensor:
        before = self.load()
        self.store(before + value)
        return before


class Shared:
    def __init__(self, dtype: torch.dtype, shape: list[int], layout: object, value: Tensor | None = None) -> None:
        self.shape, self.dtype = shape, dtype
        if value is not None:
            self.store(value)

    def store(self, value: Tensor) -> None:
        assert list(value.shape) == self.shape
        self.value = value

    def load(self, layout: object) -> Tensor:
        return self.value

    def read(self) -> Tensor:
        return self.value if hasattr(self, "value") else torch.full(self.shape, math.nan, dtype=self.dtype)

    def slice(self, start: int, length: int, dim: int) -> Shared:
        part = self.value.narrow(dim, start, length)
        return Shared(part.dtype, list(part.shape), None, part)

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return self.value.permute(order)


class Stages:
    """Shared memory of several parts, each written as a whole. A part that is read must have been written."""

    def __init__(self, dtype: torch.dtype, shape: list[int], layout: object) -> None:
        self.parts = [Shared(dtype, shape[1:], layout) for _ in range(shape[0])]
        self.dtype, self.layout = dtype, layout

    def index(self, i: int) -> Shared:
        return self.parts[int(i)]

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Joined | Stages:
        if shape[0] > len(self.parts):
            return Pieces(self, dtype, shape, layout)
        return Joined(self.parts, len(self.parts) // shape[0])


class Pieces(Stages):
    """Stages of which each part is cut into several. Where the parts were not written, pieces have memory of their
    own.
    """

    def __init__(self, whole: Stages, dtype: torch.dtype, shape: list[int], layout: object) -> None:
        super().__init__(dtype, shape, layout)
        self.whole, self.count = whole.parts, shape[0] // len(whole.parts)

    def index(self, i: int) -> Shared:
        part, piece = self.whole[int(i) // self.count], super().index(i)
        if not hasattr(part, "value"):
            return piece
        rows = piece.shape[0]
        return Shared(part.dtype, piece.shape, None, part.value[int(i) % self.count * rows :][:rows])


class Joined:
    """Stages of several parts each, one below the other. A part that nothing was written to is NaN."""

    def __init__(self, parts: list[Shared], count: int) -> None:
        self.parts, self.count = parts, count

    def index(self, i: int) -> Shared:
        values = [part.read() for part in self.parts[int(i) * self.count :][: self.count]]
        joined = torch.cat(values)
        return Shared(joined.dtype, list(joined.shape), None, joined)


class Descriptor:
    """Descriptor of a tensor whose boxes are copied; what lies outside of it is zero."""

    def __init__(self, tensor: Tensor, block_shape: list[int]) -> None:
        self.tensor, self.block_shape, self.dtype, self.layout = tensor, block_shape, tensor.dtype, None
        self.block_type = SimpleNamespace(nbytes=math.prod(block_shape) * tensor.element_size())

    def copy(self, at: list[int], shared: Shared) -> None:
        box = self.tensor.new_zeros(self.block_shape)
        starts = [int(a) for a in at]
        sizes = zip(starts, self.block_shape, self.tensor.shape, strict=True)
        inside = [(max(a, 0), min(a + size, length)) for a, size, length in sizes]
        if all(begin < end for begin, end in inside):
            there = tuple(slice(begin - a, end - a) for a, (begin, end) in zip(starts, inside, strict=True))
            box[there] = self.tensor[tuple(slice(*span) for span in inside)]
        shared.store(box)


@dataclass
class Barrier:
    count: int  # of arrivals that end a phase
    missing: int
    copies: int = 0  # bytes that are expected
    phase: int = 0


class Barriers:
    """Barriers in shared memory, by their place. Copies are made when they are asked for."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.at: dict[Shared, Barrier] = {}

    def MBarrierLayout(self) -> None: ...

    def init(self, place: Shared, count: int) -> None:
        self.at[place] = Barrier(count, count)

    def expect(self, place: Shared, num_bytes: int) -> None:
        self._change(place, num_bytes, 1)

    def copied(self, place: Shared, num_bytes: int) -> None:
        self._change(place, -num_bytes, 0)

    def arrive(self, place: Shared) -> None:
        self._change(place, 0, 1)

    def wait(self, place: Shared, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.at[place].phase & 1 != int(parity), 60), "not all have arrived"

    def _change(self, place: Shared, num_bytes: int, arrivals: int) -> None:
        with self.changed:
            barrier = self.at[place]
            barrier.copies += num_bytes
            barrier.missing -= arrivals
            if barrier.missing == barrier.copies == 0:
                barrier.phase, barrier.missing = barrier.phase + 1, barrier.count
                self.changed.notify_all()


class Constant:
    def __new__(cls, value: Any) -> Any:
        return value


class Kernel:
    """Launches like a Triton kernel, one program after the other."""

    def __init__(self, body: object, gluon: SimpleNamespace) -> None:
        self.body, self.gluon = body, gluon

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def run(*args: object, num_warps: int, maxnreg: int | None = None, **constants: object) -> None:
            args = tuple(Pointers(a) if isinstance(a, Tensor) else a for a in args)
            for ids in itertools.product(*map(range, grid), [0]):
                self.gluon.program_id = lambda axis, ids=ids: torch.tensor(ids[axis])
                self.gluon.num_programs = lambda axis: torch.tensor(grid[axis])
                self.body(*args, **constants)  # type: ignore[operator]

        return run


def _where(condition: Tensor | bool, a: Tensor | int, b: Tensor | int) -> Tensor:
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))


def run_on_tensors(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel: str, helpers: tuple[str, ...], shared: Any = None
) -> None:
    """Let the kernel of that name in a module, and the functions that it calls, run on torch tensors.

    shared: a module from which it has some of them.
    """

    def layout(*args: object, **options: object) -> None: ...

    gluon = SimpleNamespace(
        constexpr=Constant, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16, uint8=torch.uint8,
        int8=torch.int8, int16=torch.int16, int32=torch.int32, static_range=range, where=_where,
        max=torch.amax, min=torch.amin, rsqrt=torch.rsqrt, exp=torch.exp,
        NVMMADistributedLayout=layout, DotOperandLayout=layout, BlockedLayout=layout, SliceLayout=layout,
        SwizzledSharedLayout=layout, NVMMASharedLayout=layout,
        allocate_shared_memory=Shared, load=Pointers.load, store=Pointers.store,
        atomic_add=Pointers.atomic_add,
        arange=lambda start, end, layout: torch.arange(start, end), convert_layout=lambda value, layout, **_: value,
        join=lambda a, b: torch.stack([a, b], -1), split=lambda value: value.unbind(-1),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)), sum=torch.sum,
        zeros=lambda shape, dtype, layout: torch.zeros(list(shape), dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(list(shape), value, dtype=dtype),
        zeros_like=torch.zeros_like, permute=torch.permute, exp2=torch.exp2, cdiv=lambda a, b: -(-a // b),
    )  # fmt: skip
    monkeypatch.setattr(module, kernel, Kernel(getattr(module, kernel).fn, gluon))
    for name in helpers:
        body = getattr(module, name).fn
        monkeypatch.setattr(module, name, body)
        monkeypatch.setitem(body.__globals__, "gl", gluon)
    monkeypatch.setattr(module, "gl", gluon)
    _activations(monkeypatch, module, gluon)
    if hasattr(module, "mma_v2"):
        monkeypatch.setattr(module, "mma_v2", lambda a, b, total: total + a.float() @ b.float())
        monkeypatch.setattr(module, "has_tensor_cores", lambda device: True, raising=False)
    if hasattr(module, "warpgroup_mma_wait"):
        _on_hopper(monkeypatch, [module, shared], gluon)


def _activations(monkeypatch: pytest.MonkeyPatch, module: ModuleType, gluon: SimpleNamespace) -> None:
    """The activations that the module shares with others."""
    monkeypatch.setattr(activation, "gl", gluon)
    for name, value in list(vars(activation).items()):
        if isinstance(value, tl.constexpr):
            monkeypatch.setattr(activation, name, value.value)
        elif name.startswith("activate"):
            body = getattr(value, "fn", value)
            monkeypatch.setattr(activation, name, body)
            if hasattr(module, name):
                monkeypatch.setattr(module, name, body)


def _on_hopper(monkeypatch: pytest.MonkeyPatch, modules: list[ModuleType | None], gluon: SimpleNamespace) -> None:
    """Copies and products are done when they are asked for."""
    gluon.allocate_shared_memory = Stages

    def nothing(*args: object, **options: object) -> None: ...

    barriers = Barriers()

    def copy(descriptor: Descriptor, at: list[int], barrier: Shared, shared: Shared) -> None:
        descriptor.copy(at, shared)
        barriers.copied(barrier, descriptor.block_type.nbytes)

    def copy_elements(shared: Shared, pointers: Pointers, mask: Tensor) -> None:
        shared.store(pointers.load(mask))

    def product(a: Tensor | Shared, b: Tensor, total: Tensor, is_async: bool, use_acc: bool = True) -> Tensor:
        added = (a.value if isinstance(a, Shared) else a).float() @ b.float()
        return total + added if use_acc else added

    def side_by_side(partitions: list[tuple[Any, tuple[Any, ...]]], *_: object) -> None:
        with ThreadPoolExecutor(len(partitions)) as pool:
            for future in [pool.submit(body, *args) for body, args in partitions]:
                future.result()

    gluon.warp_specialize = side_by_side
    replacements = {
        "box_descriptor": lambda tensor, *box: Descriptor(tensor, list(box)),
        "mbarrier": barriers,
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=copy_elements, commit_group=nothing, wait_group=nothing
        ),
        "barrier": nothing,
        "tma": SimpleNamespace(async_copy_global_to_shared=copy),
        "fence_async_shared": nothing,
        "warpgroup_mma": product,
        "warpgroup_mma_init": lambda total: total,
        "warpgroup_mma_wait": lambda outstanding, deps: tuple(deps) if deps[1:] else deps[0],
        "is_hopper": lambda device: True,
    }
    for module, (name, value) in itertools.product(modules, replacements.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
