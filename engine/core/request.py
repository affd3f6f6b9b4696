"""One request: its tokens, how far they are computed, and when it ends. Knows no other request, no queue, no device."""

from __future__ import annotations

import sys
from dataclasses import InitVar, dataclass, field

from engine.core.batch import PromptScores, TokenLogprobs
from engine.core.pooling_params import PoolingParams
from engine.core.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """Prompt and output as one sequence of tokens.

    The CPU runs one step behind the device, so three counts tell its state, and always
    `num_computed_tokens <= num_tokens` and `len(token_ids) <= num_tokens`:

    - `len(token_ids)`: tokens the CPU knows,
    - `num_tokens`: and those in flight, sampled by a launched step that is not read back yet,
    - `num_computed_tokens`: tokens whose KV is written by a launched step or was found in the prefix cache.

    Owners: the scheduler writes the counts, the block manager writes the fields named so, `append` the rest.
    """

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]  # the model's ends of text
    seed: int  # 64-bit
    cache_salt: str = ""  # requests share cached blocks only with requests of the same salt
    priority: int = 0  # lower ones first
    pooling: PoolingParams | None = None  # it ends with its prompt's embedding; the one token it may get never comes

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)

    min_num_tokens: int = field(init=False)  # no token before this many ends the request
    max_num_tokens: int = field(init=False)  # it ends at this many; the last one is never computed
    stop_ids: frozenset[int] = field(init=False)
    is_told_in_full: bool = field(init=False)  # more is to be said of each of its tokens than the token
    finish_reason: str | None = field(init=False, default=None)  # "stop", "length" or "abort"
    stop_reason: int | None = field(init=False, default=None)  # the stop token id that ended it, if no end of text

    block_ids: list[int] = field(init=False, default_factory=list)  # block manager: its block table
    num_slots: int = field(init=False, default=0)  # block manager: tokens that fit its blocks
    block_hashes: list[bytes] = field(init=False, default_factory=list)  # block manager: of its first full blocks
    next_commit: int = field(init=False, default=sys.maxsize)  # block manager: tokens at which its next block is full

    steady_until: int = field(
        init=False, default=0
    )  # scheduler: up to this many tokens, the next one changes nothing else

    num_cached_tokens: int = field(init=False, default=0)  # prompt tokens found in the prefix cache when first admitted
    num_preemptions: int = field(init=False, default=0)
    prompt_logprobs: list[TokenLogprobs] | None = field(
        init=False
    )  # of its second prompt token and on; None: not asked
    turn: tuple[int, int] = field(init=False, default=(0, 0))  # scheduler: priority, and number in the order of arrival
    queued_time: float = field(init=False, default=0.0)  # monotonic seconds
    scheduled_time: float = field(init=False, default=0.0)  # monotonic seconds, first admission; 0: not yet

    def __post_init__(self, prompt_token_ids: list[int]) -> None:
        sampling = self.sampling
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.min_num_tokens = self.num_prompt_tokens + sampling.min_tokens
        self.max_num_tokens = sys.maxsize if sampling.max_tokens is None else self.num_tokens + sampling.max_tokens
        ends_of_text = frozenset() if sampling.ignore_eos else self.eos_token_ids
        self.stop_ids = ends_of_text.union(sampling.stop_token_ids or ())
        self.is_told_in_full = sampling.logprobs is not None or sampling.structured_outputs is not None
        self.prompt_logprobs = None if sampling.prompt_logprobs is None else []

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not all known: then all of it has to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def reads_cache(self) -> bool:
        """Whether tokens in the prefix cache are as good as computed ones: not where each has a result of its own."""
        return not self.is_scored and (self.pooling is None or self.pooling.pooling == "last")

    def score(self, scores: PromptScores) -> None:
        """Learn those of some of the prompt's tokens, for the second time after a preemption."""
        assert self.prompt_logprobs is not None
        num_known = len(self.prompt_logprobs) + 1  # the first token has none
        self.prompt_logprobs += scores.logprobs[num_known - scores.first :]

    def append(self, token_id: int) -> None:
        """Learn the oldest token in flight; when it is the last one of the request, say why in `finish_reason`."""
        self.token_ids.append(token_id)
        num_tokens = len(self.token_ids)
        if token_id in self.stop_ids and num_tokens >= self.min_num_tokens:
            self.finish_reason = "stop"
            if self.sampling.ignore_eos or token_id not in self.eos_token_ids:
                self.stop_reason = token_id
        elif num_tokens >= self.max_num_tokens:
            self.finish_reason = "length"
