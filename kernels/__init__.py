"""Quire's kernels: the operations that a decoder consists of, tensors in, tensors out.

`kernels.reference` has their docstrings and reference implementations. The device of the first argument selects the
backend. Operations that a backend does not implement use the reference implementation. To support another kind of
device, add it to `BACKENDS`. A backend is imported on the first call for its device, so a machine without a GPU does
not need Triton.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch

from kernels import reference
from kernels.data.activation import Activation, ExpertActivation, Gate
from kernels.data.attention import AttentionArgs, KnownArgs, NewIndexKeys, NewLatents, PagedContext, PagedLatents
from kernels.data.block_parts import BlockParts
from kernels.data.block_sparse import BlockSparse
from kernels.data.block_weight import BlockWeight, have_order, reads_blocks
from kernels.data.capability import compute_capability
from kernels.data.compressed_weight import CompressedWeight, ExpertWeight
from kernels.data.forms import FORMS
from kernels.data.kv_cache import KV_SCALES, KVSlots, RopeArgs, WideCopy
from kernels.data.lora import AdapterTokens, EmbeddingLora, ExpertLora, LoraWeights, RetrainedRows, RowGroup
from kernels.data.moe import Experts, Router, RouterArgs
from kernels.data.plan import (
    FEW_SEQS,
    MIN_MEMBERS,
    MIN_SHARED,
    SHARED_ROWS,
    DecodePlan,
    SharedPrefix,
    latent_decode_plan,
    latent_tile_queries,
    make_prefill_tiles,
    prefill_tile_queries,
    shared_queries,
)
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import Kind, QuantizedWeight, Weight, by_groups
from kernels.data.recorded import Recorded
from kernels.data.sampling import NOT_FINITE, NOTHING_ALLOWED, Part, SamplingRows
from kernels.data.split_weight import SplitWeight
from kernels.data.state import DeltaStates, StateContext, StateSpace
from kernels.reference import pack_e2m1, pack_nibbles

P = ParamSpec("P")
R = TypeVar("R")

BACKENDS: dict[str, dict[str, str]] = {  # type of device -> module -> names of operations
    "cpu": {
        "kernels.cpu.elementwise": "add_rms_norm add_scaled gate_and_mul rms_norm_add scale sigmoid",
        "kernels.cpu.gates": "activation gated gated_rms_norm grouped_rms_norm",
        "kernels.cpu.kda": "kda",
        "kernels.cpu.lora": "adapted_linear adapter_slots lora_add",
        "kernels.cpu.mamba2": "mamba2",
        "kernels.cpu.moe": "adapted_experts experts experts_add_norm norm_route pack_router route",
        "kernels.cpu.matmul": (
            "pack_weight linear linear_add linear_add_norm linear_gated norm_gated norm_linear norms_apart"
        ),
        "kernels.cpu.native_attention": "paged_attention_decode paged_attention_prefill",
        "kernels.cpu.recurrent": "causal_conv delta_rule short_conv",
        "kernels.cpu.rotary": "rms_norm rope_and_store",
        "kernels.cpu.step": "embedding greedy_sample prepare_step store_tokens",
    },
    "cuda": {
        "kernels.triton.activation": "gate_and_mul",
        "kernels.cuda.attention": (
            "latent_attention_decode latent_attention_prefill paged_attention_decode paged_attention_prefill"
        ),
        "kernels.triton.attention_decode": "plan_decode",
        "kernels.triton.shared_prefix": "plan_prefix",
        "kernels.triton.kda": "kda",
        "kernels.triton.index": "index_scores store_index_keys",
        "kernels.triton.latent": "absorb_and_store rotate_and_store",
        "kernels.triton.embedding": "embedding",
        "kernels.triton.blocks": "gather_blocks scatter_blocks",
        "kernels.triton.kv_cache": "store_kv",
        "kernels.triton.lora": "lora_add",
        "kernels.triton.vocab_lora": "adapt_embedding retrained_logits",
        "kernels.cuda.lora": "adapted_experts adapted_linear extended_weight fuses_adapters",
        "kernels.cuda.moe": "compress_experts experts experts_add_norm pack_experts",
        "kernels.cuda.router": "route norm_route route_norms_apart",
        "kernels.cuda.linear": (
            "linear linear_add linear_add_norm linear_gated norm_gated norm_linear norms_apart quantized_input"
        ),
        "kernels.cuda.block_linear": "pack_blocks",
        "kernels.triton.weight_only": "dequantize",
        "kernels.triton.scaled": "quantize_rows",
        "kernels.triton.norm": "rms_norm add_rms_norm rms_norm_add",
        "kernels.triton.prepare": "prepare_step",
        "kernels.triton.recurrent": "causal_conv gated_rms_norm short_conv",
        "kernels.triton.grouped_norm": "grouped_rms_norm",
        "kernels.triton.scans": "delta_rule mamba2",
        "kernels.triton.rotary": "rope_and_store",
        "kernels.triton.sampling": "best_keys best_tokens mask_logits sample",
        "kernels.triton.thresholds": "sampling_thresholds",
        "kernels.triton.wide_pages": "widen_pages",
        "kernels.cuda.vision": "full_attention rotate_halves",
    },
}

# Operations whose form above depends on the other tokens of a step, in a form that does not: see `FORMS`.
DETERMINISTIC: dict[str, dict[str, str]] = {
    "cpu": {
        "kernels.cpu.alone": (
            "absorb_and_store activation adapt_embedding adapted_experts adapted_linear head_linear index_scores "
            "latent_attention_decode latent_attention_prefill lora_add pack_router pack_weight paged_attention_decode "
            "paged_attention_prefill retrained_logits rotate_and_store sample store_index_keys token_logprobs"
        ),
        "kernels.cpu.split_sums": "add_pieces split_experts split_linear split_weight",
        "kernels.cpu.token_by_token": "delta_rule kda mamba2",
    },
    "cuda": {
        "kernels.cuda.deterministic": (
            "experts experts_add_norm linear linear_add linear_add_norm linear_gated norm_gated norm_linear norm_route "
            "norms_apart pack_experts paged_attention_decode paged_attention_prefill quantized_input route "
            "route_norms_apart token_logprobs"
        ),
        "kernels.cuda.fixed_latent": "absorb_and_store head_linear latent_attention_decode",
        "kernels.cuda.fixed_lora": "adapted_experts adapted_linear fuses_adapters",
        "kernels.triton.fixed_scan": "delta_rule kda mamba2",
        "kernels.cuda.split_sums": "adds_split_sums split_experts split_linear split_linear_add split_weight",
    },
}


def _implementation(operation: Callable[P, R], device_type: str) -> Callable[P, R]:
    """Return the backend's implementation of an operation, or the reference implementation `operation` itself."""
    if device_type not in BACKENDS:
        raise NotImplementedError(
            f"there are no kernels for devices of type {device_type!r}, only for {', '.join(BACKENDS)}"
        )
    name = operation.__name__
    chosen = DETERMINISTIC.get(device_type, {}) if FORMS.deterministic else {}
    for module, names in (*chosen.items(), *BACKENDS[device_type].items()):
        if name in names.split():
            implementation: Callable[P, R] = getattr(importlib.import_module(module), name)
            return implementation
    return operation


def _dispatched(operation: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls `operation`, a reference implementation, on the backend of its first argument's
    device.

    A process uses the CPU and at most one other type of device, so one attribute of the argument decides.
    """
    on_cpu: Callable[P, R] | None = None
    on_other: Callable[P, R] | None = None

    def forget() -> None:
        nonlocal on_cpu, on_other
        on_cpu = on_other = None

    FORMS.on_change(forget)

    @functools.wraps(operation)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal on_cpu, on_other
        if args[0].is_cpu:  # type: ignore[attr-defined]
            if on_cpu is None:
                on_cpu = _implementation(operation, "cpu")
            return on_cpu(*args, **kwargs)
        if on_other is None:
            on_other = _implementation(operation, args[0].device.type)  # type: ignore[attr-defined]
        return on_other(*args, **kwargs)

    return dispatch


rms_norm = _dispatched(reference.rms_norm)
add_rms_norm = _dispatched(reference.add_rms_norm)
rms_norm_add = _dispatched(reference.rms_norm_add)
gate_and_mul = _dispatched(reference.gate_and_mul)
activation = _dispatched(reference.activation)
gated = _dispatched(reference.gated)
sigmoid = _dispatched(reference.sigmoid)
add_scaled = _dispatched(reference.add_scaled)
scale = _dispatched(reference.scale)
pack_weight = _dispatched(reference.pack_weight)
pack_blocks = _dispatched(reference.pack_blocks)
dequantize = _dispatched(reference.dequantize)
quantize_groups = _dispatched(reference.quantize_groups)
quantize_rows = _dispatched(reference.quantize_rows)
linear = _dispatched(reference.linear)
linear_add = _dispatched(reference.linear_add)
linear_add_norm = _dispatched(reference.linear_add_norm)
linear_gated = _dispatched(reference.linear_gated)
norm_linear = _dispatched(reference.norm_linear)
norm_gated = _dispatched(reference.norm_gated)
norms_apart = _dispatched(reference.norms_apart)
quantized_input = _dispatched(reference.quantized_input)
adapter_slots = _dispatched(reference.adapter_slots)
lora_add = _dispatched(reference.lora_add)
adapt_embedding = _dispatched(reference.adapt_embedding)
retrained_logits = _dispatched(reference.retrained_logits)
adapted_linear = _dispatched(reference.adapted_linear)
fuses_adapters = _dispatched(reference.fuses_adapters)
extended_weight = _dispatched(reference.extended_weight)
route = _dispatched(reference.route)
norm_route = _dispatched(reference.norm_route)
route_norms_apart = _dispatched(reference.route_norms_apart)
pack_router = _dispatched(reference.pack_router)
pack_experts = _dispatched(reference.pack_experts)
compress_experts = _dispatched(reference.compress_experts)
experts = _dispatched(reference.experts)
experts_add_norm = _dispatched(reference.experts_add_norm)
adapted_experts = _dispatched(reference.adapted_experts)
split_weight = _dispatched(reference.split_weight)
split_linear = _dispatched(reference.split_linear)
adds_split_sums = _dispatched(reference.adds_split_sums)
split_linear_add = _dispatched(reference.split_linear_add)
split_experts = _dispatched(reference.split_experts)
add_pieces = _dispatched(reference.add_pieces)
rope_and_store = _dispatched(reference.rope_and_store)
rotate_halves = _dispatched(reference.rotate_halves)
full_attention = _dispatched(reference.full_attention)
store_kv = _dispatched(reference.store_kv)
gather_blocks = _dispatched(reference.gather_blocks)
scatter_blocks = _dispatched(reference.scatter_blocks)
widen_pages = _dispatched(reference.widen_pages)
paged_attention_decode = _dispatched(reference.paged_attention_decode)
paged_attention_prefill = _dispatched(reference.paged_attention_prefill)
embedding = _dispatched(reference.embedding)
greedy_sample = _dispatched(reference.greedy_sample)
store_tokens = _dispatched(reference.store_tokens)
head_linear = _dispatched(reference.head_linear)
absorb_and_store = _dispatched(reference.absorb_and_store)
rotate_and_store = _dispatched(reference.rotate_and_store)
latent_attention_decode = _dispatched(reference.latent_attention_decode)
latent_attention_prefill = _dispatched(reference.latent_attention_prefill)
store_index_keys = _dispatched(reference.store_index_keys)
index_scores = _dispatched(reference.index_scores)
mark_faults = _dispatched(reference.mark_faults)
mask_logits = _dispatched(reference.mask_logits)
sample = _dispatched(reference.sample)
best_keys = _dispatched(reference.best_keys)
best_tokens = _dispatched(reference.best_tokens)
sampling_thresholds = _dispatched(reference.sampling_thresholds)
random_bits = _dispatched(reference.random_bits)
token_logprobs = _dispatched(reference.token_logprobs)
prepare_step = _dispatched(reference.prepare_step)
plan_decode = _dispatched(reference.plan_decode)
plan_prefix = _dispatched(reference.plan_prefix)
short_conv = _dispatched(reference.short_conv)
causal_conv = _dispatched(reference.causal_conv)
delta_rule = _dispatched(reference.delta_rule)
gated_rms_norm = _dispatched(reference.gated_rms_norm)
kda = _dispatched(reference.kda)
mamba2 = _dispatched(reference.mamba2)
grouped_rms_norm = _dispatched(reference.grouped_rms_norm)


def record(work: Callable[[], R]) -> Recorded[R]:
    """See `kernels.cpu.step.record`."""
    result: Recorded[R] = importlib.import_module("kernels.cpu.step").record(work)
    return result


def call_batches(device: torch.device) -> Callable[[Callable[[], R]], R]:
    """Return what does work on a device: on a CPU, see `kernels.cpu.call_batches`."""
    if device.type != "cpu":
        return lambda work: work()
    run: Callable[[Callable[[], R]], R] = importlib.import_module("kernels.cpu.call_batches").CallBatches().run
    return run


def attention_backend(device: torch.device) -> str:
    """Return the attention implementation for a device, for display."""
    if device.type == "cuda":
        return "Triton and Gluon" if compute_capability(device)[0] == 9 else "Triton"
    return "C++" if importlib.import_module("kernels.cpu.library").library() is not None else "PyTorch"


def cpu_instruction_set() -> str:
    """Return the name of the CPU's instruction set that kernels are compiled for; ValueError: it is not valid."""
    return str(importlib.import_module("kernels.cpu.instruction_set").instruction_set())


def has_cpu_kernels() -> bool:
    """Return whether C++ multiplies matrices on the CPU, without compiling."""
    return cpu_kernels().startswith("C++")


def cpu_kernels() -> str:
    """Describe the CPU's kernels and the choice among them, without compiling or measuring."""
    build, choice = (importlib.import_module(f"kernels.cpu.{name}") for name in ("build", "choice"))
    if choice.mode() == "pytorch":
        return "PyTorch"
    name = cpu_instruction_set()
    if not build.is_built(name):
        return "C++, not compiled yet" if build.find_compiler() else "PyTorch (no C++ compiler is installed)"
    kept = build.path(build.cache_folder(), name)
    choices = choice.Choices.read(kept.with_suffix(".json"))
    return "C++, not measured yet" if choices is None else f"C++, {choices.describe()}"


def choose_kernels(device: torch.device, compiling: Callable[[int, int], None]) -> None:
    """Choose the faster of several kernels where that is measured: on a CPU, at its first start.

    `compiling(done, total)` is called with the number of compiled files, if kernels are compiled for that.
    """
    if device.type == "cpu":
        importlib.import_module("kernels.cpu.measure").choose(compiling)


def num_threads(device: torch.device) -> int:
    """Return the number of CPU threads that compute on a device; 0 for devices other than the CPU."""
    if device.type != "cpu":
        return 0
    native = importlib.import_module("kernels.cpu.library").library()
    return int(native.num_threads) if native is not None else torch.get_num_threads()


def compile_processes(num: int) -> AbstractContextManager[Any]:
    """See `kernels.cuda.compile_processes.CompileProcesses`. Needs Triton."""
    context: AbstractContextManager[Any] = importlib.import_module("kernels.cuda.compile_processes").CompileProcesses(
        num
    )
    return context


def compiling_only(processes: Any = None) -> AbstractContextManager[None]:
    """See `kernels.cuda.compile_processes.compiling_only`. Needs Triton."""
    context: AbstractContextManager[None] = importlib.import_module("kernels.cuda.compile_processes").compiling_only(
        processes
    )
    return context
