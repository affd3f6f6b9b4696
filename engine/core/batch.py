"""The contract between policy and mechanism: what one step is asked to do, and what it gave. Plain data, no torch.

Call order: `Scheduler.schedule() -> SchedulerOutput -> ModelRunner.launch()`, then
`handle.read() -> (SchedulerOutput, StepResult) -> Scheduler.update() -> StepOutputs`.

Per-request data is stored as parallel lists, and an unchanged list is reused: a decode step of a thousand requests does not
make a thousand objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

from engine.core.engine_request import EngineRequest

# In place of a sampled token: why there is none. As `kernels.NOT_FINITE` and `kernels.NOTHING_ALLOWED`.
NOT_FINITE, NOTHING_ALLOWED = -1, -2
FAULTS = {
    NOT_FINITE: "the logits are not finite: the model computed NaN or infinity",
    NOTHING_ALLOWED: "no token is left to sample: all are excluded, or the model gives none a chance",
}


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that takes a device row: new, or back after preemption. All its tokens are known on the CPU."""

    request: EngineRequest
    seed: int  # 64-bit, always set: the request's own, or drawn by the engine
    token_ids: list[int]  # prompt, and what was generated before a preemption
    num_computed_tokens: int  # prefix-cache hits: their KV is already in the first blocks
    block_ids: list[list[int]]  # its block table in each cache group

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """Which requests compute how many tokens in a step: the next `num_tokens[i]` of request `request_ids[i]`. Immutable.

    A request's tokens are computed in order, from `num_computed_tokens` of its `NewRequest` on. Requests that compute one
    token come first (decodes), then those that compute more (prefill chunks). While the same requests compute the same
    number of tokens, successive steps have the same object, so that what is derived from it can be kept.
    """

    request_ids: list[str]
    num_tokens: list[int]
    total_num_tokens: int
    num_decodes: int  # how many of them are of one token
    partial: list[int]  # indices of chunks that end before their request's last token; all others sample its next one

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step."""

    step: int
    new_requests: list[NewRequest]
    batch: ScheduledBatch
    # Request → block ids appended to its block table in each cache group before this step; none of `new_requests`.
    new_block_ids: dict[str, list[list[int]]]
    # Finished, aborted or preempted since the last output: their rows are freed before `new_requests` get theirs.
    removed: list[str]

    def __bool__(self) -> bool:
        return bool(self.batch.request_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, as OpenAI's API means them: of raw logits, before temperature and filters."""

    logprob: float  # of the sampled token
    rank: int  # its rank among all tokens, from 1
    top_ids: list[int]  # most likely first, or those asked for by `logprob_token_ids`
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens `first`, `first + 1`, …, given those before them; none: they are not finite."""

    first: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, in columns over its batch.

    Request i got `num_sampled[i]` tokens, the next ones of the flat `token_ids`: none when its chunk ended before its last
    token, when its sampling was deferred or when it is pooled; one as a rule; more when drafts were accepted.
    """

    token_ids: list[int]  # or FAULTS
    num_sampled: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # index → one for each of its tokens
    prompt_logprobs: dict[int, PromptScores] = field(default_factory=dict)  # index → of the tokens after its own
    embeddings: dict[int, bytes] = field(default_factory=dict)  # index → float32 values; none: they are not finite
    expert_tokens: dict[int, list[int]] = field(default_factory=dict)  # layer → tokens of each expert, if counted


@dataclass(slots=True)
class EngineOutput:
    """What one request got in a step: engine process → API process."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort", "timeout", "error"
    stop_reason: int | None = None  # the stop token id that ended it, when not the model's end of text
    logprobs: list[TokenLogprobs] | None = None  # one for each new token, when asked
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    num_preemptions: int = 0
    queued_time: float = 0.0  # monotonic seconds: arrived in the engine, first scheduled
    scheduled_time: float = 0.0
    prompt_logprobs: list[TokenLogprobs] | None = (
        None  # with the first token, when asked: of the prompt's second token on
    )
    embedding: bytes | None = None  # float32 values, the only output of a pooling request
    prefix_miss: str = ""  # why no more of the prompt was in the prefix cache
    error: str = ""  # with "error": what went wrong, for the request's client
    is_refused: bool = False  # with "error": the request is to blame for it


@dataclass(slots=True)
class StepOutputs:
    """What a step gave to all requests. Most got one more token and nothing else: request `request_ids[i]` got
    `token_ids[i]`. The others, among them all that begin or end, are in `outputs`.

    The columns are immutable: `request_ids` may be those of the step before. Iterating gives an `EngineOutput` for each
    request, where speed does not matter.
    """

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.request_ids or self.outputs)

    def __iter__(self) -> Iterator[EngineOutput]:
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            yield EngineOutput(request_id, [token_id])
        yield from self.outputs


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for metrics and the log line. Counters only grow."""

    num_running: int
    num_waiting: int  # for blocks or a row
    num_blocks: int
    num_free_blocks: int  # free or evictable
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # and found
    prompt_tokens: int  # prompt tokens computed
    generation_tokens: int
    num_deferred: int = 0  # requests whose grammars are being compiled
    num_corrupted: int = 0  # requests that ended because the model computed NaN or infinity

    @property
    def kv_cache_usage(self) -> float:
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


def total(stats: Sequence[SchedulerStats]) -> SchedulerStats | None:
    """Of several engines together; None of none."""
    if not stats:
        return None
    names = (each.name for each in fields(SchedulerStats))
    return SchedulerStats(**{name: sum(getattr(each, name) for each in stats) for name in names})
