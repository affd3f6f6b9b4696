"""Offline generation, in this process: prompts in, results out, with the interface of vLLM's `LLM`.

llm = LLM(model="...")
for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
    print(result.outputs[0].text)
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm

from engine.beam_search import Beam, BeamSearch, BeamSearchParams
from engine.config import EngineConfig
from engine.core.batch import StepOutputs, TokenLogprobs
from engine.core.engine_request import EngineRequest
from engine.core.pooling_params import UNSAMPLED, PoolingParams
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError, EngineDeadError, EngineError
from engine.flags import nearest, settings_of
from engine.input_processor import InputProcessor
from engine.output_collector import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    OutputCollector,
    RequestOutput,
    deliver,
    logprobs_by_id,
    with_samples,
)
from engine.progress import TerminalProgress
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer, TokenizerError

Prompt: TypeAlias = str | Mapping[str, Any] | list[int]  # text, {"prompt": …}, {"prompt_token_ids": …}, token ids
Messages: TypeAlias = list[dict[str, Any]]

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_BAR_SECONDS = 0.2
_BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]"
_OUTPUT_WEIGHT = 4  # a generated token takes about as long as so many tokens of a prompt


class LLM:
    """A model in this process. Not for several threads at once."""

    def __init__(self, model: str, **settings: Any) -> None:
        """`settings` are the fields of `EngineConfig`; `TypeError` for any other.

        Raises `ModelError`, `TokenizerError`, `ConfigError` and `EngineError`, each one clear line.
        """
        start = time.perf_counter()
        known = settings_of(EngineConfig)
        for name in settings:
            if name not in known:
                raise TypeError(f"LLM() has no setting {name!r}{nearest(name, known)}")
        self.config = EngineConfig(model=model, **settings)
        if self.config.data_parallel_size > 1:
            raise ConfigError("data_parallel_size must be 1 offline: replicas are the server's")
        processor = InputProcessor.load(self.config)
        config, ends = processor.local(self.config), processor.eos_token_ids
        self._engine = Engine(
            config, spec=processor.spec, eos_token_ids=ends, offline=True, progress=TerminalProgress()
        )
        self._input_processor = processor.with_context(self._engine.runner.max_model_len)
        self._ids = itertools.count()
        self._broken = False
        self._process = os.getpid()
        print(f"{self._engine.summary()} · ready in {time.perf_counter() - start:.1f} s", file=sys.stderr)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in their order.

        `sampling_params`: for all of them, or a list with one for each; None: the model's own defaults. `use_tqdm`: a
        progress bar, or what to make it with. `priority`: one for each prompt, lower ones come first. `ValueError`
        names a prompt that cannot run; then none runs. Ctrl-C ends all requests; the LLM stays usable.
        """
        return self._generate(prompts, sampling_params, use_tqdm, True, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The next message of one conversation or many: lists of {"role": …, "content": …}.

        `chat_template`: a Jinja template or a file with one, instead of the model's. `continue_final_message`: go on
        with the last message; needs `add_generation_prompt=False`.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False")
        if not messages:
            raise ValueError("messages must hold at least one message, got an empty list")
        conversations: Sequence[Messages] = [messages] if isinstance(messages[0], Mapping) else messages  # type: ignore
        for conversation in conversations:
            for message in [conversation] if isinstance(conversation, (str, Mapping)) else conversation:
                if not isinstance(message, Mapping) or "role" not in message:
                    raise ValueError(f"messages must be dicts with 'role' and 'content', got {message!r}")
        template = self._chat_template(chat_template)
        prompts = [
            template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._generate(prompts, sampling_params, use_tqdm, False, None)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: list[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embeddings of one prompt or many, in their order: of the model's final hidden states.

        `pooling`: "last", the last token's, or "mean", of all; None: as the setting of that name says. `normalize`: to
        length 1. `dimensions`: only so many first ones, for models that were trained for it. All else as `generate`;
        `EngineError` when one fails.
        """
        params = PoolingParams(
            pooling=pooling or self._input_processor.default_pooling, normalize=normalize, dimensions=dimensions
        )
        several = _as_list(prompts)
        jobs = self._jobs(several, [UNSAMPLED] * len(several), True, priority, params)
        self._run_all(jobs, use_tqdm, "Embedding")
        _check_all(jobs)
        return [
            EmbeddingRequestOutput(
                job.request_id,
                EmbeddingOutput.read(job.answers[0].embedding),
                job.token_ids,
                True,
                job.text,
                job.answers[0].num_cached_tokens,
            )
            for job in jobs
        ]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to one prompt or many, in their order: `params.beam_width` of each, the best first.

        `use_tqdm`: a progress bar for each step. All else as `generate`; `EngineError` when one fails.
        """
        first = params.step_sampling()
        jobs = self._jobs(several := _as_list(prompts), [first] * len(several), True, None)
        ends, context = self._input_processor.eos_token_ids, self._input_processor.max_model_len
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
            steps = self._jobs(asked, [first] * len(asked), True, None)
            self._run_all(steps, use_tqdm, "Beam search")
            _check_all(steps)
            found = iter([logprobs for step in steps for logprobs in step.answers[0].logprobs or ()])
            for index in unfinished:
                searches[index].advance(list(itertools.islice(found, len(searches[index].beams))))
        tokenizer = self._input_processor.tokenizer
        return [
            BeamSearchOutput([_sequence(job.token_ids, beam, params, tokenizer) for beam in search.best()])
            for job, search in zip(jobs, searches, strict=True)
        ]

    def get_tokenizer(self) -> Tokenizer:
        """`ValueError` with skip_tokenizer_init."""
        if self._input_processor.tokenizer is None:
            raise ValueError("there is no tokenizer (skip_tokenizer_init)")
        return self._input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers suggest, as a start to change from."""
        return SamplingParams(**self._input_processor.default_sampling)

    def reset_prefix_cache(self) -> bool:
        """Forget the KV cache of earlier prompts."""
        return self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Give the device's memory back; the LLM cannot be used any more."""
        self._broken = True
        self._engine.close()

    def _chat_template(self, given: str | None) -> ChatTemplate:
        tokenizer = self.get_tokenizer()
        source = given
        if source is None:
            source = tokenizer.chat_template
            if source is None:
                raise ValueError(f"{self._input_processor.model_name} has no chat template: give one as chat_template")
        elif "{" not in source:
            source = Path(source).read_text(encoding="utf-8")
        return ChatTemplate(source, tokenizer.special_tokens_map)

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        add_special_tokens: bool,
        priority: list[int] | None,
    ) -> list[RequestOutput]:
        several = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        each = (
            [sampling_params] * len(several) if isinstance(sampling_params, SamplingParams) else list(sampling_params)
        )
        if len(each) != len(several):
            raise ValueError(f"sampling_params must be one, or one for each prompt ({len(several)}), got {len(each)}")
        jobs = self._jobs(several, each, add_special_tokens, priority)
        self._run_all(jobs, use_tqdm, "Generating")
        return [self._result(job) for job in jobs]

    def _jobs(
        self,
        prompts: list[Prompt],
        sampling_params: list[SamplingParams],
        add_special_tokens: bool,
        priority: list[int] | None,
        pooling: PoolingParams | None = None,
    ) -> list[_Job]:
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"priority must be one for each prompt ({len(prompts)}), got {len(priority)}")
        jobs = []
        for index, (prompt, sampling) in enumerate(zip(prompts, sampling_params, strict=True)):
            try:
                first = priority[index] if priority is not None else 0
                jobs.append(self._job(prompt, sampling, add_special_tokens, pooling, first))
            except (ValueError, TokenizerError) as error:
                raise ValueError(f"prompts[{index}]: {error}") from None
        return jobs

    def _run_all(self, jobs: list[_Job], use_tqdm: bool | Callable[..., Any], title: str) -> None:
        if self._broken:
            raise EngineDeadError("this LLM was closed, or a step of it failed: make a new one")
        if os.getpid() != self._process:  # neither the device nor PyTorch's threads came along
            raise EngineDeadError(
                "this process was forked from the one that the LLM is in: make an LLM of its own here"
            )
        bar = None
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else tqdm
            bar = make(total=sum(map(_work, jobs)), desc=title, bar_format=_BAR_FORMAT, dynamic_ncols=True)
        try:
            with _interrupt_later() as interrupted:
                self._run(jobs, _Progress(bar, self._engine, len(jobs)), interrupted)
        finally:
            if bar is not None:
                bar.close()

    def _job(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        add_special_tokens: bool,
        pooling: PoolingParams | None,
        priority: int,
    ) -> _Job:
        text, token_ids, cache_salt = _read_prompt(prompt)
        if token_ids is None:
            assert text is not None
            if self._input_processor.tokenizer is None:
                raise ValueError("is a text, but there is no tokenizer (skip_tokenizer_init): give prompt_token_ids")
            token_ids = self._input_processor.tokenizer.encode(text, add_special_tokens)
        request_id = str(next(self._ids))
        request = EngineRequest(request_id, token_ids, sampling, pooling, cache_salt, priority)
        request = self._input_processor.check(request)
        sampling = request.sampling
        room = 0 if pooling is not None else self._input_processor.max_model_len - len(token_ids)
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        answers = []
        for index, own in enumerate(with_samples(sampling)):
            answer_id = request_id if sampling.n == 1 else f"{request_id}-{index}"
            collector = OutputCollector(token_ids, own, self._input_processor.tokenizer)
            answers.append(_Answer(replace(request, request_id=answer_id, sampling=own), collector, max_tokens))
        return _Job(request_id, text, token_ids, answers)

    def _run(self, jobs: list[_Job], progress: _Progress, interrupted: list[int]) -> None:
        """Answer all jobs. After an exception nothing of them is left in the engine."""
        engine = self._engine
        running: dict[str, tuple[_Job, _Answer]] = {}
        collectors: dict[str, OutputCollector] = {}  # of `running`
        with_stops: dict[str, OutputCollector] = {}  # those whose text must be looked at after every step
        generates = not any(answer.request.pooling for job in jobs for answer in job.answers)
        try:
            for job in jobs:
                for answer in job.answers:
                    request_id = answer.request.request_id
                    engine.add_request(answer.request)
                    running[request_id], collectors[request_id] = (job, answer), answer.collector
                    if answer.request.sampling.stop_strings:
                        with_stops[request_id] = answer.collector
            while running:
                outputs = self._step()
                now = time.monotonic()
                deliver(outputs, collectors, now)
                finished = [output.request_id for output in outputs.outputs if output.finish_reason is not None]
                looked_at = [request_id for request_id, collector in with_stops.items() if collector.has_output]
                for request_id in dict.fromkeys(finished + looked_at):
                    job, answer = running[request_id]
                    if answer.take():
                        del running[request_id], collectors[request_id]
                        with_stops.pop(request_id, None)
                        if not answer.collector.finished:
                            engine.abort(request_id)
                        progress.finish_one(job, answer)
                progress.output_tokens += len(outputs.request_ids) + len(outputs.outputs) if generates else 0
                progress.show(now)
                if interrupted:
                    raise KeyboardInterrupt
        finally:
            progress.show(None)
            for request_id in running:
                engine.abort(request_id)
            while not self._broken and engine.has_work():
                self._step()  # what is in flight

    def _step(self) -> StepOutputs:
        try:
            return self._engine.step()
        except BaseException:
            self._broken = True
            raise

    def _logprobs(self, answer: _Answer) -> list[dict[int, Logprob]] | None:
        if answer.logprobs is None:
            return None
        ranked = not answer.request.sampling.logprob_token_ids
        return logprobs_by_id(answer.token_ids, answer.logprobs, self._input_processor.tokenizer, ranked)

    def _result(self, job: _Job) -> RequestOutput:
        outputs = [
            CompletionOutput(
                index,
                "".join(answer.text),
                answer.token_ids,
                sum(found.logprob for found in answer.logprobs) if answer.logprobs is not None else None,
                self._logprobs(answer),
                answer.finish_reason,
                answer.stop_reason,
            )
            for index, answer in enumerate(job.answers)
        ]
        first = job.answers[0]
        scores: list[dict[int, Logprob] | None] | None = None
        if first.prompt_logprobs is not None:
            scores = [None, *logprobs_by_id(job.token_ids[1:], first.prompt_logprobs, self._input_processor.tokenizer)]
        return RequestOutput(
            job.request_id,
            job.text,
            job.token_ids,
            outputs,
            True,
            None if self.config.disable_log_stats else first.collector.metrics,
            first.num_cached_tokens,
            scores,
        )


@dataclass(slots=True)
class _Answer:
    """One of the answers to a prompt, and what has been collected of it."""

    request: EngineRequest
    collector: OutputCollector
    max_tokens: int  # at most so many are generated
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes = b""
    error: str = ""

    def take(self) -> bool:
        """Take what was collected; whether the answer is complete."""
        update = self.collector.take()
        self.text.append(update.text)
        self.token_ids += update.token_ids
        if self.logprobs is None:
            self.logprobs = update.logprobs
        elif update.logprobs is not None:
            self.logprobs += update.logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.embedding, self.error = update.embedding or b"", update.error
        return update.finish_reason is not None


@dataclass(slots=True)
class _Job:
    """A prompt and its answers."""

    request_id: str
    text: str | None
    token_ids: list[int]
    answers: list[_Answer]


def _check_all(jobs: Iterable[_Job]) -> None:
    """EngineError where one of them has failed."""
    for error in (answer.error for job in jobs for answer in job.answers if answer.finish_reason == "error"):
        raise EngineError(error)


def _work(job: _Job) -> int:
    """What the answers to a prompt cost at most, in tokens of a prompt."""
    return sum(len(job.token_ids) + _OUTPUT_WEIGHT * answer.max_tokens for answer in job.answers)


class _Progress:
    """The bar: the share of the work that is done, prefill included; requests done, tokens a second."""

    def __init__(self, bar: Any, engine: Engine, num_requests: int) -> None:
        self._bar, self._engine, self._num_requests = bar, engine, num_requests
        self._finished = 0
        self._spared = 0  # work of finished answers that came from the prefix cache or behind an early end
        self.output_tokens = 0
        self._before = engine.stats().prompt_tokens
        self._start = self._shown = time.monotonic()

    def finish_one(self, job: _Job, answer: _Answer) -> None:
        """One more answer of `job` is complete; the job is when all are."""
        self._spared += answer.num_cached_tokens + _OUTPUT_WEIGHT * (answer.max_tokens - len(answer.token_ids))
        self._finished += all(answer.finish_reason is not None for answer in job.answers)

    def show(self, now: float | None) -> None:
        """`None`: for the last time."""
        if self._bar is None or (now is not None and now - self._shown < _BAR_SECONDS):
            return
        complete = now is None and self._finished == self._num_requests
        now = now or time.monotonic()
        self._shown = now
        seconds = max(now - self._start, 1e-9)
        prompt_tokens = self._engine.stats().prompt_tokens - self._before
        done = prompt_tokens + _OUTPUT_WEIGHT * self.output_tokens + self._spared
        self._bar.set_postfix_str(
            f"{self._finished}/{self._num_requests} requests, in {prompt_tokens / seconds:,.0f} tokens/s, "
            f"out {self.output_tokens / seconds:,.0f} tokens/s",
            refresh=False,
        )
        # What is preempted is computed twice.
        shown = self._bar.total if complete else max(self._bar.n, min(done, self._bar.total - 1))
        self._bar.update(shown - self._bar.n)
        self._bar.refresh()


@contextmanager
def _interrupt_later() -> Iterator[list[int]]:
    """Ctrl-C in the block is noted in the list, for a moment when the engine is whole; a second one strikes at once."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(signum: int, frame: Any) -> None:
        noted.append(signum)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _sequence(
    prompt: list[int], beam: Beam, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
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


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, list) and prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a text, token ids, or a list of prompts, got {type(prompts).__name__}")
    return list(prompts)  # type: ignore[arg-type]


def _read_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None, str]:
    """Text, token ids, cache salt."""
    given: Mapping[str, Any]
    if isinstance(prompt, str):
        given = {"prompt": prompt}
    elif isinstance(prompt, Mapping):
        given = prompt
    else:
        given = {"prompt_token_ids": prompt}
    for key in given:
        if key not in _PROMPT_KEYS:
            raise ValueError(f"a prompt may have {', '.join(_PROMPT_KEYS)}, got {key!r}")
    text, token_ids, cache_salt = given.get("prompt"), given.get("prompt_token_ids"), given.get("cache_salt") or ""
    if text is None and token_ids is None:
        raise ValueError("a prompt must have 'prompt' or 'prompt_token_ids'")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"'prompt' must be a text, got {type(text).__name__}")
    if not isinstance(cache_salt, str):
        raise ValueError(f"'cache_salt' must be a text, got {type(cache_salt).__name__}")
    if token_ids is not None:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
            raise ValueError(f"'prompt_token_ids' must be a list of integers, got {type(token_ids).__name__}")
        token_ids = list(token_ids)
        if not all(type(i) is int for i in token_ids):
            raise ValueError("'prompt_token_ids' must be a list of integers")
    return text, token_ids, cache_salt
