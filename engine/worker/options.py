"""The options of a model runner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.drafters.spec import DraftSpec
from engine.worker.device import Device
from engine.worker.sampling.imposed import ImposedAcceptance

RING = 3  # minimum number of buffers for data that the CPU and the device exchange in each step
MAX_DRAFTED_SEQS = 64  # requests of a step with drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """LoRA adapters that a model may have at a time."""

    num_slots: int  # adapters that steps can use
    max_rank: int
    num_loaded: int  # adapters in host memory, at most
    experts: bool = False  # adapters may change experts
    # They may change the embedding and the head, and have retrained so many rows of each; None: they may not.
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """The options of a model runner. All values are resolved: none is "auto"."""

    device: Device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # `dtype` or torch.float8_e4m3fn
    state_dtype: torch.dtype = torch.float32  # of recurrent layers' states of float32
    max_model_len: int
    shortens_context: bool = False  # reduce `max_model_len` if the KV cache is too small for it
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    load_format: str = "auto"
    weight_overlays: tuple[str, ...] = ()  # folders whose tensors replace the model's, the last one first
    seed: int = 0
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    num_states_override: int | None = None  # blocks of states of recurrent layers
    calculate_kv_scales: bool = False
    enforce_eager: bool = False
    deterministic: bool = False  # every operation in its deterministic form, see `kernels.FORMS`
    compress_experts: bool = False  # without loss, where kernels can multiply by them so
    expert_load_interval: int = 0  # count experts' tokens in every n-th step with prompts; 0: never
    adapters: AdapterOptions | None = None  # None: no LoRA
    num_ranks_per_stage: int = 1  # tensor-parallel ranks of a stage, each on its own device
    num_stages: int = 1  # pipeline stages, of successive layers
    max_step_drafts: int = 0  # of all requests in a step
    max_request_drafts: int = 0  # of a request in a step
    whole_prompts: bool = False  # a step has all of a prompt, or none: of encoders
    sleeps_fast: bool = False  # weights, KV cache and CUDA graphs keep their addresses during sleep, on a GPU
    host_cache_bytes: int = 0  # of host memory, for what this rank's KV cache evicts
    host_reserve_bytes: int = 0  # of host memory, that must stay free when some is taken for that
    drafter: DraftSpec | None = None  # that runs on the device; None: there is none
    # A token of a step that only decodes is a sequence of its own, drafts too. So the graphs of decode steps run them.
    splits_drafts: bool = False
    rejects_drafts: bool = False  # verify drafts by a drafter's probabilities, see `sampling.rejection`
    imposed_acceptance: ImposedAcceptance | None = None  # of drafts, for benchmarks

    @property
    def max_decodes(self) -> int:
        """Maximum number of sequences of a step that only decodes."""
        return max(self.max_num_seqs, self.max_drafted if self.splits_drafts else 0)

    @property
    def max_drafted(self) -> int:
        """Maximum number of tokens of a step with drafts that only decodes."""
        num_seqs = min(self.max_num_seqs, MAX_DRAFTED_SEQS)
        return num_seqs + min(self.max_step_drafts, num_seqs * self.max_request_drafts)

    @property
    def num_step_buffers(self) -> int:
        """Number of buffers in a ring, each for one step's data.

        At most `num_stages` steps are launched and not read, the newest included (with one stage: two); a stage before
        the last one may not have begun any of them.
        """
        return max(RING, self.num_stages + 1)
