"""Collects the engine's outputs for each request, detokenizes them and creates the results for users."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import Protocol

from engine.core.batch import EngineOutput, StepOutputs, TokenLogprobs
from engine.core.params.sampling import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in monotonic seconds, the same clock in all processes; 0: not yet."""

    arrival_time: float  # when it arrived at the input processor
    queued_ts: float = 0.0  # when the request was queued in the engine
    scheduled_ts: float = 0.0  # when it was first scheduled
    first_token_ts: float = 0.0  # when the first token, or the embedding, was collected
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_miss: str = ""  # why the prefix cache held no more of the prompt, see `BlockManager.explain_miss`
    num_known_tokens: int = 0  # prompt tokens that the prefix cache held, or had held once
    num_predicted: tuple[int, int] = (0, 0)  # tokens of the client's prediction: accepted as drafts, rejected
    num_drafted: tuple[int, int] = (0, 0)  # drafts: accepted, verified; known when the request starts or ends

    @property
    def first_token_latency(self) -> float:
        return self.first_token_ts - self.arrival_time if self.first_token_ts else 0.0


@dataclass(slots=True)  # created for every token: a frozen class takes four times as long
class RequestUpdate:
    """The output of a request since its last update. Treat it as immutable."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one for each of `token_ids`, if requested
    finish_reason: str | None  # "stop", "length", "abort", "timeout", "error"; None: unfinished
    stop_reason: int | str | None  # the stop token id or stop string that ended the request
    num_cached_tokens: int  # prompt tokens taken from the prefix cache
    timings: RequestMetrics  # updated as the request progresses
    prompt_logprobs: list[TokenLogprobs] | None = None  # in the first update, if requested; without the first token
    embedding: bytes | None = None  # float32 values, of a pooling request
    error: str = ""  # with "error": the message
    is_refused: bool = False  # with "error": the request itself is the cause


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position, its rank from 1, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: itself and the most likely ones
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str = ""  # with the finish reason "error": what went wrong

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None  # of the first completion; None with disable_log_stats
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # for each prompt token; None for the first


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @classmethod
    def read(cls, data: bytes) -> EmbeddingOutput:
        """Create the output from the engine's float32 values."""
        return cls(array("f", data).tolist())

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    def similarity(self, other: EmbeddingOutput) -> float:
        """Return the cosine similarity of two embeddings of length 1."""
        found: float = sum(map(mul, self.embedding, other.embedding))
        return found


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool
    prompt: str | None = None  # None if it was given as token ids
    num_cached_tokens: int = 0


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the completions that a beam search has found."""

    tokens: list[int]  # of the prompt and the completion
    cum_logprob: float  # of the completion
    text: str | None  # of `tokens`
    logprobs: list[dict[int, Logprob]]  # for each token of the completion: itself and the most likely ones
    finish_reason: str
    stop_reason: int | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The completions that a beam search has found for a prompt, the best first."""

    sequences: list[BeamSearchSequence]


class OutputReceiver(Protocol):
    """Receives the outputs of one request. `now`: monotonic seconds."""

    def add_token(self, token_id: int, now: float) -> None: ...
    def add_tokens(self, token_ids: list[int], now: float) -> None: ...
    def add(self, output: EngineOutput, now: float) -> None: ...


def deliver(outputs: StepOutputs, receivers: Mapping[str, OutputReceiver], now: float) -> None:
    """Pass each request's output of a step to its receiver. Skips aborted requests, which have no receiver."""
    if outputs.counts:
        for request_id, token_ids in outputs.runs():
            if (receiver := receivers.get(request_id)) is not None:
                receiver.add_tokens(token_ids, now)
    else:
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            if (receiver := receivers.get(request_id)) is not None:
                receiver.add_token(token_id, now)
    for output in outputs.outputs:
        if (receiver := receivers.get(output.request_id)) is not None:
            receiver.add(output, now)


class OutputCollector:
    """Collects a request's outputs until they are taken. Adding is cheap; `take` detokenizes.

    `take` returns all outputs since the last call as one update, so a slow client needs no more memory than its tokens.
    """

    __slots__ = ("_detokenizer", "_num_cached_tokens", "_pending", "_tokens", "finished", "metrics", "sampling")

    def __init__(self, prompt_token_ids: list[int], sampling: SamplingParams, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: None if no text is needed."""
        self.sampling = sampling
        self.metrics = RequestMetrics(time.monotonic())
        self.finished = False  # the final output has been added
        self._pending: EngineOutput | None = None
        self._tokens: list[int] = []  # new tokens, while there is no `_pending`
        self._num_cached_tokens = 0
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and sampling.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_token_ids,
                stop=sampling.stop_strings,
                include_stop_str_in_output=sampling.include_stop_str_in_output,
                skip_special_tokens=sampling.skip_special_tokens,
                min_tokens=sampling.min_tokens,
            )

    @property
    def has_output(self) -> bool:
        return self._pending is not None or bool(self._tokens)

    def add(self, output: EngineOutput, now: float) -> None:
        """Add an output. The collector takes ownership of it."""
        metrics = self.metrics
        if output.new_token_ids or output.embedding is not None:
            metrics.first_token_ts = metrics.first_token_ts or now
            metrics.last_token_ts = now
            metrics.num_generation_tokens += len(output.new_token_ids)
        pending = self._pending
        if pending is None:
            if self._tokens:
                output.new_token_ids, self._tokens = self._tokens + output.new_token_ids, []
            self._pending = output
        else:
            pending.new_token_ids += output.new_token_ids
            pending.finish_reason, pending.stop_reason = output.finish_reason, output.stop_reason
            pending.error, pending.is_refused = output.error, output.is_refused
            if pending.logprobs is None:
                pending.logprobs = output.logprobs
            elif output.logprobs is not None:
                pending.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.finished = True
        if self.sampling.prediction is not None:
            metrics.num_predicted = output.num_predicted
        if output.num_drafted[1]:
            metrics.num_drafted = output.num_drafted
        if output.queued_time:
            metrics.queued_ts, metrics.scheduled_ts = output.queued_time, output.scheduled_time
            metrics.num_preemptions, metrics.prefix_miss = output.num_preemptions, output.prefix_miss
            self._num_cached_tokens, metrics.num_known_tokens = output.num_cached_tokens, output.num_known_tokens

    def add_token(self, token_id: int, now: float) -> None:
        """Add a token that is not the first and has neither a finish reason nor log-probabilities."""
        metrics = self.metrics
        metrics.last_token_ts = now
        metrics.num_generation_tokens += 1
        (self._tokens if self._pending is None else self._pending.new_token_ids).append(token_id)

    def add_tokens(self, token_ids: list[int], now: float) -> None:
        """Do `add_token` for several tokens."""
        for token_id in token_ids:
            self.add_token(token_id, now)

    def take(self) -> RequestUpdate:
        """Return all outputs since the last call as one update. Call it only if `has_output`.

        A stop string in the text ends the request: `finish_reason` is then "stop", although the engine may still run
        it.
        """
        detokenizer = self._detokenizer
        if self._pending is None and detokenizer is not None and not detokenizer.looks_for_stops:  # the usual case
            token_ids, self._tokens = self._tokens, []
            text = detokenizer.push(token_ids)
            return RequestUpdate(text, token_ids, None, None, None, self._num_cached_tokens, self.metrics)
        pending = self._pending or EngineOutput("", self._tokens)
        self._pending, self._tokens = None, []
        token_ids, logprobs = pending.new_token_ids, pending.logprobs
        finish_reason: str | None = pending.finish_reason
        stop_reason: int | str | None = pending.stop_reason
        text = ""
        if detokenizer is not None:
            hidden = int(finish_reason == "stop" and not self.sampling.include_stop_str_in_output)  # the stop token
            num_before = detokenizer.num_tokens
            text = detokenizer.push(token_ids[: len(token_ids) - hidden], finish_reason is not None)
            if detokenizer.stopped_by is not None:
                token_ids = token_ids[: detokenizer.num_tokens - num_before]
                logprobs = logprobs[: len(token_ids)] if logprobs is not None else None
                finish_reason, stop_reason = "stop", detokenizer.stopped_by
        return RequestUpdate(
            text, token_ids, logprobs, finish_reason, stop_reason, self._num_cached_tokens, self.metrics,
            pending.prompt_logprobs, pending.embedding, pending.error, pending.is_refused,
        )  # fmt: skip


def with_samples(sampling: SamplingParams) -> list[SamplingParams]:
    """Return parameters for each of the `n` completions. Seeds differ, and only the first one scores the prompt."""
    if sampling.n == 1:
        return [sampling]
    seed = sampling.seed
    return [
        sampling.clone(
            n=1,
            seed=None if seed is None else _wrap(seed + i),
            prompt_logprobs=sampling.prompt_logprobs if i == 0 else None,
        )
        for i in range(sampling.n)
    ]


def _wrap(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def logprobs_by_id(
    token_ids: list[int], logprobs: list[TokenLogprobs], tokenizer: Tokenizer | None, ranked: bool = True
) -> list[dict[int, Logprob]]:
    """Return id → `Logprob` for each token: the sampled one first, then the `top_ids`, with ranks if `ranked`."""

    def entry(token_id: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, tokenizer.token_text(token_id) if tokenizer is not None else None)

    positions = []
    for token_id, found in zip(token_ids, logprobs, strict=True):
        position = {token_id: entry(token_id, found.logprob, found.rank)}
        for rank, (top_id, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1):
            position.setdefault(top_id, entry(top_id, logprob, rank if ranked else None))
        positions.append(position)
    return positions
