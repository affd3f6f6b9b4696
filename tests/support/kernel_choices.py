"""Records which kernels each operation launches, for many shapes, on GPUs that are not there.

`python -m tests.support.kernel_choices 80 90` prints a table for sm_80 and sm_90: for each case, ranges of tokens (or
of sequences) and the kernels of an operation, in order; "cuBLAS" stands for a GEMM of PyTorch's. With --full it prints
more operations, and a line for each launch's grid, constants and arguments: compare two versions of the launchers by
it. Tensors are fake, nothing is compiled or run. Needs a fresh process, because the interpreter replaces kernels while
they are imported.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

import kernels
from kernels.data.compressed_weight import CompressedWeight
from kernels.data.quantized_weight import QuantizedWeight, Weight
from tests.oracles.random_weights import FORMS

Operations: TypeAlias = Iterator[tuple[str, Callable[[int], object]]]
F32, F16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
I32, I64 = torch.int32, torch.int64
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 4096, 4097)
GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::addmm_")
PROPERTIES = {80: (108, 166912), 90: (132, 232448), 100: (148, 232448)}  # multiprocessors, shared memory of a program

# Left out of the table: they choose as others do.
DETAILS = ("linear_add", "linear_gated silu", "norm_gated gelu_tanh", "norm_linear", "norms_apart silu")
IN_TABLE = ("experts bfloat16", "experts mxfp4")

# Of the operation that runs now: the kernel, and a description of all that its launch was given.
launches: list[tuple[str, Callable[[], str]]] = []


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{list(value.stride())}"
    if isinstance(value, TensorDescriptor):
        return f"boxes {list(value.block_shape)} of {described(value.base)}"
    return repr(value)


class Gemms(TorchDispatchMode):
    """Records what PyTorch computes, except views and allocations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not func.is_view and not name.startswith(("aten::empty", "aten::new_empty", "prim::", "aten::detach")):
            launches.append((name, lambda: ", ".join(described(arg) for arg in args)))
        return func(*args, **(kwargs or {}))


def launched(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    package, name = kernel.module.split(".")[1], kernel.__name__.removesuffix("_kernel").removeprefix("_")

    def given() -> str:
        constants = ", ".join(f"{key}={described(value)}" for key, value in sorted(options.items()))
        return f"{grid} ({', '.join(described(arg) for arg in args)}) {constants}"

    launches.append((f"{package} {name}", given))


def weight(form: str, n: int, k: int, rounds: bool = True) -> Weight:
    """A weight [n, k] of floats ("bfloat16" …), or in one of `FORMS`."""
    if form in ("bfloat16", "float16", "float32"):
        return tensor(n, k, dtype=getattr(torch, form))
    kind, group, rows, traits = FORMS[form]
    group = group or k
    groups = -(-k // group)
    code_dtype = {"e4m3": E4M3, "int8": torch.int8}.get(kind, torch.uint8)
    scale_dtype = E4M3 if "e4m3" in traits else F16 if group < k and rows == 1 else F32
    return QuantizedWeight(
        kind=kind,
        codes=tensor(n, k if kind in ("e4m3", "int8") else k // 2, dtype=code_dtype),
        scale=tensor(-(-n // rows), groups, dtype=scale_dtype),
        group=group,
        rows=rows,
        zero=tensor(n, groups, dtype=torch.int8) if "zero" in traits else None,
        factor=tensor(n, dtype=F32) if "e4m3" in traits else None,
        order=tensor(k, dtype=I64) if "order" in traits else None,
        rounds_activations=rounds and "rounds" in traits,
    )


QUANTIZED = tuple(FORMS)
LINEAR = (  # form of the weight, outputs, inputs
    *((form, 6144, 4096) for form in ("bfloat16", "float16", "float32", *QUANTIZED)),
    ("bfloat16", 1024, 2048), ("bfloat16", 151936, 1024), ("bfloat16", 1000, 72), ("bfloat16", 28672, 8192),
    ("fp8 blocks", 1536, 4096), ("fp8", 151936, 1024), ("int4", 28672, 8192), ("mxfp4", 5120, 2880), ("int8", 1000, 80),
)  # fmt: skip


def linear(form: str, n: int, k: int, rounds: bool = True) -> Operations:
    matrix = weight(form, n, k, rounds)
    dtype = matrix.dtype if isinstance(matrix, Tensor) else BF16
    scale, bias = tensor(k, dtype=dtype), tensor(n, dtype=dtype)
    new = functools.partial(tensor, dtype=dtype)
    norm = kernels.NextNorm(tensor(n, dtype=dtype), 1e-6)
    yield "linear", lambda m: kernels.linear(new(m, k), matrix)
    yield "linear_add", lambda m: kernels.linear_add(new(m, n), new(m, k), matrix, bias)
    if n <= 16384:
        yield "linear_add_norm", lambda m: kernels.linear_add_norm(new(m, n), new(m, k), matrix, None, norm)
    for gate in ("silu", "gelu_tanh"):
        yield f"linear_gated {gate}", lambda m: kernels.linear_gated(new(m, k), matrix, None, gate)  # noqa: B023
        yield f"norm_gated {gate}", lambda m: kernels.norm_gated(new(m, k), scale, 1e-6, matrix, None, gate)  # noqa: B023
    yield "norm_linear", lambda m: kernels.norm_linear(new(m, k), scale, 1e-6, matrix, bias)
    yield "norms_apart", lambda m: answer(kernels.norms_apart(new(m, k), matrix))
    yield "norms_apart silu", lambda m: answer(kernels.norms_apart(new(m, k), matrix, "silu"))
    yield "quantized_input", lambda m: answer(kernels.quantized_input(new(m, k), matrix) is not None)


def answer(value: bool) -> None:
    launches.append((str(value), str))


def experts(form: str, activation: kernels.ExpertActivation, hidden: int = 2048, inner: int = 768) -> Operations:
    def stack(n: int, k: int) -> Weight:
        one = weight(form, n, k)
        if isinstance(one, Tensor):
            return tensor(128, n, k, dtype=one.dtype)
        return QuantizedWeight.stack([one] * 128)

    gate_up, down = kernels.pack_experts(stack(2 * inner, hidden), stack(hidden, inner), BF16)
    biases = (None, None) if activation == "silu" else (tensor(128, 2 * inner), tensor(128, hidden))
    yield from chosen_experts(kernels.Experts(gate_up, down, biases[0], biases[1], activation), hidden)


def chosen_experts(stack: kernels.Experts, hidden: int) -> Operations:
    def routed(m: int) -> tuple[Tensor, Tensor, Tensor]:
        return tensor(m, hidden), tensor(m, 8, dtype=I32), tensor(m, 8, dtype=F32)

    norm = kernels.NextNorm(tensor(hidden), 1e-6)
    yield "experts", lambda m: kernels.experts(*routed(m), stack)
    yield (
        "experts_add_norm",
        lambda m: kernels.experts_add_norm(tensor(m, hidden), norm, *routed(m), stack),
    )


def compressed(hidden: int = 2048, inner: int = 768) -> Operations:
    gate_up, down = (
        CompressedWeight(
            tensor(128, n // 128, k // 64, 2, 3, 512, dtype=I32), tensor(128, n, dtype=F32),
            tensor(128, n // 64, 32, dtype=I64), gated,
        )
        for n, k, gated in ((2 * inner, hidden, True), (hidden, inner, False))
    )  # fmt: skip
    yield from chosen_experts(kernels.Experts(gate_up, down), hidden)


def attention(
    head_dim: int, group: int, page: int, dtype: torch.dtype, kv_dtype: torch.dtype, **options: Any
) -> Operations:
    num_heads = 2 * group
    cache = tensor(10, 2, page, head_dim, dtype=kv_dtype)
    given: dict[str, Any] = {
        name: tensor(num_heads, dtype=F32) for name in ("alibi_slopes", "sinks") if options.pop(name, False)
    }
    kv_scale = tensor(2, 2, dtype=F32) if kv_dtype == E4M3 else None
    args = kernels.AttentionArgs(0.1, kv_scale=kv_scale, **given, **options)

    def query(m: int) -> Tensor:
        return tensor(m, num_heads, head_dim, dtype=F16 if kv_dtype == E4M3 and dtype == BF16 else dtype)

    def decode(m: int) -> None:
        lens, out = tensor(m, dtype=I32), tensor(m, num_heads, head_dim, dtype=dtype)
        plan = kernels.DecodePlan.allocate(
            m, num_heads, 2, head_dim, lens.device, kv_dtype=kv_dtype, window=args.window, sparse=args.sparse
        )
        kernels.plan_decode(lens, lens, plan)
        context = kernels.PagedContext(cache, cache, tensor(m, 64, dtype=I32), lens, lens)
        kernels.paged_attention_decode(query(m), context, args, plan=plan, out=out)

    def prefill(m: int) -> None:
        lens, out = tensor(1, dtype=I32), tensor(m, num_heads, head_dim, dtype=dtype)
        context = kernels.PagedContext(cache, cache, tensor(1, 64, dtype=I32), lens, lens)
        tiles = tensor(5, 2, dtype=I32)
        kernels.paged_attention_prefill(query(m), tensor(2, dtype=I32), context, args, tiles=tiles, out=out)

    yield "decode", decode
    yield "prefill", prefill


def latent(num_heads: int, dtype: torch.dtype) -> Operations:
    cache = tensor(10, 1, 16, 576, dtype=dtype)

    def decode(m: int) -> None:
        query, out = tensor(m, num_heads, 576, dtype=dtype), tensor(m, num_heads, 512, dtype=dtype)
        rows, tables = tensor(m, dtype=I32), tensor(m, 64, dtype=I32)
        plan = kernels.latent_decode_plan(m, num_heads, 512, out.device)
        latents = kernels.PagedLatents(cache, tables, rows, rows)
        kernels.latent_attention_decode(query, latents, scale=0.1, out=out, plan=plan)

    def prefill(m: int) -> None:
        query, out = tensor(m, num_heads, 576, dtype=dtype), tensor(m, num_heads, 512, dtype=dtype)
        rows, tables = tensor(1, dtype=I32), tensor(1, 64, dtype=I32)
        latents, tiles = kernels.PagedLatents(cache, tables, rows, rows), tensor(5, 2, dtype=I32)
        kernels.latent_attention_prefill(query, tensor(2, dtype=I32), latents, scale=0.1, out=out, tiles=tiles)

    yield "latent decode", decode
    yield "latent prefill", prefill


def router(dtype: torch.dtype) -> Operations:
    matrix, norm = tensor(128, 2048, dtype=dtype), tensor(2048)
    rule = kernels.Router(8)
    yield "route", lambda m: kernels.route(tensor(m, 2048), kernels.RouterArgs(matrix, rule))
    yield (
        "norm_route",
        lambda m: kernels.norm_route(
            tensor(m, 2048), norm, 1e-6, kernels.RouterArgs(matrix, rule), tensor(m, dtype=I64)
        ),
    )


CASES: dict[str, Callable[[], Operations]] = {
    **{f"{form} [{n}, {k}]": functools.partial(linear, form, n, k) for form, n, k in LINEAR},
    **{
        f"{form} [6144, 4096], weight-only": functools.partial(linear, form, 6144, 4096, False)
        for form in ("fp8", "fp8 blocks", "int8")
    },
    **{
        f"experts {form} {activation}": functools.partial(experts, form, activation)
        for activation in ("silu", "clamped_swiglu")
        for form in ("bfloat16", *QUANTIZED)
        if "order" not in FORMS.get(form, ("", 0, 0, ()))[3]
    },
    "experts compressed": compressed,
    "attention 128, group 4": lambda: attention(128, 4, 16, BF16, BF16),
    "attention 128, group 7": lambda: attention(128, 7, 16, BF16, BF16),
    "attention 128, group 5": lambda: attention(128, 5, 16, BF16, BF16),
    "attention 80, group 8, float16": lambda: attention(80, 8, 16, F16, F16),
    "attention 128, group 4, float32": lambda: attention(128, 4, 16, F32, F32),
    "attention 256, group 4": lambda: attention(256, 4, 16, BF16, BF16),
    "attention 512, group 4": lambda: attention(512, 4, 16, BF16, BF16),
    "attention 64, group 8, window, sinks": lambda: attention(64, 8, 16, BF16, BF16, window=128, sinks=True),
    "attention 128, group 4, window, cap": lambda: attention(128, 4, 16, BF16, BF16, window=1024, soft_cap=50.0),
    "attention 128, group 4, ALiBi": lambda: attention(128, 4, 16, BF16, BF16, alibi_slopes=True),
    "attention 128, group 4, e4m3": lambda: attention(128, 4, 16, BF16, E4M3),
    "attention 64, group 8, e4m3": lambda: attention(64, 8, 32, F16, E4M3, sinks=True),
    "attention 256, group 2, e4m3": lambda: attention(256, 2, 16, BF16, E4M3),
    "attention 128, group 4, sparse": lambda: attention(
        128, 4, 16, BF16, BF16, sparse=kernels.BlockSparse(64, 16, 8, 1)
    ),
    "latent, 16 heads": lambda: latent(16, BF16),
    "latent, 128 heads": lambda: latent(128, BF16),
    "latent, 16 heads, float32": lambda: latent(16, F32),
    "router": lambda: router(BF16),
    "router float32": lambda: router(F32),
}


def item(self: Tensor, index: Any) -> Tensor:
    """`self[index]`, which in Python asks for a device that is there."""
    result, dim = self, 0
    parts = index if isinstance(index, tuple) else (index,)
    if parts and parts[0] is Ellipsis:
        parts = (*(slice(None),) * (self.dim() - len(parts) + 1), *parts[1:])
    for part in parts:
        if isinstance(part, slice):
            result = torch.ops.aten.slice(result, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor):
            result = torch.ops.aten.index(result, [None] * dim + [part])
        elif part is None:
            result = torch.ops.aten.unsqueeze(result, dim)
        else:
            result, dim = torch.ops.aten.select(result, dim, part), dim - 1
        dim += 1
    return result


def pretend(capability: int) -> None:
    """Let the kernels' launchers find a GPU of this compute capability."""
    multiprocessors, shared = PROPERTIES[capability]
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(  # type: ignore[assignment]
        multi_processor_count=multiprocessors, shared_memory_per_block_optin=shared
    )
    for module in [module for name, module in sys.modules.items() if name.startswith("kernels.")]:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def table(capability: int, full: bool = False) -> Iterator[str]:
    """The lines of the table for a GPU of this compute capability."""
    pretend(capability)
    for case, make in CASES.items():
        if not full and "clamped" in case and not case.startswith(IN_TABLE):
            continue
        for name, operation in make():
            if not full and name in DETAILS:
                continue
            ranges: list[list[Any]] = []
            for m in TOKENS:
                launches.clear()
                try:
                    operation(m)
                    result = [kernel for kernel, _ in launches]
                except (AssertionError, NotImplementedError) as error:
                    launches[:] = [("fails", functools.partial(repr, error))]
                    result = ["fails"]
                if full:
                    yield f"sm_{capability} {case} {name} {m}: {[(kernel, given()) for kernel, given in launches]}"
                    continue
                used = [
                    "cuBLAS" if kernel in GEMMS else kernel
                    for kernel in result
                    if not kernel.startswith("aten::") or kernel in GEMMS
                ]
                if ranges and ranges[-1][2] == used:
                    ranges[-1][1] = m
                else:
                    ranges.append([m, m, used])
            if not full:
                text = " | ".join(f"{first}-{last}: {', '.join(used)}" for first, last, used in ranges)
                yield f"sm_{capability} {case} {name}: {text}"


def main(arguments: list[str]) -> None:
    full = "--full" in arguments
    for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
        importlib.import_module(found.name)
    JITFunction.run = launched
    without_device()
    with FakeTensorMode(allow_non_fake_inputs=True), Gemms():  # type: ignore[no-untyped-call]
        for capability in (int(argument) for argument in arguments if argument.isdigit()):
            for line in table(capability, full):
                print(line)


def without_device() -> None:
    """Let fake tensors do what their bindings in Python would ask a device for."""
    methods: dict[str, Callable[..., Any]] = {
        "__getitem__": item,
        "contiguous": lambda self: torch.ops.aten.clone(self, memory_format=torch.contiguous_format),
        "copy_": lambda self, other: self,
        "data_ptr": lambda self: 0,
    }
    for name, method in methods.items():
        setattr(FakeTensor, name, method)


if __name__ == "__main__":
    main(sys.argv[1:])
