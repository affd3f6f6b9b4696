"""The engine's settings, each declared once with its name, type, range, default and help."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.core.kv.cache_groups import MAX_STATES
from engine.errors import ConfigError
from engine.flags import check, flag
from engine.setup.speculative import parse as parse_speculative_config

QUANTIZATIONS = ("fp8", "int8", "int4", "awq", "gptq", "compressed-tensors", "fbgemm_fp8", "modelopt")
CPU_LORAS = 4  # adapters in host memory for each that can run, by default
MAX_OVERRIDES = 1 << 16  # characters
MAX_IMAGES = 32  # of a prompt, by default
READS_IMAGES = "reads_images"  # see `engine.models.families.multimodal`


@dataclass(frozen=True)
class EngineConfig:
    """Model and engine.

    Raises `ConfigError` for a value out of range. A setting of `None` is chosen at start-up for the model and the
    device.
    """

    model: str = flag("", "folder with the model's files, .gguf file, or Hugging Face id", metavar="MODEL", common=True)
    tokenizer: str | None = flag(
        None, "folder or Hugging Face id of the tokenizer (default: the model's)", metavar="MODEL"
    )
    skip_tokenizer_init: bool = flag(False, "do not load a tokenizer: prompts and answers are token ids")
    revision: str | None = flag(None, "branch, tag or commit of a Hugging Face model", metavar="NAME")
    download_dir: str | None = flag(None, "folder for downloads (default: Hugging Face's cache)", metavar="FOLDER")
    load_format: str = flag(
        "auto",
        "auto, safetensors: load the checkpoint; dummy: use random weights, for benchmarks",
        choices=("auto", "safetensors", "dummy"),
    )
    weight_overlays: tuple[str, ...] = flag((), "folders of tensors that replace the model's", metavar="FOLDER")
    served_model_name: tuple[str, ...] = flag(
        (), "names under which the API serves the model", metavar="NAME", common=True
    )
    generation_config: str = flag(
        "auto",
        "source of sampling defaults: auto: the model's generation_config.json; vllm: none; or a folder with such a "
        "file",
        metavar="auto|vllm|FOLDER",
    )
    hf_overrides: dict[str, Any] | None = flag(  # noqa: RUF009
        None,
        "values that override config.json, nested objects key by key, such as '{\"max_position_embeddings\": 65536}'",
        metavar="JSON",
    )
    dtype: str = flag(
        "auto",
        "data type of weights and activations; auto on a GPU: the checkpoint's, but bfloat16 for float32; on a CPU: "
        "bfloat16 if the CPU multiplies it and the checkpoint is not float32, else float32",
        choices=("auto", "float32", "float16", "bfloat16", "float", "half"),
        common=True,
    )
    quantization: str | None = flag(
        None,
        "fp8, int8 or int4: quantise a float checkpoint at load time; the format of a quantised checkpoint is detected",
        short="-q",
        choices=QUANTIZATIONS,
        common=True,
    )
    device: str = flag("auto", "device to run on; auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    seed: int = flag(
        0, "random seed for dummy weights and for sampling in requests without a seed", at_least=0, at_most=2**63 - 1
    )

    max_model_len: int | None = flag(
        None,
        "maximum number of tokens of prompt and answer together; 32k is 32,000 (default: the model's context length, "
        "or what the KV cache holds)",
        size=True,
        at_least=2,
        common=True,
    )
    max_num_seqs: int | None = flag(
        None,
        "maximum number of requests that run at once (default: 1024 on a GPU with 64 GiB or more, otherwise 256)",
        at_least=1,
        at_most=65536,
        common=True,
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "maximum number of tokens computed in one step (default: 8192 on a GPU when serving, 16384 offline, with "
        "compress_experts 65536, or 262144 on one with 128 GiB or more; 2048 on a CPU)",
        size=True,
        at_least=1,
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV cache for prompts with a common prefix")
    prefix_cache_file: str | None = flag(
        None,
        "file below the KV cache: its blocks are saved there, and read when a prompt comes again, also after a "
        "restart; with several ranks, FILE.rank0, FILE.rank1 and so on, saved when idle and read at the start; prompts "
        "can be reconstructed from it",
        metavar="FILE",
    )
    prefix_cache_file_size: int = flag(
        16 << 30,
        "maximum size of the prefix cache file, or of each rank's, in bytes, such as 16GiB, the default; least "
        "recently used blocks are evicted",
        size=True,
        at_least=1,
    )

    tensor_parallel_size: int = flag(
        1,
        "number of GPUs to split each layer across, in this machine or a Ray cluster; on a CPU: number of processes",
        short="-tp",
        at_least=1,
        at_most=64,
        common=True,
    )
    pipeline_parallel_size: int = flag(
        1,
        "number of stages of successive layers, each on its own GPUs: for networks that are too slow for tensor "
        "parallelism",
        short="-pp",
        at_least=1,
        at_most=64,
    )
    distributed_executor_backend: str = flag(
        "mp",
        "mp: use the GPUs of this machine; ray: use the GPUs of all machines of its Ray cluster",
        choices=("mp", "ray"),
    )
    data_parallel_size: int = flag(
        1,
        "number of replicas, each on its own GPUs; requests are routed by cached prefix and load",
        short="-dp",
        at_least=1,
        at_most=1024,
    )
    gpu_memory_utilization: float = flag(0.92, "fraction of the GPU's memory to use", above=0, at_most=1, common=True)
    kv_offloading_size: float | None = flag(
        None,
        "host memory in GiB for what the KV cache evicts, for all ranks of a replica, from where it is copied back; "
        "0: none (default: on one GPU a quarter of the free memory, at most 64; else 0)",
        at_least=0,
    )
    kv_cache_memory_bytes: int | None = flag(None, "size of the KV cache, such as 4GiB", size=True, at_least=1)
    num_gpu_blocks_override: int | None = flag(None, "number of KV cache blocks, on any device", at_least=1)
    num_states_override: int | None = flag(
        None, "states of recurrent layers (LFM2, Qwen3.5) in the cache; each request needs 1.25", at_least=MAX_STATES
    )
    block_size: int = flag(16, "tokens in a KV cache block, a power of two", at_least=1, at_most=256)
    kv_cache_dtype: str = flag(
        "auto",
        "data type of the KV cache; fp8 (float8_e4m3) holds twice the tokens of bfloat16 in the same memory; auto: as "
        "dtype",
        choices=("auto", "fp8", "fp8_e4m3"),
        common=True,
    )
    mamba_ssm_cache_dtype: str = flag(
        "auto",
        "data type of the states of recurrent layers (delta nets, Mamba-2): 16 bits need half of the memory, and round "
        "each state that is kept; auto: float32",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    calculate_kv_scales: bool = flag(
        False,
        "compute the scales of an fp8 KV cache, per head, from random tokens at start-up (default: the checkpoint's "
        "scales)",
    )
    enforce_eager: bool = flag(False, "do not use CUDA graphs: slower steps, shorter start-up")
    language_model_only: bool = flag(False, "of a model that reads images: load its text model only")
    limit_mm_per_prompt: dict[str, int] = flag(  # noqa: RUF009
        {}, "maximum number of images in a prompt, such as '{\"image\": 8}' (default: 32)", metavar="JSON"
    )
    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "host names of web servers from which requests may have images downloaded; *.example.org: all below it "
        "(default: none). Addresses of this machine and of private networks are never asked",
        metavar="NAME",
    )
    allowed_local_media_path: str | None = flag(
        None, "folder whose images requests may name by file: URLs (default: none)", metavar="FOLDER"
    )

    deterministic: bool = flag(
        False,
        "the same request gives the same bytes, whatever runs beside it: see docs/determinism.md",
        common=True,
    )

    speculative_config: dict[str, Any] | None = flag(  # noqa: RUF009
        None,
        'drafts (speculative decoding), with vLLM\'s names: \'{"method": "ngram", "num_speculative_tokens": 8}\'; 0 '
        "tokens: no drafts. Answers are the same with and without (default: on CPUs, where they pay)",
        metavar="JSON",
    )

    pooling: str = flag(
        "auto",
        "pooling for embeddings: the last token, the mean of all, or the first (cls, of encoders); auto: as in the "
        "model's 1_Pooling, else last, of encoders mean",
        choices=("auto", "last", "mean", "cls"),
    )
    stream_interval: int = flag(
        1,
        "number of tokens per streamed chunk, after the first token; larger chunks mean less work for the server",
        at_least=1,
    )
    max_logprobs: int = flag(
        20, "maximum number of log probabilities per position that a request may ask for", at_least=0, at_most=20
    )
    engine_restarts: int = flag(
        5,
        "how many times within ten minutes a crashed or hanging engine process is restarted before the server exits",
        at_least=0,
    )
    engine_watchdog_timeout: float = flag(
        120.0,
        "seconds without a heartbeat (during start-up: without CPU use) after which the engine process counts as "
        "hanging; 0: never",
        at_least=0,
    )
    enable_lora: bool = flag(False, "serve LoRA adapters of the model beside it", common=True)
    max_loras: int = flag(4, "with LoRA: adapters that run at a time, each in a slot", at_least=1, at_most=1024)
    max_lora_rank: int = flag(16, "with LoRA: maximum rank of an adapter", at_least=1, at_most=512)
    lora_experts: bool = flag(False, "with LoRA: slots have room for adapters of an MoE's experts, too")
    lora_embeddings: bool = flag(False, "with LoRA: slots have room for adapters of embedding and output head, too")
    lora_tokens: int = flag(256, "with lora_embeddings: rows of each that an adapter may have retrained", at_least=0)
    max_cpu_loras: int | None = flag(
        None,
        "with LoRA: adapters kept in host memory; the least recently used ones are dropped (default: 4 × max_loras)",
        at_least=1,
    )
    enable_sleep_mode: bool = flag(
        False, "on a GPU: keep addresses during sleep, so that waking up is fast; on by itself for several models"
    )
    compress_experts: bool = flag(
        False,
        "keep an MoE model's bfloat16 experts in 12 bits a weight, without loss, on Hopper GPUs: a quarter less memory "
        "and faster answers, but slower long prompts",
    )
    expert_load_interval: int = flag(
        0,
        "count the tokens of each expert in every N-th step with prompt tokens, for /metrics; 0: never. Decode-only "
        "steps and their CUDA graphs are unaffected",
        metavar="N",
        at_least=0,
    )
    disable_log_stats: bool = flag(False, "no statistics line in the log; no timings in offline results")
    debug_checks: bool = flag(False, "check the scheduler's consistency after every step: slow, for debugging")

    def __post_init__(self) -> None:
        check(self)
        if not self.model:
            raise ConfigError("model is missing: give a folder with a model's files, or a Hugging Face id")
        if self.hf_overrides is not None:
            object.__setattr__(self, "hf_overrides", _as_json("hf_overrides", self.hf_overrides))
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", _as_json("speculative_config", self.speculative_config))
            parse_speculative_config(self.speculative_config)
        self._check_media()
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        if self.enable_sleep_mode and self.num_ranks > 1:
            raise ConfigError("enable_sleep_mode needs a model on one device: leave it out, and use level 2 of sleep")
        if self.prefix_cache_file is not None and not self.enable_prefix_caching:
            raise ConfigError("prefix_cache_file needs enable_prefix_caching")
        if self.distributed_executor_backend == "ray":
            if self.enable_lora:
                raise ConfigError(
                    "enable_lora needs distributed_executor_backend mp: all ranks read an adapter's folder"
                )
            if self.num_ranks == 1:
                raise ConfigError(
                    "distributed_executor_backend ray needs tensor_parallel_size or pipeline_parallel_size above 1"
                )
            if importlib.util.find_spec("ray") is None:
                raise ConfigError("distributed_executor_backend ray needs Ray: pip install 'quire[ray]'")
        if self.lora_experts and self.compress_experts:
            raise ConfigError("lora_experts needs compress_experts off: compressed weights have kernels of their own")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras must be at least max_loras={self.max_loras}, got {self.max_cpu_loras}")
        if self.expert_load_interval and self.pipeline_parallel_size > 1:
            raise ConfigError("expert_load_interval needs pipeline_parallel_size 1: a stage counts only its own layers")
        if self.calculate_kv_scales and self.kv_cache_dtype == "auto":
            raise ConfigError("calculate_kv_scales needs kv_cache_dtype fp8, got 'auto'")
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError(
                "kv_cache_memory_bytes and num_gpu_blocks_override both set the size of the KV cache: give only one"
            )

    def _check_media(self) -> None:
        limits, folder = self.limit_mm_per_prompt, self.allowed_local_media_path
        if not limits.keys() <= {"image", "video", "audio"} or any(
            type(count) is not int or count < 0 for count in limits.values()
        ):
            raise ConfigError(f'limit_mm_per_prompt must be an object such as {{"image": 8}}, got {limits!r}')
        if others := [name for name in ("video", "audio") if limits.get(name)]:
            why = "a video counts as an image" if others[0] == "video" else "no model reads it here"
            raise ConfigError(f"limit_mm_per_prompt: {others[0]} must be 0 or left out: {why}")
        if folder is not None and not Path(folder).expanduser().is_dir():
            raise ConfigError(f"allowed_local_media_path must be a folder, got {folder!r}")
        if self.language_model_only or limits.get("image") == 0:
            object.__setattr__(self, "hf_overrides", {**(self.hf_overrides or {}), READS_IMAGES: False})

    @property
    def max_images(self) -> int:
        """The most images of a prompt."""
        return self.limit_mm_per_prompt.get("image", MAX_IMAGES)

    @property
    def num_loaded_loras(self) -> int:
        """The number of LoRA adapters in host memory."""
        return self.max_cpu_loras or CPU_LORAS * self.max_loras

    @property
    def num_ranks(self) -> int:
        """The number of GPUs of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def _as_json(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a setting, an object, after a round trip through JSON. `ConfigError` if JSON or msgpack cannot hold it or
    it is too large.
    """
    try:
        text = json.dumps(overrides)
        found: dict[str, Any] = json.loads(text)
        msgspec.msgpack.encode(found)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{name} must be a JSON object ({error})") from None
    if len(text) > MAX_OVERRIDES:
        raise ConfigError(f"{name} must be at most {MAX_OVERRIDES} characters, got {len(text)}")
    return found
