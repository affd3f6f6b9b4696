"""The interface between scheduler and worker: the input and the result of a step. Plain data, no torch.

Call order: `Scheduler.schedule() -> SchedulerOutput -> ModelRunner.launch()`, then
`handle.read() -> (SchedulerOutput, StepResult) -> Scheduler.update() -> StepOutputs`.

Per-request data is stored in parallel lists, and an unchanged list is reused: a decode step of a thousand requests does
not create a thousand objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat, zip_longest

from engine.core.engine_request import EngineRequest

# Error codes in place of a sampled token; the same values as `kernels.NOT_FINITE` and `kernels.NOTHING_ALLOWED`.
NOT_FINITE, NOTHING_ALLOWED = -1, -2
FAULTS = {
    NOT_FINITE: "the logits are not finite: the model computed NaN or infinity",
    NOTHING_ALLOWED: "no token is left to sample: all are excluded, or the model gives none a chance",
}


MAX_ENCODED_TOKENS = 16_384  # of encoded images that the worker keeps; a larger image is kept alone


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that gets a device row: new, or resumed after preemption. All its tokens are known on the CPU."""

    request: EngineRequest
    seed: int  # 64-bit: the request's own, or drawn by the engine
    token_ids: list[int]  # prompt, and tokens generated before a preemption
    num_computed_tokens: int  # prefix-cache hits: the first blocks already hold their KV
    block_ids: list[list[int]]  # its block table in each cache group

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Blocks to copy from host memory to the device, while steps run."""

    number: int
    copies: list[tuple[int, int, int]]  # pool, slot, block


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Copies of whole blocks between the device and slots in host memory. They begin after the steps launched before.

    - A later step may write the blocks of `spills`: they are copied as they are now.
    - A slot of a load keeps its content until the load has `arrived`. No step uses a load's blocks before.
    """

    spills: list[tuple[int, int, int]]  # pool, block, slot
    loads: list[BlockLoad]
    arrived: list[int]  # numbers of loads that ended on rank 0


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """The images that a step encodes are those in its chunks that the worker does not keep."""

    num_tokens: int  # that the step encodes
    forgotten: list[str]  # digests of images that are to be forgotten before


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """The requests of a step: request `request_ids[i]` computes its next `num_tokens[i]` tokens. Immutable.

    A request's tokens are computed in order, starting at `num_computed_tokens` of its `NewRequest`. Requests that
    compute one token come first (decodes), then requests that compute more (prefill chunks). While the same requests
    compute the same numbers of tokens, successive steps share one object, so that data derived from it can be kept.
    """

    request_ids: list[str]
    num_tokens: list[int]
    total_num_tokens: int
    num_decodes: int  # number of requests that compute one token
    partial: list[int]  # indices of chunks that end before the request's last token; all other requests sample a token
    # Number of drafts, which are the last of each request's tokens after at least one other; (): there are none.
    num_drafts: tuple[int, ...] = ()
    has_common_prefix: bool = False  # some of its decodes begin with the same long prefix

    def __len__(self) -> int:
        return len(self.request_ids)

    def samples(self) -> list[tuple[int, int]]:
        """Return the samples of a batch with drafts, in their order: request's index, and number of drafts before."""
        return [(index, before) for index, number in enumerate(self.num_drafts) for before in range(number + 1)]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The instructions to the worker for one step."""

    step: int
    new_requests: list[NewRequest]
    batch: ScheduledBatch
    # Request id → block ids to append to its block table in each cache group before this step; not for `new_requests`.
    new_block_ids: dict[str, list[list[int]]]
    # Requests that finished or were aborted or preempted since the last output: free their rows before adding
    # `new_requests`.
    removed: list[str]
    # Request id → tokens that may follow its newest one. Each is sampled as if the ones before it were right; the
    # request keeps the tokens sampled up to the first that differs from its draft.
    drafts: dict[str, list[int]] = field(default_factory=dict)
    # Request id → its number of computed tokens and its newest token, once the outcome of its drafts is known. Its row
    # is set to these before the step.
    rewinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_proposals: int = 0  # tokens that a drafter on the device proposes for each request that is sampled
    drafter_rests: bool = False  # it does nothing in this step, and proposes nothing for these requests from now on
    moves: BlockMoves | None = None  # begin before this step; also in an output without requests
    encoder: EncoderStep | None = None  # None: it encodes no image, and forgets none

    def __bool__(self) -> bool:
        return bool(self.batch.request_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, as in OpenAI's API: of raw logits, before temperature and filters."""

    logprob: float  # of the sampled token
    rank: int  # its rank among all tokens, from 1
    top_ids: list[int]  # most likely first, or the requested `logprob_token_ids`
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt tokens from index `first` on; empty if they are not finite."""

    first: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, in columns over its batch.

    Request i got `num_sampled[i]` tokens, the next ones of the flat `token_ids`: usually one; none if its chunk ended
    before its last token, if its sampling was deferred or if it is a pooling request; more if draft tokens were
    accepted.
    """

    token_ids: list[int]  # or error codes, see FAULTS
    num_sampled: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # index → one for each new token
    # Index → log-probabilities of the prompt tokens after the computed ones.
    prompt_logprobs: dict[int, PromptScores] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)  # index → float32 values; empty: not finite
    # Layer → number of tokens of each expert, if counted.
    expert_tokens: dict[int, list[int]] = field(default_factory=dict)
    # Index → what a drafter on the device guesses to follow its new tokens.
    proposals: dict[int, list[int]] = field(default_factory=dict)
    encoder_seconds: float = 0.0  # that images took to encode; with pipeline stages, in steps before


@dataclass(slots=True)
class EngineOutput:
    """New tokens of one request, or its end. Sent from the engine process to the API process."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort", "timeout", "error"
    stop_reason: int | None = None  # the stop token id that finished the request, unless it is an end of text
    logprobs: list[TokenLogprobs] | None = None  # one for each new token, if requested
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    num_preemptions: int = 0
    queued_time: float = 0.0  # when the request arrived in the engine, in monotonic seconds
    scheduled_time: float = 0.0  # when it was first scheduled
    # With the first token, if requested: one for each token from the prompt's second one on.
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None  # float32 values, the only output of a pooling request
    prefix_miss: str = ""  # why no more of the prompt was found in the prefix cache
    error: str = ""  # with "error": the message for the client
    is_refused: bool = False  # with "error": the request is at fault (status 400)
    num_known_tokens: int = 0  # prompt tokens that the prefix cache holds, or held once
    num_predicted: tuple[int, int] = (0, 0)  # tokens so far of the client's prediction: accepted as drafts, rejected
    num_drafted: tuple[int, int] = (0, 0)  # drafts so far: accepted, verified


@dataclass(slots=True)
class StepOutputs:
    """The outputs of a step for all requests. A request with new tokens and nothing else is in the columns:
    `request_ids[i]` got the next `counts[i]` of the flat `token_ids`, or one token each if `counts` is empty. All
    others are in `outputs`, among them every request that starts or finishes.

    The columns are immutable: `request_ids` may be the previous step's list. Where speed does not matter, iterate to
    get an `EngineOutput` for each request.
    """

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.request_ids or self.outputs)

    def __iter__(self) -> Iterator[EngineOutput]:
        for request_id, token_ids in self.runs():
            yield EngineOutput(request_id, token_ids)
        yield from self.outputs

    def put_before(self, earlier: StepOutputs) -> None:
        """Put a step's outputs before these, which have no columns."""
        assert not self.request_ids
        self.request_ids, self.token_ids, self.counts = earlier.request_ids, earlier.token_ids, earlier.counts
        self.outputs = earlier.outputs + self.outputs

    def runs(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each request of the columns with its new tokens."""
        end = 0
        for request_id, count in zip(self.request_ids, self.counts or repeat(1, len(self.request_ids)), strict=True):
            start, end = end, end + count
            yield request_id, self.token_ids[start:end]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for metrics and the log line. Counters never decrease."""

    num_running: int
    num_waiting: int  # requests that wait for blocks or a row
    num_blocks: int  # of the KV cache
    num_free_blocks: int  # free or evictable
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found there
    prompt_tokens: int  # prompt tokens computed
    generation_tokens: int
    num_deferred: int = 0  # requests whose grammar is being compiled
    num_corrupted: int = 0  # requests that ended because the model computed NaN or infinity
    num_states: int = 0  # blocks of states of recurrent layers
    num_free_states: int = 0  # free or evictable
    external_queries: int = 0  # prompt tokens looked up in host memory and the file, as they were not on the device
    external_hits: int = 0  # prompt tokens found there
    num_host_blocks: int = 0  # slots for blocks in host memory
    num_used_host_blocks: int = 0  # slots with blocks
    num_file_blocks: int = 0  # blocks in the prefix cache's file, if it is read while requests run
    num_damaged_blocks: int = 0  # blocks that were to be read from it, and were damaged
    num_drafts: int = 0  # times that a request had drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of these
    encoder_queries: int = 0  # images that requests began to compute
    encoder_hits: int = 0  # of these, images that were encoded already
    num_encoded: int = 0  # images
    encoder_seconds: float = 0.0
    accepted_at: tuple[int, ...] = ()  # the accepted ones by position in the draft

    @property
    def kv_cache_usage(self) -> float:
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def host_usage(self) -> float:
        """The part of the slots in host memory that have blocks."""
        return self.num_used_host_blocks / self.num_host_blocks if self.num_host_blocks else 0.0

    @property
    def state_usage(self) -> float:
        """The part of the states that requests hold."""
        return 1 - self.num_free_states / self.num_states if self.num_states else 0.0


def total(stats: Sequence[SchedulerStats]) -> SchedulerStats | None:
    """Return the sum over several engines; None if there are none."""
    if not stats:
        return None
    names = [each.name for each in fields(SchedulerStats) if each.name != "accepted_at"]
    sums = {name: sum(getattr(each, name) for each in stats) for name in names}
    accepted_at = map(sum, zip_longest(*(each.accepted_at for each in stats), fillvalue=0))
    return SchedulerStats(**sums, accepted_at=tuple(accepted_at))
