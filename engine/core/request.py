"""A request in the scheduler: its tokens, how many of them are computed, and when it finishes."""

from __future__ import annotations

import sys

from engine.core.batch import FAULTS, EngineOutput, NewRequest, PromptScores, TokenLogprobs
from engine.core.engine_request import EngineRequest
from engine.core.host_load import HostLoad


class Request:
    """Prompt and output as one sequence of tokens.

    The CPU runs one step behind the device, so the state has three counts. Always `num_computed_tokens <= num_tokens`
    and `len(token_ids) <= num_tokens`.

    - `len(token_ids)`: the tokens that the CPU knows;
    - `num_tokens`: these, and the tokens in flight, which launched steps sample and which are not read back yet;
    - `num_computed_tokens`: the tokens whose KV a launched step writes, or which were found in the prefix cache.

    The scheduler writes the counts, the block manager writes the fields marked so, `append` writes the rest.
    """

    def __init__(self, engine_request: EngineRequest, eos_token_ids: frozenset[int], seed: int) -> None:
        """`eos_token_ids`: the model's end-of-text tokens. `seed`: 64-bit, the request's own or drawn by the engine."""
        sampling = engine_request.sampling
        assert len(engine_request.prompt_name_ids) == len(engine_request.prompt_token_ids)
        self.engine_request = engine_request
        self.request_id = engine_request.request_id
        self.sampling, self.pooling = sampling, engine_request.pooling
        self.eos_token_ids, self.seed = eos_token_ids, seed

        self.token_ids = list(engine_request.prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0

        self.min_num_tokens = self.num_prompt_tokens + sampling.min_tokens  # stop tokens before this count are ignored
        # The request finishes at this many tokens; the last one is never computed.
        self.max_num_tokens = sys.maxsize if sampling.max_tokens is None else self.num_tokens + sampling.max_tokens
        ends_of_text = frozenset() if sampling.ignore_eos else eos_token_ids
        self.stop_ids = ends_of_text.union(sampling.stop_token_ids or (), FAULTS)
        # Each token is reported in an `EngineOutput`: it has log-probabilities, advances a grammar or may be predicted.
        full = sampling.logprobs, sampling.structured_outputs, sampling.prediction
        self.needs_full_output = any(each is not None for each in full)
        self.finish_reason: str | None = None  # "stop", "length", "abort", "timeout" or "error"
        self.error = ""  # with "error": what went wrong
        self.stop_reason: int | None = None  # the stop token id that finished the request, unless it is an end of text

        # Block manager:
        self.block_tables: list[list[int]] = []  # one for each cache group; empty while the request holds no blocks
        self.num_passed: list[int] = []  # for each table, how many first entries the request does not hold (any more)
        self.num_slots = 0  # tokens that fit in the blocks
        self.block_hashes: list[bytes] = []  # of the first full blocks
        self.next_commit = sys.maxsize  # number of tokens at which the next block is full
        self.next_return = sys.maxsize  # number of known tokens at which it can give back states that it has passed
        # First blocks of each table that the prefix cache held when the request was admitted; tokens known by then.
        self.num_cached_blocks = self.num_admitted_tokens = 0
        # Index of the last block of a cached prefix that no state was kept for: one is kept there now. -1: none.
        self.branch = -1
        self.load: HostLoad | None = None  # of blocks of its prefix; None: it was not looked for since the last start

        # Scheduler:
        self.steady_until = 0  # below this many tokens, the next token changes nothing but the tokens themselves
        self.drafting: object = None  # of the draft policy; None: it has not been asked for drafts
        self.drafts_from = 0  # known tokens from which on the draft policy is to be asked
        self.num_drafted = [0, 0]  # drafts that were accepted, and verified
        self.num_predicted = [0, 0]  # tokens of the client's prediction that were accepted as drafts, and rejected
        self.is_rewound = False  # the outcome of its drafts is known, but not yet to the worker
        self.is_unsent = False  # it runs, and the worker does not know it yet
        self.order = (engine_request.priority, 0)  # priority, then sequence number of arrival
        self.num_charged = 0  # tokens that have been charged to the tenant

        # Start and end of each image that a step computes to its end or not at all.
        self.uncut = [(each.start, each.stop) for each in engine_request.images if each.sees_both_ways]

        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when the request was first admitted
        self.prefix_miss = ""  # why no more of them were found, see `BlockManager.explain_miss`
        self.num_known_tokens = 0  # prompt tokens that the cache held by then, or had held
        self.num_preemptions = 0
        # From the second prompt token on; None: not requested.
        self.prompt_logprobs: list[TokenLogprobs] | None = None if sampling.prompt_logprobs is None else []
        self.queued_time = 0.0  # monotonic seconds
        self.scheduled_time = 0.0  # when the request was first admitted, in monotonic seconds; 0: not yet

    def whole(self, start: int, count: int) -> int:
        """Return how many of `count` tokens from index `start` on a step may compute, so that no image is cut."""
        end = start + count
        cut = next((first for first, stop in self.uncut if first < end < stop), end)
        return max(cut - start, 0)

    def end_of_image(self, start: int) -> int:
        """Return the end of the image that begins at index `start`, or that has it."""
        return next(stop for first, stop in self.uncut if first <= start < stop)

    def name_ids(self, start: int, end: int) -> list[int]:
        """Return the names of the tokens from index `start` to `end` in the prefix cache: usually the tokens."""
        names, tokens = self.engine_request.name_ids, self.token_ids
        if names is None:
            return tokens[start:end]
        return names[start:end] + tokens[max(start, len(names)) : end]

    @property
    def is_scored(self) -> bool:
        """True while requested prompt log-probabilities are incomplete: then the whole prompt must be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def reads_cache(self) -> bool:
        """True if the request may use the prefix cache: not if every prompt token has a result of its own."""
        return not self.is_scored and (self.pooling is None or self.pooling.pooling == "last")

    def may_draft(self, one_ahead: bool) -> bool:
        """Return whether drafts may follow the known tokens: the request decodes, and the next token is not its last.

        `one_ahead`: its newest token is in flight, and no other.
        """
        num_known = len(self.token_ids)
        return num_known >= self.drafts_from and (
            num_known + one_ahead == self.num_tokens <= self.num_computed_tokens + 1
            and num_known > self.num_prompt_tokens
            and self.num_tokens + 1 < self.max_num_tokens
        )

    def score(self, scores: PromptScores) -> None:
        """Append log-probabilities of some prompt tokens. After a preemption, some of them are known already."""
        assert self.prompt_logprobs is not None
        num_known = len(self.prompt_logprobs) + 1  # the first token has none
        self.prompt_logprobs += scores.logprobs[num_known - scores.first :]

    def append(self, token_ids: list[int]) -> list[int]:
        """Append the oldest tokens in flight, up to the one that finishes the request, and set `finish_reason` if one
        does.

        Returns the tokens that were appended.
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

    def new_request(self, num_computed: int) -> NewRequest:
        """Return the request as the worker gets it, of whose tokens the first `num_computed` are computed."""
        tables = [table.copy() for table in self.block_tables]
        return NewRequest(self.engine_request, self.seed, self.token_ids.copy(), num_computed, tables)

    def output(
        self,
        new_token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        embedding: bytes | None = None,
    ) -> EngineOutput:
        """Return the output of a step: new tokens with their log-probabilities, or the embedding.

        The first one has the prompt's log-probabilities, unless the request ended before all were known.
        """
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
            self.prompt_logprobs if is_first and not self.is_scored else None,
            embedding,
            self.prefix_miss,
            self.error,
            num_known_tokens=self.num_known_tokens,
            num_predicted=(self.num_predicted[0], self.num_predicted[1]),
            num_drafted=(self.num_drafted[0], self.num_drafted[1]),
        )

    def check(self, is_running: bool, num_in_flight: int) -> None:
        """Assert all invariants of an unfinished request. It gets at most `num_in_flight` tokens of steps in flight."""
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
        if is_running:
            cut = any(start < self.num_computed_tokens < stop for start, stop in self.uncut)
            assert not cut, "a step ends within an image whose tokens see each other"
        if self.num_computed_tokens == self.num_tokens:
            assert is_running, "only a request that was deferred has nothing left to compute"
            assert num_known == self.num_tokens
        if self.steady_until:
            assert self.block_tables
            assert self.num_computed_tokens == self.num_tokens - 1, "a steady request lacks more than a token"
            assert self.steady_until <= self.num_slots
            assert self.steady_until < min(self.max_num_tokens, self.next_commit)
