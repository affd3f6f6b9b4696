"""The contract between policy and mechanism: what one step is asked to do, and what it gave. Plain data, no torch.

Roads that cross here: `Scheduler.schedule() -> SchedulerOutput -> ModelRunner.launch()`, and
`handle.read() -> (SchedulerOutput, StepResult) -> Scheduler.update() -> list[EngineOutput]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.pooling_params import PoolingParams
from engine.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that takes a device row: new, or back after preemption. All its tokens are known on the CPU."""

    request_id: str
    token_ids: list[int]  # prompt, and what was generated before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int  # prefix-cache hits: their KV is already in the first blocks
    block_ids: list[int]  # every block it holds now, in order
    sampling: SamplingParams
    seed: int  # 64-bit, always set: the request's own, or drawn by the engine
    pooling: PoolingParams | None = None  # it wants its prompt's embedding, and no token


@dataclass(slots=True)  # made for every request of every step: freezing would make that four times as slow
class Scheduled:
    """One request's share of a step: tokens [start, start + num_tokens) of it are computed. Nobody changes it."""

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: list[int]  # appended to its block table before this step; for an admission of this step: empty
    samples: bool  # the share reaches the request's last token, so the step yields its next one, or its embedding


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `scheduled` holds the one-token shares first (decodes), then the longer ones (prefill chunks)."""

    step: int
    admitted: list[Admission]
    scheduled: list[Scheduled]
    removed: list[str]  # finished, aborted or preempted since the last output: their rows are free before `admitted`
    num_decodes: int  # how many of `scheduled` have num_tokens == 1; they are the first
    num_tokens: int  # sum of num_tokens

    def __bool__(self) -> bool:
        return bool(self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, as OpenAI's API means them: of raw logits, before temperature and filters."""

    logprob: float  # of the sampled token
    rank: int  # its rank among all tokens, from 1
    top_ids: list[int]  # most likely first
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: `token_ids[i]` is the token sampled for `scheduled[i]`, or -1 where it did not sample."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # index in `scheduled` → logprobs
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of prompt tokens start + 1, …
    embeddings: dict[int, bytes] = field(default_factory=dict)  # index in `scheduled` → float32 values


@dataclass(slots=True)
class EngineOutput:
    """News of one request after a step: engine process → front end."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | None = None  # the stop token id that ended it, when not the model's end of text
    logprobs: list[TokenLogprobs] | None = None  # one for each new token, when asked
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    num_preemptions: int = 0
    queued_time: float = 0.0  # monotonic seconds: arrived in the engine, first scheduled
    scheduled_time: float = 0.0
    prompt_logprobs: list[TokenLogprobs] | None = (
        None  # with the first token, when asked: of the prompt from its second
    )
    embedding: bytes | None = None  # float32 values; all that a request for it is told


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for metrics and the log line. Counters only grow."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # free or evictable
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # and found
    prompt_tokens: int  # prompt tokens computed
    generation_tokens: int

    @property
    def kv_cache_usage(self) -> float:
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
