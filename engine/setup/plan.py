"""Plans how a model runs on GPUs, from its config.json alone: weight bytes, KV cache capacity, maximum decode speed.

Weights and KV blocks are counted exactly as the engine allocates them. Only the memory of activations is estimated.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.adapters import AdapterLayout
from engine.models.drafters.loading import drafter_bytes
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.hub import resolve_model
from engine.models.indexer import SCORE_BYTES, SCORES
from engine.models.recurrent_spec import RecurrentSpec
from engine.models.shard import SINGLE, Shard
from engine.models.spec import DenseSpec, LatentSpec, ModelSpec, MoESpec
from engine.models.weights import bytes_of_parts, decoder_of_shapes
from engine.setup.drafter import with_drafter
from engine.setup.gpu_specs import GPU, GPUS, known_gpu
from engine.setup.options import quantization_in_memory, runner_options
from engine.worker.attention.fp8_prefill import scratch_bytes, upcast_layers
from engine.worker.attention.latent import MOST_POSITIONS, can_expand, expanded_width
from engine.worker.block_store.host_blocks import staging_bytes
from engine.worker.cuda_graphs import graph_sizes
from engine.worker.device import CpuDevice, CudaDevice, Memory
from engine.worker.images import image_bytes
from engine.worker.kv_cache import (
    KVCacheLayout,
    KVCacheTooSmallError,
    blocks_asked_for,
    blocks_that_fit,
    encoder_blocks,
)
from engine.worker.options import RunnerOptions
from engine.worker.parallel.cores import num_cores
from engine.worker.state_cache import STATES_PER_REQUEST

CONTEXT_BYTES = 600 << 20  # memory of CUDA and loaded kernels, outside of PyTorch's
# What a step takes at least, whatever its bytes. All measured steps take twice as much (tests/engine/setup).
STEP_SECONDS = 100e-6  # for sampling, and for the launch
LAYER_SECONDS = 10e-6  # for about six kernels that wait for each other
SUM_SECONDS = 2.5e-6  # for each of a layer's two sums over ranks
REQUEST_SECONDS = 2e-6  # for the work of the host on a token
COMPRESSED = 0.755  # of the bytes of bfloat16 experts: codes of 12 bits, scales and lists of small weights


def gpu_here() -> GPU | None:
    """Return this machine's GPU, None if it has none."""
    if not CudaDevice.is_available():
        return None
    device = CudaDevice.current()
    memory = device.memory().total
    known = known_gpu(device.name, memory)
    rates = (known.bandwidth, known.flops) if known is not None else (0.0, 0.0)
    return GPU(device.name, memory, device.capability, *rates)


def cpu_here() -> GPU:
    """Return this machine's CPU, whose speed `make_plan` measures."""
    cores = num_cores()
    return GPU(f"this machine's CPU, {cores} core{'s' * (cores > 1)}", CpuDevice().memory().total, None)


def _measured(cpu: GPU, num_bytes: int, dtype: torch.dtype) -> GPU:
    """Return the CPU with the speed of this moment, in sums over `num_bytes` and in GEMMs.

    The better of all threads and one: on a busy machine, threads wait for the one that got no core.
    """
    words = torch.ones(min(max(num_bytes, 1 << 20), 256 << 20) // 4)
    rows, weights = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    seconds, num_threads = [], torch.get_num_threads()
    for size in {num_threads, 1}:
        torch.set_num_threads(size)
        seconds.append((_fastest(words.sum), _fastest(lambda: rows @ weights)))
    torch.set_num_threads(num_threads)
    sum_seconds, gemm_seconds = map(min, zip(*seconds, strict=True))
    return replace(cpu, bandwidth=words.nbytes / sum_seconds, flops=2 * rows.numel() * 1024 / gemm_seconds)


def _fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several runs."""
    found: list[float] = []
    end = time.perf_counter() + 0.2
    while len(found) < 3 or (len(found) < 50 and time.perf_counter() < end):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


@dataclass(frozen=True, slots=True)
class PlannedDevice(CpuDevice):
    """A GPU that need not be present. Its tensors have shapes but no memory."""

    gpu: GPU

    torch_device = torch.device("meta")
    is_accelerator = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.gpu.title

    @property
    def capability(self) -> tuple[int, int] | None:  # type: ignore[override]
        return self.gpu.capability

    @property
    def supports_fp8_cache(self) -> bool:  # type: ignore[override]
        return self.gpu.has_fp8

    def memory(self) -> Memory:
        return Memory(self.gpu.memory, self.gpu.memory - CONTEXT_BYTES, used=0, peak=0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on `options.num_ranks_per_stage` GPUs. All sizes in bytes are per GPU."""

    gpu: GPU
    spec: ModelSpec  # of the whole model
    options: RunnerOptions
    part: ModelSpec  # the part of one GPU
    layout: KVCacheLayout  # of the KV cache of one GPU
    parameters: Mapping[str, int]  # component of the whole model → number of parameters
    weights: Mapping[str, int]  # component → bytes
    buffers: int  # bytes of the runner's buffers
    activations: int  # estimated peak of the largest step, in bytes
    num_blocks: int  # of the KV cache
    num_states: int = 0  # blocks of states of recurrent layers
    adapters: int = 0  # bytes of the slots of LoRA adapters
    drafter: int = 0  # bytes of a drafter's weights

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def compresses(self) -> bool:
        """Return whether there are experts that `compress_experts` compresses."""
        return _compresses(self.part, self.options)

    @property
    def num_active(self) -> int:
        """The number of parameters active for each token."""
        tied, experts = self.spec.tie_word_embeddings, self.parameters["experts"]
        embedding = self.parameters["tables"] + (0 if tied else self.parameters["embedding"])
        other = embedding + self.parameters["vision"]
        return self.num_parameters - other - experts + round(experts * self._used_experts(1))

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.layout.memory_of_block + self.num_states * self.layout.state_bytes

    @property
    def max_model_len(self) -> int:
        """The context length that the engine would start with; 0: it would not start."""
        try:
            return self.layout.context_that_fits(self.num_blocks, self.options)
        except KVCacheTooSmallError:
            return 0

    def num_requests(self, context: int) -> float:
        """Return how many requests of `context` tokens the KV cache holds at once."""
        most = self.layout.most_blocks(context, self.options.max_num_batched_tokens)
        return min(self.num_blocks / most, self.most_by_states if self.num_states else math.inf)

    @property
    def most_by_states(self) -> int:
        """The number of requests for which there are states."""
        return int(self.num_states / STATES_PER_REQUEST)

    def kv_bytes(self, context: int) -> int:
        """Return the bytes that a step reads of the KV cache for a request of `context` tokens."""
        mixers = [m for layer in self.part.layers if not isinstance(m := layer.mixer, RecurrentSpec)]
        seen = sum((min(context, m.window) if m.window else context) * math.prod(m.cached) for m in mixers)
        return seen * self.options.kv_dtype.itemsize

    def tokens_per_second(self, num_requests: int, context: int) -> float:
        """Return an upper bound of decode throughput over all requests; 0: the GPU's speed is not known. Of an encoder
        it is that of texts.

        A step takes at least the time to read its bytes, or to compute its GEMMs if that is longer, and the time of its
        launches. All else is ignored.
        """
        if not self.gpu.bandwidth:
            return 0.0
        of_layer = LAYER_SECONDS + (2 * SUM_SECONDS if self.options.num_ranks_per_stage > 1 else 0)
        overhead = STEP_SECONDS + self.spec.num_layers * of_layer + num_requests * REQUEST_SECONDS
        by_bytes = self.bytes_read(num_requests, context) / self.gpu.bandwidth
        num_tokens = num_requests * (context if self.spec.is_encoder else 1)
        return num_tokens / (max(by_bytes, self._gemm_seconds(num_tokens)) + overhead)

    def bytes_read(self, num_requests: int, context: int) -> float:
        """Return the bytes that a GPU reads in a decode step of such requests."""
        idle = self.weights["experts"] * (1 - self._used_experts(num_requests))
        idle += (
            self.weights["tables"]
            + self.weights["vision"]
            + (0 if self.spec.tie_word_embeddings else self.weights["embedding"])
        )
        of_request = self.kv_bytes(context) + self.layout.state_bytes
        return self.weight_bytes - idle + of_request * num_requests

    def _gemm_seconds(self, num_tokens: int) -> float:
        schemes = self.spec.quantization.schemes if self.spec.quantization else ()
        in_8_bits = self.gpu.has_fp8 and any(scheme.activations for _, scheme in schemes)
        flops = 2 * self.num_active / self.options.num_ranks_per_stage * num_tokens
        return flops / (self.gpu.flops * (2 if in_8_bits else 1))

    def _used_experts(self, num_tokens: int) -> float:
        """Return the fraction of all experts that `num_tokens` tokens use, assuming even routing."""
        of_all = [
            1 - (1 - mlp.router.num_chosen / mlp.num_experts) ** num_tokens
            for mlp in (mlp for layer in self.spec.layers for mlp in layer.mlps)
            if isinstance(mlp, MoESpec)
        ]
        return sum(of_all) / max(len(of_all), 1)


def make_plan(config: EngineConfig, gpu: GPU, *, offline: bool = False) -> Plan:
    """Plan an engine of this configuration on such GPUs. Neither reads nor downloads weights.

    Raises `ModelError` and `ConfigError`.
    """
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            "a plan covers one pipeline stage: leave out pipeline_parallel_size, divide the weights by it"
        )
    folder, spec = _read_model(config)
    device = CpuDevice() if gpu.is_cpu else PlannedDevice(gpu)
    spec = replace(spec, quantization=quantization_in_memory(spec, config, device))
    options = with_drafter(runner_options(config, spec, offline, device), config, spec, weights=False)
    capability = _capability(options)
    _, whole = _weight_bytes(replace(spec, quantization=None), options.dtype, folder, SINGLE, capability)
    own, by_part = _weight_bytes(spec, options.dtype, folder, Shard(0, options.num_ranks_per_stage), capability)
    layout, weights = KVCacheLayout.of_model(own, options), dict(by_part)
    buffers = _buffer_bytes(own, options, len(layout.groups))
    activations = _activation_bytes(own, layout, options)
    if spec.vision is not None:
        kept, encoding = image_bytes(spec.vision, spec.hidden_size, options.dtype.itemsize)
        activations = max(activations, encoding) + kept
    if _compresses(own, options):
        num_moe_layers = sum(isinstance(layer.mlp, MoESpec) for layer in own.layers)
        activations += weights["experts"] // num_moe_layers  # a large step decompresses a layer's
        weights["experts"] = round(weights["experts"] * COMPRESSED)
    adapters = _adapter_bytes(spec, options, folder)
    drafter = _drafter_bytes(spec, options, folder)
    buffers += staging_bytes(layout.pool_bytes()) if options.host_cache_bytes else 0
    held = sum(weights.values()) + buffers + activations + adapters + drafter
    if gpu.is_cpu:
        gpu = _measured(gpu, sum(weights.values()), options.dtype)
    if (asked_for := blocks_asked_for(layout, options)) is not None:
        (num_blocks, num_states), _ = asked_for
    elif spec.is_encoder:
        num_blocks, num_states = encoder_blocks(options), 0
    elif gpu.is_cpu:
        num_bytes, _ = layout.cpu_cache_bytes(options, options.device.memory().free - held)
        num_blocks, num_states = layout.divided(num_bytes, options)
    else:
        memory = Memory(gpu.memory, gpu.memory - CONTEXT_BYTES - held, used=held, peak=held)
        num_blocks, num_states = blocks_that_fit(layout, memory, options)
    parameters = {part: size // options.dtype.itemsize for part, size in whole.items()}
    counts = num_blocks, num_states, adapters, drafter
    return Plan(gpu, spec, options, own, layout, parameters, weights, buffers, activations, *counts)


@functools.lru_cache(maxsize=16)
def _weight_bytes(
    spec: ModelSpec, dtype: torch.dtype, folder: Path, shard: Shard, capability: tuple[int, int] | None
) -> tuple[ModelSpec, Mapping[str, int]]:
    """Return a rank's part of the specification, and `bytes_of_parts`. Kept for other plans of the model: it takes
    seconds.
    """
    decoder = decoder_of_shapes(spec, dtype, folder, shard)
    return decoder.spec, bytes_of_parts(decoder, capability)


def _capability(options: RunnerOptions) -> tuple[int, int] | None:
    """Return the compute capability for which weights are packed; None: no GPU."""
    own = options.device.capability
    return (0, 0) if own is not None and options.deterministic else own  # as on all GPUs


def _adapter_bytes(spec: ModelSpec, options: RunnerOptions, folder: Path) -> int:
    """Return the bytes of all slots of LoRA adapters on a rank."""
    if options.adapters is None:
        return 0
    decoder = decoder_of_shapes(spec, options.dtype, folder, Shard(0, options.num_ranks_per_stage))
    own = options.adapters
    layout = AdapterLayout(decoder, spec, own.max_rank, options.dtype, own.experts, own.max_tokens)
    return own.num_slots * layout.slot_bytes


def _drafter_bytes(spec: ModelSpec, options: RunnerOptions, folder: Path) -> int:
    """Return the bytes of a drafter's weights on a rank."""
    if options.drafter is None:
        return 0
    shard = Shard(0, options.num_ranks_per_stage)
    target = decoder_of_shapes(spec, options.dtype, folder, shard)
    return drafter_bytes(options.drafter, target, spec, options.dtype, shard, _capability(options))


def on_all_devices(config: EngineConfig) -> Iterator[Plan]:
    """Yield a plan for this machine's CPU and each known GPU type, with 1, 2, 4 or 8 GPUs as needed.

    Raises `ModelError`.
    """
    folder, spec = _read_model(config)
    quantization_in_memory(spec, config, CpuDevice())  # raises if that is wrong on all devices
    config = replace(config, model=str(folder))
    with contextlib.suppress(ModelError, ConfigError):  # the CPU does not support a format
        yield make_plan(config, cpu_here())
    for gpu in GPUS.values():
        for size in (1, 2, 4, 8):
            try:
                plan = make_plan(replace(config, tensor_parallel_size=size), gpu)
            except (ModelError, ConfigError):  # the model cannot be divided so, or the GPU does not support a format
                continue
            if plan.max_model_len:
                yield plan
                break


def _read_model(config: EngineConfig) -> tuple[Path, ModelSpec]:
    """Return the model's folder, downloaded without weights, and its specification."""
    folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir, weights=False)
    return folder, read_spec(folder, config.hf_overrides)


def _compresses(spec: ModelSpec, options: RunnerOptions) -> bool:
    moe_layers = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    return (
        options.compress_experts
        and spec.quantization is None
        and any(not mlp.bias and mlp.activation != "relu2" for mlp in moe_layers)
    )


def _buffer_bytes(spec: ModelSpec, options: RunnerOptions, num_groups: int) -> int:
    """Return the bytes of logits in CUDA graphs (all, and with several ranks one's own), block and rotary tables."""
    num_ranks = options.num_ranks_per_stage
    columns = spec.vocab_size + (Shard(0, num_ranks).padded_span(spec.vocab_size)[1] if num_ranks > 1 else 0)
    logits = graph_sizes(options.max_num_seqs)[-1] * columns * options.dtype.itemsize
    max_blocks = -(-options.max_model_len // options.block_size)
    tables = 4 * (options.max_num_seqs + 1) * num_groups * max_blocks
    dims = {layer.mixer.rope: layer.mixer.rope.rotary_dim for layer in spec.layers if layer.mixer.rope}
    return logits + tables + 4 * options.max_model_len * sum(dims.values())


def _activation_bytes(spec: ModelSpec, layout: KVCacheLayout, options: RunnerOptions) -> int:
    """Estimate the activations of the largest step: hidden states and widest layer, or logits and their copies."""
    size, widest = options.dtype.itemsize, 0
    # Per token, as the widths are.
    scratch = scratch_bytes(upcast_layers(spec, layout, options)) // (size * options.max_num_batched_tokens)
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, RecurrentSpec):
            heads = mixer.width
        else:
            heads = 2 * (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
        if isinstance(mixer, LatentSpec) and can_expand(mixer):
            heads = max(heads, MOST_POSITIONS * expanded_width(mixer))
        widest = max(widest, heads + scratch, *(_mlp_width(mlp, spec.hidden_size) for mlp in layer.mlps))
    streams = 1 if spec.altup is None else 3 * spec.altup.num_streams  # predicted and corrected ones, too
    hidden = options.max_num_batched_tokens * size * (2 * streams * spec.hidden_size + widest)
    logits = options.max_num_seqs * spec.vocab_size * (size + 4)
    return max(hidden + _choice_bytes(spec, options), logits)


def _choice_bytes(spec: ModelSpec, options: RunnerOptions) -> int:
    """Estimate what the choice of tokens by an indexer takes: queries and chosen slots of all tokens, and scores."""
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, LatentSpec)]
    index = next((mixer.index for mixer in mixers if mixer.index is not None), None)
    if index is None or options.max_model_len <= index.top_k:
        return 0
    width = index.num_heads * index.head_dim * options.dtype.itemsize + 4 * index.top_k
    scores = min(SCORES, options.max_num_batched_tokens * options.max_model_len)
    return options.max_num_batched_tokens * width + scores * SCORE_BYTES


def _mlp_width(mlp: DenseSpec | MoESpec | None, hidden_size: int) -> int:
    """Return how many numbers per token all intermediate results of an MLP have."""
    if mlp is None:
        return 0
    if isinstance(mlp, DenseSpec):
        return mlp.intermediate_size * (3 if mlp.gated else 2)
    shared = _mlp_width(mlp.shared, hidden_size) if mlp.shared else 0
    return mlp.router.num_chosen * (3 * mlp.intermediate_size + hidden_size) + shared


def alternatives(config: EngineConfig, gpu: GPU) -> Iterator[tuple[str, Plan]]:
    """Yield flags that reduce memory use, each with the resulting plan."""
    changes: list[tuple[str, dict[str, object]]] = []
    if config.kv_cache_dtype == "auto" and (gpu.has_fp8 or gpu.is_cpu):
        changes.append(("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}))
    if config.quantization is None:
        for method in ("int8", "int4") if gpu.is_cpu else ("fp8",):
            changes.append((f"--quantization {method}", {"quantization": method}))
    if not config.compress_experts:
        changes.append(("--compress-experts", {"compress_experts": True}))
    for size in () if gpu.is_cpu else (2, 4, 8):
        if size > config.tensor_parallel_size:
            changes.append((f"--tensor-parallel-size {size}", {"tensor_parallel_size": size}))
    for flags, change in changes:
        try:
            plan = make_plan(replace(config, **change), gpu)  # type: ignore[arg-type]
        except (ModelError, ConfigError):  # the checkpoint is quantised, or cannot be divided, or caches latents
            continue
        if plan.options.compress_experts == config.compress_experts or plan.compresses:
            yield flags, plan
