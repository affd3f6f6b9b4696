"""The interface between scheduler and runner: the input and the result of a step. Plain data, no torch.

Call order: `Scheduler.schedule() -> SchedulerOutput -> ModelRunner.launch()`, then
`handle.read() -> (SchedulerOutput, StepResult) -> Scheduler.update() -> StepOutputs`.

Per-request data is stored in parallel lists, and unchanged lists are reused, so a decode step of a thousand requests
does not create a thousand objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

from engine.core.engine_request import EngineRequest

# Replace a sampled token to say why there is none. Equal to `kernels.NOT_FINITE` and `kernels.NOTHING_ALLOWED`.
NOT_FINITE, NOTHING_ALLOWED = -1, -2
FAULTS = {
    NOT_FINITE: "the logits are not finite: the model computed NaN or infinity",
    NOTHING_ALLOWED: "no token is left to sample: all are excluded, or the model gives none a chance",
}


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that gets a device row: a new one, or one resumed after preemption. The CPU knows all its tokens."""

    request: EngineRequest
    seed: int  # 64-bit, always set: from the request, or drawn by the engine
    token_ids: list[int]  # the prompt, and the tokens generated before a preemption
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
    """The requests of a step and their token counts: request `request_ids[i]` computes its next `num_tokens[i]` tokens.

    A request's tokens are computed in order, starting at `num_computed_tokens` of its `NewRequest`. Requests that
    compute one token (decodes) come first, then requests that compute more (prefill chunks). Immutable: successive
    steps use the same object while their requests and token counts are equal, so data derived from it can be cached.
    """

    request_ids: list[str]
    num_tokens: list[int]
    total_num_tokens: int
    num_decodes: int  # how many requests compute one token
    partial: list[int]  # indices of chunks that end before the request's last token; all others sample a token

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The instructions for one step."""

    step: int
    new_requests: list[NewRequest]
    batch: ScheduledBatch
    # Request id → block ids appended to its block table in each cache group before this step. Without `new_requests`.
    new_block_ids: dict[str, list[list[int]]]
    # Requests finished, aborted or preempted since the last output. Their rows are freed before new ones are given.
    removed: list[str]

    def __bool__(self) -> bool:
        return bool(self.batch.request_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, as defined by OpenAI's API: of raw logits, before temperature and filters."""

    logprob: float  # of the sampled token
    rank: int  # its rank among all tokens, from 1
    top_ids: list[int]  # most likely first, or the requested `logprob_token_ids`
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens `first`, `first + 1`, …, given the tokens before; empty: not finite."""

    first: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, in columns over its batch.

    Request i got the next `num_sampled[i]` tokens of the flat `token_ids`. That is usually one token. It is 0 if the
    chunk ended before the request's last token, if sampling was deferred, or if the request is pooled. It is more than
    one if draft tokens were accepted.
    """

    token_ids: list[int]  # or keys of FAULTS
    num_sampled: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # index → one entry for each new token
    prompt_logprobs: dict[int, PromptScores] = field(default_factory=dict)  # index → of the tokens after those computed
    embeddings: dict[int, bytes] = field(default_factory=dict)  # index → float32 values; empty: they are not finite
    expert_tokens: dict[int, list[int]] = field(default_factory=dict)  # layer → token count of each expert, if counted


@dataclass(slots=True)
class EngineOutput:
    """The output of a step for one request, sent from the engine process to the API process."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort", "timeout", "error"
    stop_reason: int | None = None  # the stop token id that ended the request, unless it is the model's end of text
    logprobs: list[TokenLogprobs] | None = None  # one for each new token, if requested
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    num_preemptions: int = 0
    queued_time: float = 0.0  # monotonic seconds: when it arrived in the engine
    scheduled_time: float = 0.0  # monotonic seconds: when it was first scheduled
    # With the first token, if requested: of the prompt's tokens from the second one on.
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None  # float32 values, the only output of a pooling request
    prefix_miss: str = ""  # why the prefix cache held no more of the prompt
    error: str = ""  # with "error": the message for the client
    is_refused: bool = False  # with "error": the request itself is the cause


@dataclass(slots=True)
class StepOutputs:
    """The outputs of a step for all requests.

    Most requests get one token and nothing else: request `request_ids[i]` gets `token_ids[i]`. All other outputs, among
    them every first and final one, are in `outputs`. The columns are immutable: successive steps may have the same
    `request_ids`. Iterating yields an `EngineOutput` for each request, for use where speed does not matter.
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
    """A snapshot for metrics and the log line. Counters never decrease."""

    num_running: int
    num_waiting: int  # for blocks or a row
    num_blocks: int
    num_free_blocks: int  # empty or evictable
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found there
    prompt_tokens: int  # prompt tokens computed
    generation_tokens: int
    num_deferred: int = 0  # requests whose grammars are being compiled
    num_corrupted: int = 0  # requests that failed because the model computed NaN or infinity

    @property
    def kv_cache_usage(self) -> float:
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


def total(stats: Sequence[SchedulerStats]) -> SchedulerStats | None:
    """Return the sum over several engines, or None if there are none."""
    if not stats:
        return None
    names = (each.name for each in fields(SchedulerStats))
    return SchedulerStats(**{name: sum(getattr(each, name) for each in stats) for name in names})
