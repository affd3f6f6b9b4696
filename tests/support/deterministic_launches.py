"""Finds out which operations launch other kernels for other numbers of tokens in deterministic mode, on no GPU.

`python -m tests.support.deterministic_launches 90` prints a line for each operation: the numbers of tokens from which
on its kernels, their constants, warps, stages or specialised numbers are others than for one token, or that they never
are. Grids may differ. Tensors are fake, nothing is compiled or run. Needs a fresh process, as
`tests.support.kernel_choices` does.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

import kernels
from engine.models.shard import Shard
from kernels import SamplingRows
from kernels.data.state import StateSpace
from tests.support import kernel_choices
from tests.support.kernel_choices import (
    BF16,
    E4M3,
    F16,
    F32,
    GEMMS,
    I32,
    I64,
    Gemms,
    Operations,
    attention,
    experts,
    latent,
    linear,
    router,
    tensor,
    weight,
)  # fmt: skip

TOKENS = (1, 2, 3, 7, 16, 17, 64, 65, 129, 257, 512, 513, 1023, 1024, 2049, 4097, 8192)
# Only integers: counts, orders and positions, which any kernel computes alike.
OF_INTEGERS = ("kernels.triton.pairs", "kernels.triton.prepare", "kernels.triton.blocks")
# Their programs may share work, or have larger tiles: the order of sums stays, as `python -m tests.gpu` checks.
SHARED = ("kernels.triton.fixed_attention",)
OF_PROGRAMS = ("SPLITS", "BLOCK_M", "TILE_Q", "EARLY", "STAGES", "num_warps", "num_stages")
# One order of sums, in tiles of any size.
GEMMS_IN_ORDER = ("_fixed_parts_kernel", "_fixed_many_kernel", "_fixed_few_kernel")
OF_SUMS = ("K", "PIECES", "BIAS", "RESIDUAL", "ROUND")
HEADS, KV_HEADS, DIM = 16, 8, 128

# Kernels of the operation that runs now, with all that their code depends on.
found: list[tuple[Any, ...]] = []


def launched(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    if kernel.module in OF_INTEGERS or kernel.__name__ == "_plan_kernel":  # its plan is not read
        return
    if kernel.__name__ in GEMMS_IN_ORDER:
        gate, n = options["GATE"], options["N"]
        if options.get("NORM"):  # it rounds as the kernel apart
            found.append(("norm", options["K"]))
        found.append(("GEMM", 2 * n if gate else n, *(options[name] for name in OF_SUMS)))
        if gate:  # it rounds as the kernel apart
            found.append(("gate", n, gate))
        return
    if kernel.__name__ == "_gated_kernel":
        found.append(("gate", options["WIDTH"], options["GATE"]))
        return
    if options.get("EXACT") and kernel.__name__ == "_rms_norm_kernel":  # its sums are integers
        found.append(("norm", options["HIDDEN"]))
        return
    numbers: list[tuple[Any, ...]] = []
    for parameter, value in zip(kernel.params, args, strict=False):
        if isinstance(value, int) and not isinstance(value, bool) and not parameter.do_not_specialize:
            numbers.append((parameter.name, value == 1, value % 16 == 0))
        elif isinstance(value, Tensor):
            numbers.append((parameter.name, str(value.dtype), value.shape[1:] == (1,)))
    if kernel.module in SHARED:
        numbers = [each for each in numbers if each[0] not in ("partial", "parts", "stats", "arrivals")]
        options = {name: value for name, value in options.items() if name not in OF_PROGRAMS}
    constants = tuple(sorted((name, str(value)) for name, value in options.items()))
    found.append((kernel.module, kernel.__name__, tuple(numbers), constants))


def rows_around(dtype: torch.dtype, hidden: int) -> Operations:
    """Norms, activations, rotary embeddings: what stands between GEMMs."""
    norm, heads = tensor(hidden, dtype=dtype), tensor(DIM, dtype=dtype)
    cache, table = tensor(10, KV_HEADS, 16, DIM, dtype=dtype), tensor(4096, DIM, dtype=F32)

    def rope(m: int) -> Tensor:
        qkv = tensor(m, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
        args = kernels.RopeArgs(HEADS, KV_HEADS, table, heads, heads)
        return kernels.rope_and_store(
            qkv, tensor(m, dtype=I32), args, kernels.KVSlots(cache, cache, tensor(m, dtype=I64))
        )

    yield "rms_norm", lambda m: kernels.rms_norm(tensor(m, hidden, dtype=dtype), norm, 1e-6)
    yield (
        "add_rms_norm",
        lambda m: kernels.add_rms_norm(tensor(m, hidden, dtype=dtype), tensor(m, hidden, dtype=dtype), norm, 1e-6),
    )
    yield "gate_and_mul", lambda m: kernels.gate_and_mul(tensor(m, 2 * hidden, dtype=dtype), "silu")
    yield "rope_and_store", rope
    yield "embedding", lambda m: kernels.embedding(tensor(5000, hidden, dtype=dtype), tensor(m, dtype=I64))


def samples(vocab_size: int) -> Operations:
    def rows(m: int) -> SamplingRows:
        temperature, top_k, seeds = tensor(m, dtype=F32), tensor(m, dtype=I32), tensor(m, dtype=I64)
        return SamplingRows(temperature, top_k, temperature, temperature, seeds, top_k)

    yield "sample", lambda m: kernels.sample(tensor(m, vocab_size), rows(m))
    yield "token_logprobs", lambda m: kernels.token_logprobs(tensor(m, vocab_size), tensor(m, dtype=I64), 2)


def split(form: str, n: int, k: int) -> Operations:
    matrix = kernels.split_weight(weight(form, n, k, False), Shard().eighths(k))
    dtype = F32 if form == "float32" else BF16
    yield "split_linear", lambda m: kernels.split_linear(tensor(m, k, dtype=dtype), matrix)


def split_experts(hidden: int = 2048, inner: int = 768) -> Operations:
    stack = kernels.Experts(tensor(128, 2 * inner, hidden), tensor(128, hidden, inner))

    def call(m: int) -> Tensor:
        ids, weights = tensor(m, 8, dtype=I32), tensor(m, 8, dtype=F32)
        return kernels.split_experts(tensor(m, hidden), ids, weights, stack, Shard().eighths(128))

    yield "split_experts", call


def latent_projections(num_heads: int) -> Operations:
    both, cache = tensor(num_heads, 256, 512), tensor(10, 1, 16, 576)
    norm, table = tensor(512), tensor(4096, 64, dtype=F32)

    def absorb(m: int) -> Tensor:
        new = kernels.NewLatents(
            tensor(m, 576), norm, 1e-6, tensor(m, dtype=I32), table, cache, tensor(m, dtype=I64), True
        )
        return kernels.absorb_and_store(tensor(m, num_heads, 192), both[:, :128], new)

    yield "absorb_and_store", absorb
    yield "head_linear", lambda m: kernels.head_linear(tensor(m, num_heads, 512), both[:, 128:])


def states_of(m: int) -> kernels.StateContext:
    """A step of m decodes, or for odd m of one prompt."""
    prompts = 1 if m % 2 else m
    found = torch.zeros(m, dtype=I32)
    rows, starts = tensor(prompts, dtype=I32), tensor(prompts + 1, dtype=I32)
    return kernels.StateContext(tensor(m + 1, 40, dtype=I32), rows, starts, rows, found, 16, only_decodes=m % 2 == 0)


def recurrent(dtype: torch.dtype) -> Operations:
    heads = tensor(32, dtype=F32)
    updates = tensor(9, 16, 32, 128, dtype=F32)
    states = kernels.DeltaStates(
        tensor(9, 32, 128, 128, dtype=F32), tensor(9, 16, 16, 128, dtype=dtype), updates, tensor(9, 16, 32, dtype=F32)
    )
    of_channels = kernels.DeltaStates(states.before, tensor(9, 16, 32, 128, dtype=dtype), updates, updates)
    taps, cached = tensor(1024, 4, dtype=dtype), tensor(9, 4, 1024, dtype=dtype)

    def kda(m: int) -> Tensor:
        given = tensor(m, 3 * 4096, dtype=dtype), tensor(m, 32, dtype=dtype), tensor(m, 4096, dtype=dtype)
        return kernels.kda(*given, heads, tensor(4096, dtype=F32), of_channels, states_of(m))

    def delta_rule(m: int) -> Tensor:
        given = tensor(m, 8192, dtype=dtype), tensor(m, 64, dtype=dtype)
        return kernels.delta_rule(*given, heads, heads, states, states_of(m))

    def mamba2(m: int) -> Tensor:
        given = tensor(m, 8192, dtype=dtype), tensor(m, 32, dtype=dtype)
        return kernels.mamba2(*given, StateSpace(heads, heads, heads, (0.0, 1.0)), states, states_of(m))

    def gated_norm(m: int) -> Tensor:
        return kernels.gated_rms_norm(tensor(m, 32, 128, dtype=dtype), tensor(m, 4096, dtype=dtype), norm, 1e-6)

    def grouped_norm(m: int) -> Tensor:
        x = tensor(m, 4096, dtype=dtype)
        return kernels.grouped_rms_norm(x, x, tensor(4096, dtype=dtype), 1e-6, 8, True)

    norm = tensor(128, dtype=dtype)
    yield "kda", kda
    yield "delta_rule", delta_rule
    yield "mamba2", mamba2
    yield "causal_conv", lambda m: kernels.causal_conv(tensor(m, 1024, dtype=dtype), taps, None, cached, states_of(m))
    yield "short_conv", lambda m: kernels.short_conv(tensor(m, 3072, dtype=dtype), taps, None, cached, states_of(m))
    yield "gated_rms_norm", gated_norm
    yield "grouped_rms_norm", grouped_norm


def adapters(rank: int) -> Operations:
    blocks, factor = tensor(32, 3, dtype=I32), tensor(4, 2048, dtype=F32)
    groups = (kernels.RowGroup(0, 1024, 0), kernels.RowGroup(1024, 2048, 1))
    weights = kernels.LoraWeights(
        tensor(4, 2 * rank, 4096), tensor(4, 2048, rank), factor, factor, groups, blocks, blocks
    )
    matrix = tensor(2048, 4096)

    def linear(m: int) -> Tensor:
        slots = kernels.AdapterTokens(tensor(m, dtype=I32), 4)
        return kernels.adapted_linear(tensor(m, 4096), matrix, None, weights, slots, gate="silu")

    yield "adapted_linear", linear


CASES: dict[str, Callable[[], Operations]] = {
    **{
        f"{form} [{n}, {k}]": functools.partial(linear, form, n, k, False)
        for form, n, k in (
            ("bfloat16", 6144, 4096), ("float32", 6144, 4096), ("bfloat16", 151936, 1024), ("int4", 6144, 4096),
            ("fp8 blocks", 6144, 4096), ("int8", 6144, 4096),
        )
    },
    **{f"{form}, in eighths": functools.partial(split, form, 4096, 4096) for form in ("bfloat16", "float32", "int4")},
    "experts bfloat16": functools.partial(experts, "bfloat16", "silu"),
    "experts int4": functools.partial(experts, "int4", "silu"),
    "experts in eighths": split_experts,
    "router": functools.partial(router, BF16),
    "router float32": functools.partial(router, F32),
    "attention 128": functools.partial(attention, 128, 4, 16, BF16, BF16),
    "attention 64, window, sinks": functools.partial(attention, 64, 8, 16, BF16, BF16, window=128, sinks=True),
    "attention 256, float16": functools.partial(attention, 256, 2, 16, F16, F16),
    "attention 128, e4m3": functools.partial(attention, 128, 4, 16, BF16, E4M3),
    "attention 256, e4m3, window": functools.partial(attention, 256, 2, 16, BF16, E4M3, window=128),
    "latent 16": functools.partial(latent, 16, BF16),
    "latent 128, float32": functools.partial(latent, 128, F32),
    "latent projections": functools.partial(latent_projections, 16),
    "recurrent layers": functools.partial(recurrent, BF16),
    "adapters of rank 16": functools.partial(adapters, 16),
    "adapters of rank 128": functools.partial(adapters, 128),
    "fp4 weights [6144, 4096]": functools.partial(linear, "mxfp4", 6144, 4096, False),
    "rows of 1024": functools.partial(rows_around, BF16, 1024),
    "rows of 4096, float32": functools.partial(rows_around, F32, 4096),
    "vocabulary": functools.partial(samples, 151936),
}  # fmt: skip


def lines(capability: int) -> Iterator[str]:
    kernel_choices.pretend(capability)
    for case, make in CASES.items():
        for name, operation in make():
            first: list[tuple[Any, ...]] = []
            others = []
            for m in TOKENS:
                found.clear()
                kernel_choices.launches.clear()
                operation(m)
                computed = [(kernel,) for kernel, _ in kernel_choices.launches if kernel in GEMMS]
                if m == TOKENS[0]:
                    first = [*found, *computed]
                elif [*found, *computed] != first or computed:
                    others.append(m)
            yield f"{case} {name}: {f'other kernels for {others}' if others else 'the same kernels'}"


def main(capability: int) -> None:
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        importlib.import_module(module.name)
    JITFunction.run = launched
    kernel_choices.without_device()
    kernels.FORMS.choose(True)
    with FakeTensorMode(allow_non_fake_inputs=True), Gemms():  # type: ignore[no-untyped-call]
        for line in lines(capability):
            print(line)


if __name__ == "__main__":
    main(int(sys.argv[1]))
