"""Triton's interpreter without results that it throws away or has already, which take more than half of its time."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

MOST_BLOCKS = 1000  # of numbers, that are kept
WAIT_SECONDS = 1e-4  # of a rank, between looks


@functools.cache
def _langs(fn: Any) -> list[Any]:
    """The modules of the language that a function sees."""
    return [lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())]


def quicken() -> None:
    """From here on, in this process, kernels are interpreted as before, in less time.

    The interpreter's inner names are those of Triton 3.7. Where it has others, nothing changes.
    """
    names = ("_LangPatchScope", "_get_np_dtype", "interpreter_builder")
    if not all(hasattr(interpreter, name) for name in names) or interpreter._patch_lang.__module__ == __name__:
        return
    # It computes each sum and product of integers twice to assert that none overflows, which only its debug mode does.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    interpreter._patch_builtin = _found_once()
    interpreter.TensorHandle.__init__ = _unchecked
    tl.core._unwrap_if_constexpr = _unwrapped(tl.core._unwrap_if_constexpr)
    tl.dtype.__eq__ = _same_name
    interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype)
    tl.block_type.__init__ = _made_once(tl.block_type.__init__)
    tl.tensor.__init__ = _shaped_once(tl.tensor.__init__)
    semantic = tl.semantic.TritonSemantic
    semantic.cast = _cast_to_another(semantic.cast)
    if hasattr(semantic, "binary_op_type_checking_impl"):
        semantic.binary_op_type_checking_impl = _operands_as_they_are(semantic.binary_op_type_checking_impl)
        semantic.broadcast_impl_value = _broadcast_as_before(semantic.broadcast_impl_value)


def yield_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the core to other ranks at each operation that a rank waits with: there are fewer cores than ranks."""
    builder = interpreter.InterpreterBuilder
    add, load = builder.create_atomic_rmw, builder.create_masked_load

    def create_atomic_rmw(*args: Any) -> Any:
        time.sleep(WAIT_SECONDS)
        return add(*args)

    def create_masked_load(*args: Any) -> Any:
        if args[-1]:  # volatile
            time.sleep(WAIT_SECONDS)
        return load(*args)

    monkeypatch.setattr(builder, "create_atomic_rmw", create_atomic_rmw)
    monkeypatch.setattr(builder, "create_masked_load", create_masked_load)


def _patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch` puts the interpreter's functions into the language. A function that a kernel calls finds them there."""

    def patch_lang(fn: Any) -> Any:
        replaced = [tl.tensor.__add__, *(lang.load for lang in _langs(fn))]
        return interpreter._LangPatchScope() if not any(map(tl.core.is_builtin, replaced)) else patch(fn)

    return patch_lang


def _found_once() -> Callable[..., None]:
    """Builtins of the language stay the same; they are called without their check of arguments."""
    found: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            members = inspect.getmembers(package)
            found[package] = [(name, _builtin(member)) for name, member in members if tl.core.is_builtin(member)]
        for name, member in found[package]:
            scope.set_attr(package, name, member)

    return patch_builtin


def _builtin(member: Any) -> Callable[..., Any]:
    inner = getattr(member, "__wrapped__", member)

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **named)

    return call


def _unchecked(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """Initialise a `TensorHandle`, without comparing the widths of its two types."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _unwrapped(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Most values are neither constants nor lists of them."""
    plain = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.pointer_type, tl.block_type}

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is tl.constexpr else unwrap(value)

    return unwrap_if_constexpr


def _same_name(self: tl.dtype, other: object) -> bool:
    if self is other:
        return True
    other = other.value if isinstance(other, tl.constexpr) else other
    return isinstance(other, tl.dtype) and self.name == other.name


def _cast_to_another(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Most tensors have the type that they shall have."""

    def cast_to(self: Any, tensor: Any, dtype: Any, *rounding: Any, **named: Any) -> Any:
        return tensor if tensor.dtype is dtype else cast(self, tensor, dtype, *rounding, **named)

    return cast_to


def _looked_up_once(np_dtype: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """A type's dtype is that of its elements."""
    of_scalar = functools.cache(np_dtype)

    def looked_up(dtype: Any) -> np.dtype[Any]:
        scalar = dtype.scalar
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return looked_up


def _made_once(init: Callable[..., None]) -> Callable[..., None]:
    """A block's type is no more than its elements' type and its shape."""
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(tl.core._unwrap_if_constexpr(length) for length in shape)
        if key in made:
            self.__dict__.update(made[key])
        else:
            init(self, element_ty, shape)
            made[key] = dict(self.__dict__)

    return make


def _shaped_once(init: Callable[..., None]) -> Callable[..., None]:
    """All tensors of a type have one shape."""
    shapes: dict[str, tuple[Any, Any]] = {}

    def make(self: Any, handle: Any, type: Any) -> None:
        if type.name in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[type.name]
        else:
            init(self, handle, type)
            shapes[type.name] = self.shape, self.numel

    return make


def _operands_as_they_are(check: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Tensors of one type and offsets of pointers need no conversion, and a number becomes the same block each time."""
    blocks: dict[tuple[Any, ...], Any] = {}

    def operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        how = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if self.builder is not interpreter.interpreter_builder:
            return check(self, lhs, rhs, *how)
        is_left, is_right = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if is_left and is_right and not div_or_mod and arithmetic_check:
            left, right = lhs.dtype, rhs.dtype
            if left.name == right.name and not left.is_ptr():
                return (lhs, rhs) if lhs.type.name == rhs.type.name else self.broadcast_impl_value(lhs, rhs)
            if allow_lhs_ptr and left.is_ptr() and right.is_int():
                return self.broadcast_impl_value(lhs, rhs)
        tensor, number = (lhs, rhs) if is_left else (rhs, lhs)
        if is_left == is_right or not isinstance(number, (int, float)):
            return check(self, lhs, rhs, *how)
        key = number, type(number), math.copysign(1, number), tensor.type.name, is_left, how
        if key in blocks:
            return (tensor, blocks[key]) if is_left else (blocks[key], tensor)
        found = check(self, lhs, rhs, *how)
        if found[not is_left] is tensor and not tensor.dtype.is_fp8():  # how those are rounded, tests may change
            if len(blocks) == MOST_BLOCKS:
                blocks.clear()
            blocks[key] = found[is_left]
        return found

    return operands


def _broadcast_as_before(broadcast: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Two types have one shape in common."""
    plans: dict[tuple[str, str], tuple[Any, Any] | None] = {}  # None: not even the numbers of axes are the same

    def plan(before: Any, after: Any) -> Any:
        """Return what makes a tensor of one type one of the other; None: they are the same."""
        if before.type.name == after.type.name:
            return None
        builder, to = interpreter.interpreter_builder, after.type
        if not before.type.is_block():
            how = to.to_ir(builder)
            return lambda tensor: tl.tensor(builder.create_splat(how, tensor.handle), to)
        shape = [int(length) for length in after.shape]
        return lambda tensor: tl.tensor(builder.create_broadcast(tensor.handle, shape), to)

    def both(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        key = lhs.type.name, rhs.type.name
        if self.builder is not interpreter.interpreter_builder or plans.get(key, ()) is None:
            return broadcast(self, lhs, rhs)
        if key not in plans:
            found = broadcast(self, lhs, rhs)
            pairs = list(zip((lhs, rhs), found, strict=True))
            is_plain = all(not x.type.is_block() or len(x.shape) == len(y.shape) for x, y in pairs)
            plans[key] = (plan(*pairs[0]), plan(*pairs[1])) if is_plain else None
            return found
        of_lhs, of_rhs = plans[key] or (None, None)
        return of_lhs(lhs) if of_lhs else lhs, of_rhs(rhs) if of_rhs else rhs

    return both
