"""Results of `LLM`, from jobs that have finished."""

from __future__ import annotations

from engine.offline.job_runner import Answer, Job
from engine.processing.output_collector import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    logprobs_by_id,
)
from engine.text.tokenizer import Tokenizer


def request_output(job: Job, tokenizer: Tokenizer | None, has_metrics: bool) -> RequestOutput:
    """Return the result of a prompt. `tokenizer`: of log-probabilities; None: they have no texts."""
    outputs = [
        CompletionOutput(
            index,
            "".join(answer.text),
            answer.token_ids,
            sum(found.logprob for found in answer.logprobs) if answer.logprobs is not None else None,
            _logprobs(answer, tokenizer),
            answer.finish_reason,
            answer.stop_reason,
            answer.error,
        )
        for index, answer in enumerate(job.answers)
    ]
    first = job.answers[0]
    scores: list[dict[int, Logprob] | None] | None = None
    if first.prompt_logprobs is not None:
        scores = [None, *logprobs_by_id(job.token_ids[1:], first.prompt_logprobs, tokenizer)]
    metrics = first.collector.metrics if has_metrics else None
    return RequestOutput(
        job.request_id, job.text, job.token_ids, outputs, True, metrics, first.num_cached_tokens, scores
    )


def _logprobs(answer: Answer, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]] | None:
    if answer.logprobs is None:
        return None
    ranked = not answer.request.sampling.logprob_token_ids
    return logprobs_by_id(answer.token_ids, answer.logprobs, tokenizer, ranked)


def embedding_output(job: Job) -> EmbeddingRequestOutput:
    """Return the embedding of a prompt."""
    answer = job.answers[0]
    embedding = EmbeddingOutput.read(answer.embedding)
    return EmbeddingRequestOutput(job.request_id, embedding, job.token_ids, True, job.text, answer.num_cached_tokens)
