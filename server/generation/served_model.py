"""What all endpoints share: from a checked request to the engine's updates. Knows the engine's face; no JSON, no SSE.

A request for `n` answers to each of several prompts is `n` × prompts samples, each a request of its own to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from engine.core.batch import SchedulerStats
from engine.core.engine_request import EngineRequest
from engine.core.pooling_params import UNSAMPLED, PoolingParams
from engine.core.sampling_params import SamplingParams
from engine.core.structured_outputs import StructuredOutputs
from engine.errors import ConfigError, EngineDeadError
from engine.output_collector import RequestMetrics, RequestUpdate, with_samples
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.tokenizer import Tokenizer, TokenizerError
from server.http.errors import APIError, bad_value
from server.metrics import Metrics, SampleWatch
from server.openai.protocol import (
    RESERVED_TEMPLATE_VARIABLES,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    NamedTool,
    Prompt,
)
from server.parsing.reasoning import find_reasoning_format
from server.parsing.tools import find_tool_format
from server.settings import ServerConfig

_log = logging.getLogger(__name__)
_SHORT_TEXT = 2000  # characters: less than a millisecond's work
_T = TypeVar("_T")

# Request fields that are the sampling parameter of the same name.
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "typical_p",
    "top_n_sigma",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_sequence_breakers",
    "xtc_threshold",
    "xtc_probability",
)


class EngineClient(Protocol):
    """The engine as the server sees it: `engine.AsyncEngine`."""

    stats: SchedulerStats | None
    dead: bool
    max_model_len: int
    num_blocks: int
    block_size: int

    @property
    def model_name(self) -> str: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def default_sampling(self) -> dict[str, Any]: ...
    @property
    def generates(self) -> bool: ...
    @property
    def default_pooling(self) -> str: ...
    async def prepare(self, sampling: SamplingParams) -> SamplingParams: ...
    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]: ...
    async def abort(self, request_id: str) -> None: ...


@dataclass(slots=True)
class Sample:
    """One answer that is being made, or one embedding."""

    request_id: str  # to the engine
    index: int  # of its choice in the response
    prompt_index: int
    updates: AsyncGenerator[RequestUpdate, None]
    watch: SampleWatch


@dataclass(slots=True)
class Usage:
    """Tokens of a response so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # None: nobody looks for them

    def as_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(slots=True)
class Generation:
    """All samples of one request. `updates` may be run once."""

    id: str
    created: int
    model: str
    n: int
    prompts: list[list[int]]
    samples: list[Sample]
    usage: Usage
    metrics: Metrics
    timings: RequestMetrics | None = field(init=False, default=None)  # of the first sample
    running: dict[str, Generation]  # of all clients, by id

    async def updates(self) -> AsyncGenerator[tuple[Sample, RequestUpdate], None]:
        """What the engine says of each sample until all have ended; closing this ends them.

        `APIError` when the engine fails. A reader that is slow gets fewer and longer updates.
        """
        ended: set[int] = set()
        if self.running.setdefault(self.id, self) is not self:
            raise APIError(400, f"request_id: {self.id} is being answered", "request_id")
        try:
            if len(self.samples) == 1:
                (sample,) = self.samples
                async with aclosing(sample.updates) as updates:
                    async for update in updates:
                        self._see(sample, update, ended)
                        yield sample, update
            else:
                async with aclosing(self._merged()) as merged:
                    async for sample, update in merged:
                        self._see(sample, update, ended)
                        yield sample, update
        except EngineDeadError as error:
            raise APIError(500, f"the engine stopped before the answer was complete: {error}") from None
        finally:
            del self.running[self.id]
            for sample in self.samples:
                if sample.index not in ended:
                    sample.watch.abandoned()
        for first in range(0, len(self.samples), self.n):
            watches = [sample.watch for sample in self.samples[first : first + self.n]]
            if watches[0].generates:
                self.metrics.request_ended(self.n, max(watch.num_tokens for watch in watches))

    def _see(self, sample: Sample, update: RequestUpdate, ended: set[int]) -> None:
        sample.watch.see(update)
        self.usage.completion_tokens += len(update.token_ids)
        if sample.index == 0:
            self.timings = update.timings
        if update.finish_reason is not None:
            ended.add(sample.index)
            if sample.index % self.n == 0:  # the other samples share the first one's prompt
                self.usage.cached_tokens += update.num_cached_tokens
            if update.finish_reason == "error":
                raise APIError(500, "the engine failed at this request; the server's log says why")

    def timings_as_dict(self) -> dict[str, float]:
        """How long the first answer took, under vLLM's names."""
        times = self.timings
        if times is None or not times.first_token_ts:
            return {}
        first, num_more = times.first_token_ts, times.num_generation_tokens - 1
        decoding = times.last_token_ts - first
        values = {
            "queue_time_ms": 1000 * (times.scheduled_ts - times.queued_ts),
            "prefill_time_ms": 1000 * (first - times.scheduled_ts),
            "time_to_first_token_ms": 1000 * (first - times.arrival_time),
            "generation_time_ms": 1000 * decoding,
            "mean_itl_ms": 1000 * decoding / num_more if num_more > 0 else 0.0,
            "tokens_per_second": num_more / decoding if num_more > 0 and decoding > 0 else 0.0,
        }
        return {name: round(value, 3) for name, value in values.items()}

    async def _merged(self) -> AsyncGenerator[tuple[Sample, RequestUpdate], None]:
        queue: asyncio.Queue[tuple[Sample, RequestUpdate] | BaseException | None] = asyncio.Queue(len(self.samples))
        tasks = [asyncio.create_task(_feed(queue, sample)) for sample in self.samples]
        try:
            unfinished = len(tasks)
            while unfinished:
                item = await queue.get()
                if item is None:
                    unfinished -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(queue: asyncio.Queue[tuple[Sample, RequestUpdate] | BaseException | None], sample: Sample) -> None:
    try:
        async with aclosing(sample.updates) as updates:
            async for update in updates:
                await queue.put((sample, update))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


def _several(given: Prompt) -> list[Any]:
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


def _by_token_id(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise APIError(400, f"logit_bias: token ids must be integers, got {[*given][:5]}", "logit_bias") from None


class Serving:
    """A model being served: its engine, its names, its chat template. Shared by the endpoints."""

    def __init__(
        self, engine: EngineClient, settings: ServerConfig, served_model_names: Sequence[str], metrics: Metrics
    ) -> None:
        """`ConfigError` when the chat template given in `settings` cannot be compiled."""
        self.engine, self.settings, self.metrics = engine, settings, metrics
        self.names = list(served_model_names)
        self.started = int(time.time())
        self.template, self.no_template = self._load_template()
        source = self.template.source if self.template is not None else ""
        self.tool_format = find_tool_format(settings.tool_call_parser, source)
        self.reasoning_format = find_reasoning_format(settings.reasoning_parser, source)
        self.single_calls = "single tool-calls" in source  # the template refuses several calls in one message
        self.running: dict[str, Generation] = {}
        self._threads = ThreadPoolExecutor(4, "text")

    def _load_template(self) -> tuple[ChatTemplate | None, str]:
        """The chat template, or why there is none. One that comes with the model need not work to serve completions."""
        tokenizer = self.engine.tokenizer
        special = tokenizer.special_tokens_map if tokenizer is not None else {}
        if reserved := RESERVED_TEMPLATE_VARIABLES & self.settings.default_chat_template_kwargs.keys():
            raise ConfigError(f"default_chat_template_kwargs must not hold {min(reserved)}")
        own = self.settings.read_chat_template()
        if own is not None:
            try:
                return ChatTemplate(own, special), ""
            except ChatTemplateError as error:
                raise ConfigError(f"chat_template: {error}") from None
        advice = "use /v1/completions, or start the server with --chat-template FILE"
        if tokenizer is None or tokenizer.chat_template is None:
            return None, f"the model {self.names[0]} has no chat template: {advice}"
        try:
            return ChatTemplate(tokenizer.chat_template, special), ""
        except ChatTemplateError as error:
            _log.warning("the model's chat template does not work: %s", error)
            return None, f"the chat template of the model {self.names[0]} does not work ({error}): {advice}"

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- before the engine ----

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not the one served. No name means it."""
        if name is not None and name not in self.names:
            raise APIError(404, f"The model `{name}` does not exist. Served here: {', '.join(self.names)}.", "model")

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise APIError(400, "the server has no tokenizer (--skip-tokenizer-init): give the prompt as token ids")
        return self.engine.tokenizer

    async def in_thread(self, function: Callable[..., _T], *args: Any, num_chars: int | None = None) -> _T:
        """Text work beside the event loop: long prompts and slow templates hold up nobody else.

        `num_chars`: how much text it is, where that is known; a short one is done sooner than it gets there and back.
        """
        try:
            if num_chars is not None and num_chars <= _SHORT_TEXT:
                return function(*args)
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        except TokenizerError as error:
            raise APIError(400, str(error)) from None

    def sampling(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        *,
        max_tokens: int | None,
        default_max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        renamed: Mapping[str, str],
    ) -> SamplingParams:
        """The request's values, else the model's defaults, else OpenAI's. 400 names a field that is out of range.

        `renamed`: what this endpoint calls fields of `SamplingParams` that it calls otherwise.
        """
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        if request.logit_bias:
            given["logit_bias"] = _by_token_id(request.logit_bias)
        defaults = {"max_tokens": default_max_tokens, **self.engine.default_sampling}
        try:
            return SamplingParams(**{**defaults, **given, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs})
        except ValueError as error:
            raise bad_value(error, renamed) from None

    async def prepare(self, sampling: SamplingParams, structured: StructuredOutputs) -> SamplingParams:
        """`sampling` with a grammar for the answer, checked beside the event loop. `ValueError` when it cannot be."""
        return await self.engine.prepare(sampling.clone(structured_outputs=structured))

    def takes_several_calls(self, request: ChatCompletionRequest) -> bool:
        """Whether an answer to it may call more than one tool."""
        named = isinstance(request.tool_choice, NamedTool)
        return request.parallel_tool_calls is not False and not named and not self.single_calls

    async def encoded(self, given: Prompt, add_special_tokens: bool) -> list[list[int]]:
        """Each prompt's token ids."""
        num_chars = sum(len(each) for each in _several(given) if isinstance(each, str))
        return await self.in_thread(self.encode_prompts, given, add_special_tokens, num_chars=num_chars)

    def encode_prompts(self, given: Prompt, add_special_tokens: bool) -> list[list[int]]:
        """Texts as token ids. Takes its time: for a thread."""
        several = _several(given)
        return [self.tokenizer.encode(each, add_special_tokens) if isinstance(each, str) else each for each in several]

    def truncated(self, prompt: list[int], most: int | None, room: int, *, keep_first: bool = False) -> list[int]:
        """The last `most` tokens of the prompt, or the first; with -1 as many as leave `room` for the answer."""
        if most is None:
            return prompt
        if most < 0:
            most = max(self.engine.max_model_len - room, 1)
        return prompt[:most] if keep_first else prompt[max(len(prompt) - most, 0) :]

    # ---- to the engine ----

    def generate(
        self,
        kind: str,
        request: ChatCompletionRequest | CompletionRequest,
        prompts: list[list[int]],
        sampling: SamplingParams,
        renamed: Mapping[str, str],
    ) -> Generation:
        """Begin the answers to `prompts`. 400 when one does not fit the model, 503 when the engine takes no more.

        The answer's id is `kind` and the request's own `request_id`, or a new one.
        """
        if not self.engine.generates:
            message = f"The model `{self.names[0]}` is published for embeddings and generates nothing."
            raise APIError(400, f"{message} Use /v1/embeddings.", "model")
        self._check_prompts(prompts, renamed.get("prompt", "prompt"), 1)
        try:
            asked = [
                EngineRequest("", prompt, each, None, request.cache_salt or "", request.priority or 0)
                for prompt in prompts
                for each in with_samples(self._limited(prompt, sampling))
            ]
        except ValueError as error:
            raise bad_value(error, renamed) from None
        return self._begin(kind, request, prompts, sampling.n, asked, renamed)

    def _limited(self, prompt: list[int], sampling: SamplingParams) -> SamplingParams:
        """With `max_tokens` at most what the context has room for."""
        room = self.engine.max_model_len - len(prompt)
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        return sampling if max_tokens == sampling.max_tokens else sampling.clone(max_tokens=max_tokens)

    def embed(self, request: EmbeddingRequest, prompts: list[list[int]], pooling: PoolingParams) -> Generation:
        """The same for embeddings: each is one update of its prompt's only sample."""
        self._check_prompts(prompts, "messages" if request.input is None else "input", 0)
        asked = [
            EngineRequest("", prompt, UNSAMPLED, pooling, request.cache_salt or "", request.priority or 0)
            for prompt in prompts
        ]
        return self._begin("embd-", request, prompts, 1, asked, {"prompt": "input"})

    def _begin(
        self,
        kind: str,
        request: ChatCompletionRequest | CompletionRequest | EmbeddingRequest,
        prompts: list[list[int]],
        n: int,
        asked: list[EngineRequest],
        renamed: Mapping[str, str],
    ) -> Generation:
        """Begin the `n` samples of each prompt."""
        self._check_room(len(prompts) * n)
        unique = uuid.uuid4().hex
        public_id = f"{kind}{request.request_id or unique}"
        if public_id in self.running:
            raise APIError(400, f"request_id: {public_id} is being answered", "request_id")
        engine_id = f"{public_id}-{unique}" if request.request_id else public_id
        samples: list[Sample] = []
        try:
            for index, each in enumerate(asked):
                sample_id = f"{engine_id}-{index}" if len(asked) > 1 else engine_id
                watch = self.metrics.watch(len(each.prompt_token_ids), each.sampling)
                updates = self.engine.generate(replace(each, request_id=sample_id))
                samples.append(Sample(sample_id, index, index // n, updates, watch))
        except ValueError as error:
            raise bad_value(error, renamed) from None
        except EngineDeadError as error:
            raise APIError(503, f"the engine is not running: {error}") from None
        if self.settings.enable_log_requests:
            lengths = ", ".join(str(len(prompt)) for prompt in prompts)
            _log.info("request %s: %s prompt tokens, %s", public_id, lengths, asked[0].pooling or asked[0].sampling)
        usage = Usage(sum(map(len, prompts)))
        model = request.model or self.names[0]
        return Generation(public_id, int(time.time()), model, n, prompts, samples, usage, self.metrics, self.running)

    def load(self) -> dict[str, Any]:
        """How busy the server is; what the engine has not said yet is 0."""
        stats = self.engine.stats
        return {
            "server_load": len(self.running),
            "num_requests_running": stats.num_running if stats is not None else 0,
            "num_requests_waiting": stats.num_waiting if stats is not None else 0,
            "kv_cache_usage": stats.kv_cache_usage if stats is not None else 0.0,
            "num_blocks": self.engine.num_blocks,
            "num_free_blocks": stats.num_free_blocks if stats is not None else self.engine.num_blocks,
        }

    async def abort(self, request_id: str) -> None:
        """End a request: its client gets what there is. 404 when there is none of this id."""
        generation = self.running.get(request_id)
        if generation is None:
            raise APIError(404, f"no request {request_id!r} is being answered", "request_id")
        for sample in generation.samples:
            await self.engine.abort(sample.request_id)

    def _check_prompts(self, prompts: list[list[int]], prompt_field: str, room: int) -> None:
        """`room`: tokens of the context that are not the prompt's."""
        most = self.engine.max_model_len
        for prompt in prompts:
            if not prompt:
                raise APIError(400, f"{prompt_field} is empty: it must have at least one token", prompt_field)
            if len(prompt) + room > most:
                kept = ", at least one of them for the answer" if room else ""
                raise APIError(
                    400,
                    f"This model's maximum context length is {most} tokens{kept}. "
                    f"However, your prompt has {len(prompt)} tokens. Please shorten it.",
                    prompt_field,
                )

    def _check_room(self, num_new: int) -> None:
        most = self.settings.max_num_queued_reqs
        if most is None:
            return
        running = self.engine.stats.num_running if self.engine.stats is not None else 0
        waiting = max(self.engine.num_requests - running, 0)
        if waiting and waiting + num_new > most:
            self.metrics.rejected("queue_full")
            raise APIError(503, f"{waiting} requests are waiting, and at most {most} may: try again later")
