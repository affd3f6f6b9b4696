"""Plans how a model runs on GPUs, from its config.json alone: weight bytes, KV cache capacity, maximum decode speed.

Weights and KV blocks are counted exactly as the engine allocates them. Only the memory of activations is estimated.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flags import parse_size
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.hub import resolve_model
from engine.models.quantization import choose_quantization
from engine.models.shard import SINGLE, Shard
from engine.models.spec import DenseSpec, LatentSpec, ModelSpec, MoESpec
from engine.models.weights import bytes_of_parts, decoder_of_shapes
from engine.options import runner_options
from engine.worker.attention.fp8_prefill import scratch_bytes, upcast_layers
from engine.worker.attention.latent import MOST_POSITIONS, can_expand, expanded_width
from engine.worker.cuda_graphs import graph_sizes
from engine.worker.device import CpuDevice, CudaDevice, Memory
from engine.worker.kv_cache import KVCacheLayout, KVCacheTooSmallError, blocks_asked_for, blocks_that_fit
from engine.worker.options import RunnerOptions

CONTEXT_BYTES = 600 << 20  # memory of CUDA and loaded kernels, outside of PyTorch's
COMPRESSED = 0.755  # of the bytes of bfloat16 experts: codes of 12 bits, scales and lists of small weights


@dataclass(frozen=True, slots=True)
class GPU:
    """The specification of a GPU."""

    title: str
    memory: int  # bytes
    capability: tuple[int, int]
    bandwidth: float = 0.0  # bytes per second; 0: not known
    flops: float = 0.0  # per second, dense bfloat16; 0: not known

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9)


def _gpu(title: str, mebibytes: int, capability: tuple[int, int], terabytes: float, teraflops: float) -> GPU:
    return GPU(f"NVIDIA {title}", mebibytes << 20, capability, terabytes * 1e12, teraflops * 1e12)


GPUS: Mapping[str, GPU] = {
    "b200": _gpu("B200", 182642, (10, 0), 8.0, 2250),
    "h200": _gpu("H200", 143156, (9, 0), 4.8, 989),
    "h100": _gpu("H100 80GB", 81079, (9, 0), 3.35, 989),
    "a100": _gpu("A100 80GB", 81154, (8, 0), 2.04, 312),
    "a100-40gb": _gpu("A100 40GB", 40442, (8, 0), 1.56, 312),
    "l40s": _gpu("L40S", 45589, (8, 9), 0.864, 362),
    "l4": _gpu("L4", 22563, (8, 9), 0.3, 121),
    "a10": _gpu("A10", 22515, (8, 6), 0.6, 125),
    "5090": _gpu("RTX 5090", 32109, (12, 0), 1.79, 210),
    "4090": _gpu("RTX 4090", 24077, (8, 9), 1.01, 165),
    "3090": _gpu("RTX 3090", 24135, (8, 6), 0.936, 71),
}


def find_gpu(name: str) -> GPU:
    """Find a GPU by name, or create one by memory size, such as "24GB". Raises `ConfigError` with the valid names."""
    if (gpu := GPUS.get(name.lower())) is not None:
        return gpu
    try:
        memory = parse_size(name.upper().removesuffix("IB").removesuffix("B"))
    except ValueError:
        raise ConfigError(f"gpu must be one of {', '.join(GPUS)}, or a size such as 24GB, got {name!r}") from None
    return GPU(f"a GPU of {memory / 2**30:g} GiB", memory, (8, 9))


def gpu_here() -> GPU | None:
    """Return this machine's GPU, None if it has none."""
    if not CudaDevice.is_available():
        return None
    device = CudaDevice.current()
    words, memory = re.split(r"[ -]", device.name.lower()), device.memory().total
    alike = [gpu for name, gpu in GPUS.items() if name.partition("-")[0] in words]
    known = min(alike, key=lambda gpu: abs(gpu.memory - memory), default=None)
    rates = (known.bandwidth, known.flops) if known is not None else (0.0, 0.0)
    return GPU(device.name, memory, device.capability, *rates)


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
    def capability(self) -> tuple[int, int]:  # type: ignore[override]
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
        return self.num_parameters - embedding - experts + round(experts * self._used_experts(1))

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

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
        return self.num_blocks / most

    def kv_bytes(self, context: int) -> int:
        """Return the bytes that a step reads of the KV cache for a request of `context` tokens."""
        mixers = [layer.mixer for layer in self.part.layers]
        seen = sum((min(context, m.window) if m.window else context) * math.prod(m.cached) for m in mixers)
        return seen * self.options.kv_dtype.itemsize

    def tokens_per_second(self, num_requests: int, context: int) -> float:
        """Return an upper bound of decode throughput over all requests; 0: the GPU's speed is not known.

        A step takes at least the time to read its bytes and the time to compute its GEMMs. All else is ignored.
        """
        if not self.gpu.bandwidth:
            return 0.0
        idle = self.weights["experts"] * (1 - self._used_experts(num_requests))
        idle += self.weights["tables"] + (0 if self.spec.tie_word_embeddings else self.weights["embedding"])
        read = self.weight_bytes - idle + self.kv_bytes(context) * num_requests
        schemes = self.spec.quantization.schemes if self.spec.quantization else ()
        in_8_bits = self.gpu.has_fp8 and any(scheme.activations for _, scheme in schemes)
        flops = 2 * self.num_active / self.options.num_ranks_per_stage * num_requests
        by_gemms = flops / (self.gpu.flops * (2 if in_8_bits else 1))
        return num_requests / max(read / self.gpu.bandwidth, by_gemms)

    def _used_experts(self, num_tokens: int) -> float:
        """Return the fraction of all experts that `num_tokens` tokens use, assuming even routing."""
        of_all = [
            1 - (1 - mlp.router.num_chosen / mlp.num_experts) ** num_tokens
            for mlp in (layer.mlp for layer in self.spec.layers)
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
    options = runner_options(config, spec, offline, PlannedDevice(gpu))
    _, whole = _weight_bytes(replace(spec, quantization=None), options.dtype, folder, SINGLE)
    own, by_part = _weight_bytes(spec, options.dtype, folder, Shard(0, options.num_ranks_per_stage))
    layout, weights = KVCacheLayout.of_model(own, options), dict(by_part)
    buffers = _buffer_bytes(own, options, len(layout.groups))
    activations = _activation_bytes(own, layout, options)
    if _compresses(own, options):
        num_mixtures = sum(isinstance(layer.mlp, MoESpec) for layer in own.layers)
        activations += weights["experts"] // num_mixtures  # a large step decompresses a layer's
        weights["experts"] = round(weights["experts"] * COMPRESSED)
    if (asked_for := blocks_asked_for(layout, options)) is not None:
        num_blocks, _ = asked_for
    else:
        held = sum(weights.values()) + buffers + activations
        memory = Memory(gpu.memory, gpu.memory - CONTEXT_BYTES - held, used=held, peak=held)
        num_blocks = blocks_that_fit(layout, memory, options)
    parameters = {part: size // options.dtype.itemsize for part, size in whole.items()}
    return Plan(gpu, spec, options, own, layout, parameters, weights, buffers, activations, num_blocks)


@functools.lru_cache(maxsize=16)
def _weight_bytes(
    spec: ModelSpec, dtype: torch.dtype, folder: Path, shard: Shard
) -> tuple[ModelSpec, Mapping[str, int]]:
    """Return a rank's part of the specification, and `bytes_of_parts`. Kept for other plans of the model: it takes
    seconds.
    """
    decoder = decoder_of_shapes(spec, dtype, folder, shard)
    return decoder.spec, bytes_of_parts(decoder)


def on_all_gpus(config: EngineConfig) -> Iterator[Plan]:
    """Yield a plan for each known GPU type, with 1, 2, 4 or 8 GPUs as needed. Raises `ModelError`."""
    folder, _ = _read_model(config)
    config = replace(config, model=str(folder))
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
    """Return the model's folder, downloaded without weights, and its specification with the configured quantization."""
    folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir, weights=False)
    spec = read_spec(folder, config.hf_overrides)
    return folder, replace(spec, quantization=choose_quantization(spec.quantization, config.quantization))


def _compresses(spec: ModelSpec, options: RunnerOptions) -> bool:
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    return options.compress_experts and spec.quantization is None and any(not mlp.bias for mlp in mixtures)


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
        heads = 2 * (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
        if isinstance(mixer, LatentSpec) and can_expand(mixer):
            heads = max(heads, MOST_POSITIONS * expanded_width(mixer))
        widest = max(widest, heads + scratch, _mlp_width(layer.mlp, spec.hidden_size))
    hidden = options.max_num_batched_tokens * size * (2 * spec.hidden_size + widest)
    logits = options.max_num_seqs * spec.vocab_size * (size + 4)
    return max(hidden, logits)


def _mlp_width(mlp: DenseSpec | MoESpec, hidden_size: int) -> int:
    """Return how many numbers per token all intermediate results of an MLP have."""
    if isinstance(mlp, DenseSpec):
        return mlp.intermediate_size * (3 if mlp.gated else 2)
    shared = _mlp_width(mlp.shared, hidden_size) if mlp.shared else 0
    return mlp.router.num_chosen * (3 * mlp.intermediate_size + hidden_size) + shared


def alternatives(config: EngineConfig, gpu: GPU) -> Iterator[tuple[str, Plan]]:
    """Yield flags that reduce memory use, each with the resulting plan."""
    changes: list[tuple[str, dict[str, object]]] = []
    if config.kv_cache_dtype == "auto" and gpu.has_fp8:
        changes.append(("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}))
    if config.quantization is None:
        changes.append(("--quantization fp8", {"quantization": "fp8"}))
    if not config.compress_experts:
        changes.append(("--compress-experts", {"compress_experts": True}))
    for size in (2, 4, 8):
        if size > config.tensor_parallel_size:
            changes.append((f"--tensor-parallel-size {size}", {"tensor_parallel_size": size}))
    for flags, change in changes:
        try:
            plan = make_plan(replace(config, **change), gpu)  # type: ignore[arg-type]
        except (ModelError, ConfigError):  # the checkpoint is quantised, or cannot be divided, or caches latents
            continue
        if plan.options.compress_experts == config.compress_experts or plan.compresses:
            yield flags, plan
