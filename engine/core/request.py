"""One request: its tokens, how far they are computed, and when it ends."""

from __future__ import annotations

import sys

from engine.core.batch import FAULTS, EngineOutput, PromptScores, TokenLogprobs
from engine.core.engine_request import EngineRequest


class Request:
    """Prompt and output as one sequence of tokens.

    The CPU runs one step behind the device, so three counts tell its state, and always
    `num_computed_tokens <= num_tokens` and `len(token_ids) <= num_tokens`:

    - `len(token_ids)`: tokens the CPU knows,
    - `num_tokens`: and those in flight, sampled by a launched step that is not read back yet,
    - `num_computed_tokens`: tokens whose KV is written by a launched step or was found in the prefix cache.

    Owners: the scheduler writes the counts, the block manager writes the fields named so, `append` the rest.
    """

    def __init__(self, engine_request: EngineRequest, eos_token_ids: frozenset[int], seed: int) -> None:
        """`eos_token_ids`: the model's ends of text. `seed`: 64-bit, the request's own or drawn by the engine."""
        sampling = engine_request.sampling
        self.engine_request = engine_request
        self.request_id = engine_request.request_id
        self.sampling, self.pooling = sampling, engine_request.pooling
        self.eos_token_ids, self.seed = eos_token_ids, seed

        self.token_ids = list(engine_request.prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0

        self.min_num_tokens = self.num_prompt_tokens + sampling.min_tokens  # no earlier token ends the request
        # The request ends at this many tokens; the last one is never computed.
        self.max_num_tokens = sys.maxsize if sampling.max_tokens is None else self.num_tokens + sampling.max_tokens
        ends_of_text = frozenset() if sampling.ignore_eos else eos_token_ids
        self.stop_ids = ends_of_text.union(sampling.stop_token_ids or (), FAULTS)
        # Each of its tokens is reported as an `EngineOutput`: with log-probabilities, or to its grammar.
        self.needs_full_output = sampling.logprobs is not None or sampling.structured_outputs is not None
        self.finish_reason: str | None = None  # "stop", "length", "abort", "timeout" or "error"
        self.error = ""  # with "error": what went wrong
        self.stop_reason: int | None = None  # the stop token id that ended it, when not an end of text

        self.block_tables: list[
            list[int]
        ] = []  # block manager: one for each cache group, none while it holds no blocks
        self.num_passed: list[
            int
        ] = []  # block manager: the first entries of each table, which it does not hold (any more)
        self.num_slots = 0  # block manager: tokens that fit its blocks
        self.block_hashes: list[bytes] = []  # block manager: of its first full blocks
        self.next_commit = sys.maxsize  # block manager: tokens at which its next block is full

        # Scheduler: below this many tokens, the next one changes nothing but the tokens themselves.
        self.steady_until = 0
        self.order = (engine_request.priority, 0)  # scheduler: priority, then the number of its arrival
        self.num_charged = 0  # scheduler: tokens that were counted as service to its owner

        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when first admitted
        self.prefix_miss = ""  # why not more of them were, as of `BlockManager.miss_reason`
        self.num_preemptions = 0
        # Of its second prompt token and on; None: not asked for.
        self.prompt_logprobs: list[TokenLogprobs] | None = None if sampling.prompt_logprobs is None else []
        self.queued_time = 0.0  # monotonic seconds
        self.scheduled_time = 0.0  # monotonic seconds, when first admitted; 0: not yet

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

    def append(self, token_ids: list[int]) -> list[int]:
        """Learn the oldest tokens in flight, up to the last one of the request, whose reason is `finish_reason` then.

        Returns those that count.
        """
        for count, token_id in enumerate(token_ids, 1):
            if token_id in FAULTS:
                self.finish_reason, self.error = "error", FAULTS[token_id]
                return token_ids[: count - 1]
            self.token_ids.append(token_id)
            num_tokens = len(self.token_ids)
            if token_id in self.stop_ids and num_tokens >= self.min_num_tokens:
                self.finish_reason = "stop"
                if self.sampling.ignore_eos or token_id not in self.eos_token_ids:
                    self.stop_reason = token_id
            elif num_tokens >= self.max_num_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return token_ids[:count]
        return token_ids

    def output(
        self,
        new_token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        embedding: bytes | None = None,
    ) -> EngineOutput:
        """What a step gave: its newest tokens with their log-probabilities, or its embedding."""
        is_first = len(self.token_ids) - len(new_token_ids) == self.num_prompt_tokens and embedding is None
        return EngineOutput(
            self.request_id,
            new_token_ids,
            self.finish_reason,
            self.stop_reason,
            None if logprobs is None else logprobs[: len(new_token_ids)],
            self.num_cached_tokens,
            self.num_preemptions,
            self.queued_time,
            self.scheduled_time,
            self.prompt_logprobs if is_first else None,
            embedding,
            self.prefix_miss,
            self.error,
        )

    def check(self, is_running: bool, num_in_flight: int) -> None:
        """Assert every invariant of an unfinished request that is in the batches of `num_in_flight` steps in flight."""
        num_known = len(self.token_ids)
        assert self.finish_reason is None
        if is_running:
            assert self.block_tables
        else:
            assert not self.block_tables
            assert self.num_computed_tokens == self.num_slots == 0, "a waiting request has no KV"
            assert self.next_commit == sys.maxsize
        assert num_known < self.max_num_tokens >= self.num_tokens
        assert 0 <= self.num_tokens - num_known <= num_in_flight
        assert self.num_computed_tokens <= self.num_tokens
        if self.num_computed_tokens == self.num_tokens:
            assert is_running, "only a request that was deferred has nothing left to compute"
            assert num_known == self.num_tokens
        if self.steady_until:
            assert self.block_tables
            assert self.num_computed_tokens == self.num_tokens - 1, "a steady request lacks more than a token"
            assert self.steady_until <= self.num_slots
            assert self.steady_until < min(self.max_num_tokens, self.next_commit)
