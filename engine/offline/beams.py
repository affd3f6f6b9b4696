"""Beam search of `LLM`: the beams of all prompts take a step together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from engine.core.engine_request import Adapter
from engine.offline.job_runner import Job
from engine.processing.beam_search import Beam, BeamSearch, BeamSearchParams
from engine.processing.input_processor import InputProcessor
from engine.processing.output_collector import BeamSearchOutput, BeamSearchSequence, logprobs_by_id
from engine.processing.prompts import Prompt
from engine.text.tokenizer import Tokenizer


def search_beams(
    jobs: list[Job],
    params: BeamSearchParams,
    processor: InputProcessor,
    step: Callable[[list[Prompt], list[Adapter | None]], list[Job]],
    adapters: list[Adapter | None],
) -> list[BeamSearchOutput]:
    """Return the best beams of each prompt. `jobs`: the prompts, not run; `step`: generates one token for each beam."""
    ends, context = processor.eos_token_ids, processor.max_model_len
    searches = []
    for job in jobs:
        fitting = replace(params, max_tokens=min(params.max_tokens, context - len(job.token_ids)))
        searches.append(BeamSearch(len(job.token_ids), fitting, ends))
    salts = [job.answers[0].request.cache_salt for job in jobs]
    while unfinished := [index for index, search in enumerate(searches) if not search.is_over]:
        asked: list[Prompt] = [
            {"prompt_token_ids": jobs[index].token_ids + beam.token_ids, "cache_salt": salts[index]}
            for index in unfinished
            for beam in searches[index].beams
        ]
        own = [adapters[index] for index in unfinished for _ in searches[index].beams]
        steps = step(asked, own)
        found = iter([logprobs for job in steps for logprobs in job.answers[0].logprobs or ()])
        for index in unfinished:
            searches[index].advance(list(itertools.islice(found, len(searches[index].beams))))
    tokenizer = processor.tokenizer
    return [
        BeamSearchOutput([_sequence(job.token_ids, beam, params, tokenizer) for beam in search.best()])
        for job, search in zip(jobs, searches, strict=True)
    ]


def _sequence(
    prompt: list[int], beam: Beam, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    """Return a beam as a result: prompt and completion, without the end token unless `params` include it."""
    ended = beam.finish_reason == "stop"
    shown = beam.token_ids[:-1] if ended and not params.include_stop_str_in_output else beam.token_ids
    return BeamSearchSequence(
        prompt + shown,
        beam.cumulative_logprob,
        tokenizer.decode(prompt + shown) if tokenizer is not None else None,
        logprobs_by_id(beam.token_ids, beam.logprobs, tokenizer),
        beam.finish_reason,
        beam.token_ids[-1] if ended else None,
    )
