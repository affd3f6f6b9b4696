"""The engine's settings: name, type, range, default and help of each, declared once."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.flags import check, flag

QUANTIZATIONS = ("fp8", "int8", "int4", "awq", "gptq", "compressed-tensors", "fbgemm_fp8", "modelopt")
MAX_OVERRIDES = 1 << 16  # characters


@dataclass(frozen=True)
class EngineConfig:
    """Model and engine.

    `ConfigError` when a value is out of range. A setting of `None` is chosen from the model and the device at start-up.
    """

    model: str = flag("", "folder with the model's files, or a Hugging Face id", metavar="MODEL", common=True)
    tokenizer: str | None = flag(
        None, "folder or Hugging Face id of the tokenizer, when not the model's", metavar="MODEL"
    )
    skip_tokenizer_init: bool = flag(False, "load no tokenizer: prompts are token ids, and so are the answers")
    revision: str | None = flag(None, "branch, tag or commit of a Hugging Face model", metavar="NAME")
    download_dir: str | None = flag(None, "where downloads are kept (else Hugging Face's cache)", metavar="FOLDER")
    load_format: str = flag(
        "auto",
        "auto and safetensors: read the weights; dummy: random weights, for benchmarks",
        choices=("auto", "safetensors", "dummy"),
    )
    served_model_name: tuple[str, ...] = flag((), "names that clients call the model by", metavar="NAME", common=True)
    generation_config: str = flag(
        "auto",
        "sampling defaults: auto takes the model's generation_config.json, vllm takes none, else a folder that has one",
        metavar="auto|vllm|FOLDER",
    )
    hf_overrides: dict[str, Any] | None = flag(  # noqa: RUF009
        None,
        "merged over config.json, nested objects key by key, such as '{\"max_position_embeddings\": 65536}'",
        metavar="JSON",
    )
    dtype: str = flag(
        "auto",
        "of weights and activations; auto: the checkpoint's on a GPU (float32 becomes bfloat16); on a CPU that multiplies "
        "bfloat16, that (float32 stays), else float32",
        choices=("auto", "float32", "float16", "bfloat16", "float", "half"),
        common=True,
    )
    quantization: str | None = flag(
        None,
        "of the weights: fp8, int8 and int4 round those of a float checkpoint while loading; a quantised one says itself",
        short="-q",
        choices=QUANTIZATIONS,
        common=True,
    )
    device: str = flag("auto", "auto: a GPU when there is one", choices=("auto", "cpu", "cuda"))
    seed: int = flag(
        0, "of the sampling of requests that bring no seed, and of dummy weights", at_least=0, at_most=2**63 - 1
    )

    max_model_len: int | None = flag(
        None,
        "most tokens of prompt and answer together; 32k is 32,000 (else auto: the model's own, or what the KV cache holds)",
        size=True,
        at_least=2,
        common=True,
    )
    max_num_seqs: int | None = flag(
        None,
        "most requests that run at once (else 1024 on a GPU of 64 GiB or more, 256 elsewhere)",
        at_least=1,
        at_most=65536,
        common=True,
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "most tokens computed in one step (else 8192 when serving and 16384 offline on a GPU, 2048 on a CPU)",
        size=True,
        at_least=1,
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV cache of prompts that begin alike")
    prefix_cache_file: str | None = flag(
        None,
        "where the prefix cache is kept when the engine stops, and saved when it is idle: prompts can be derived from it",
        metavar="FILE",
    )
    prefix_cache_file_size: int = flag(
        16 << 30,
        "bytes that file may grow to, such as 16GiB, the default; blocks not used for longest give way",
        size=True,
        at_least=1,
    )

    tensor_parallel_size: int = flag(
        1,
        "GPUs that hold the model together, of this machine or of a Ray cluster; on a CPU, processes",
        short="-tp",
        at_least=1,
        at_most=64,
        common=True,
    )
    pipeline_parallel_size: int = flag(
        1,
        "stages of successive layers, each on GPUs of its own: for machines whose network is too slow to divide layers",
        short="-pp",
        at_least=1,
        at_most=64,
    )
    distributed_executor_backend: str = flag(
        "mp",
        "where these GPUs are: mp, in this machine; ray, in this machine and others of its Ray cluster",
        choices=("mp", "ray"),
    )
    data_parallel_size: int = flag(
        1,
        "replicas of the model, each on GPUs of its own; a request goes where most of its prefix is cached",
        short="-dp",
        at_least=1,
        at_most=1024,
    )
    gpu_memory_utilization: float = flag(0.92, "share of the GPU's memory to use", above=0, at_most=1, common=True)
    kv_cache_memory_bytes: int | None = flag(None, "size of the KV cache, such as 4GiB", size=True, at_least=1)
    num_gpu_blocks_override: int | None = flag(None, "number of KV cache blocks, on any device", at_least=1)
    block_size: int = flag(16, "tokens in a KV cache block, a power of two", at_least=1, at_most=256)
    kv_cache_dtype: str = flag(
        "auto",
        "of the KV cache; fp8 (float8_e4m3) holds twice the tokens of bfloat16 in the same memory; auto: as dtype",
        choices=("auto", "fp8", "fp8_e4m3"),
        common=True,
    )
    calculate_kv_scales: bool = flag(
        False,
        "scale an fp8 KV cache, head by head, by what random tokens show at start-up (else as the checkpoint says)",
    )
    enforce_eager: bool = flag(False, "no CUDA graphs: slower steps, shorter start-up")

    pooling: str = flag(
        "auto",
        "what makes embeddings: mean, of all tokens, or the last one; auto: as the model's 1_Pooling says, else last",
        choices=("auto", "last", "mean"),
    )
    stream_interval: int = flag(
        1,
        "tokens of an answer that are streamed at a time, after the first one; more spare the server work",
        at_least=1,
    )
    max_logprobs: int = flag(
        20, "most log-probabilities that a request may ask for at a position", at_least=0, at_most=20
    )
    engine_restarts: int = flag(
        5,
        "how often in ten minutes an engine process that died or hangs is started again; then the server ends",
        at_least=0,
    )
    engine_watchdog_timeout: float = flag(
        120.0,
        "seconds without a sign of life (in its start: without using the CPU) after which the engine process is taken to "
        "hang; 0: never",
        at_least=0,
    )
    expert_load_interval: int = flag(
        0,
        "count the tokens of each expert in every N-th step that computes prompts, for /metrics; 0: never. Steps of decodes "
        "alone, and with them CUDA graphs, stay as they are",
        metavar="N",
        at_least=0,
    )
    disable_log_stats: bool = flag(False, "no statistics line every ten seconds, no timings with offline results")
    debug_checks: bool = flag(False, "verify the scheduler's bookkeeping after every step: slow, to find bugs")

    def __post_init__(self) -> None:
        check(self)
        if not self.model:
            raise ConfigError("model is missing: name a folder with a model's files, or a Hugging Face id")
        if self.hf_overrides is not None:
            object.__setattr__(self, "hf_overrides", _as_json(self.hf_overrides))
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        if self.prefix_cache_file is not None and not self.enable_prefix_caching:
            raise ConfigError("prefix_cache_file needs enable_prefix_caching")
        if self.distributed_executor_backend == "ray":
            if self.num_ranks == 1:
                raise ConfigError("distributed_executor_backend ray needs tensor_parallel_size above 1, got 1")
            if importlib.util.find_spec("ray") is None:
                raise ConfigError("distributed_executor_backend ray needs Ray: pip install 'quire[ray]'")
        if self.expert_load_interval and self.pipeline_parallel_size > 1:
            raise ConfigError(
                "expert_load_interval needs pipeline_parallel_size 1: a stage counts its own layers alone"
            )
        if self.calculate_kv_scales and self.kv_cache_dtype == "auto":
            raise ConfigError("calculate_kv_scales needs kv_cache_dtype fp8, got 'auto'")
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError("kv_cache_memory_bytes and num_gpu_blocks_override both size the KV cache: give one")

    @property
    def num_ranks(self) -> int:
        """GPUs that hold the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def _as_json(overrides: dict[str, Any]) -> dict[str, Any]:
    """The object as JSON and the engine process read it. `ConfigError` when they cannot, or when it is too large."""
    try:
        text = json.dumps(overrides)
        found: dict[str, Any] = json.loads(text)
        msgspec.msgpack.encode(found)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"hf_overrides must be a JSON object ({error})") from None
    if len(text) > MAX_OVERRIDES:
        raise ConfigError(f"hf_overrides must be at most {MAX_OVERRIDES} characters, got {len(text)}")
    return found
