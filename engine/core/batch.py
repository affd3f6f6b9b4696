"""The contract between policy and mechanism: what one step is asked to do, and what it gave. Plain data, no torch.

Roads that cross here: `Scheduler.schedule() -> SchedulerOutput -> ModelRunner.launch()`, and
`handle.read() -> (SchedulerOutput, StepResult) -> Scheduler.update() -> StepOutputs`.

What is said of every request in every step lies in columns, and columns that do not change stay the same objects: a step
of a thousand requests that each go one token further makes no thousand objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.core.engine_request import EngineRequest


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that takes a device row: new, or back after preemption. All its tokens are known on the CPU."""

    request: EngineRequest
    seed: int  # 64-bit, always set: the request's own, or drawn by the engine
    token_ids: list[int]  # prompt, and what was generated before a preemption
    num_computed_tokens: int  # prefix-cache hits: their KV is already in the first blocks
    block_ids: list[int]  # every block it holds now, in order

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """Who computes how many tokens in a step: the next `num_tokens[i]` of request `request_ids[i]`. Nobody changes them.

    A request's tokens are computed in order, from `num_computed_tokens` of its admission on. ScheduledBatch of one token come
    first (decodes), then the longer ones (prefill chunks). While the same requests compute as many tokens each, step after
    step has the same object: what is made of it once may be kept.
    """

    request_ids: list[str]
    num_tokens: list[int]
    total_num_tokens: int
    num_decodes: int  # how many of them are of one token
    partial: list[int]  # the shares that end before their request's last token; all others yield its next one

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step."""

    step: int
    new_requests: list[NewRequest]
    batch: ScheduledBatch
    new_block_ids: dict[
        str, list[int]
    ]  # request → appended to its block table before this step; none of `new_requests`
    removed: list[
        str
    ]  # finished, aborted or preempted since the last output: their rows are free before `new_requests`

    def __bool__(self) -> bool:
        return bool(self.batch.request_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, as OpenAI's API means them: of raw logits, before temperature and filters."""

    logprob: float  # of the sampled token
    rank: int  # its rank among all tokens, from 1
    top_ids: list[int]  # most likely first
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens `first`, `first + 1`, …, given those before them."""

    first: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: `token_ids[i]` is the token sampled for share i; of a partial one it says nothing."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # share → logprobs
    prompt_logprobs: dict[int, PromptScores] = field(default_factory=dict)  # share → of the tokens after its own
    embeddings: dict[int, bytes] = field(default_factory=dict)  # share → float32 values
    deferred: frozenset[int] = frozenset()  # shares that were not sampled, though their request's tokens were computed


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


@dataclass(slots=True)
class StepOutputs:
    """What a step gave to all requests. Most have one more token and nothing else to say: request `request_ids[i]` got
    `token_ids[i]`. The others, among them all that begin or end, are in `outputs`.

    Nobody changes the columns: `request_ids` may be those of the step before. Iterating gives an `EngineOutput` for each
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
