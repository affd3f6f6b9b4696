"""The model being served: its engine, its names, its chat template, and how text becomes token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import Request

from engine.core.batch import SchedulerStats
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.models.classifier import Classifier
from engine.processing.output_collector import RequestUpdate
from engine.replicas.in_flight import Outstanding
from engine.replicas.state import EngineState
from engine.text.chat_template import ChatTemplateError
from engine.text.tokenizer import Tokenizer, TokenizerError
from server.generation.chat_format import ChatFormats
from server.generation.conversation import CheckText, ConversationEncoder, Prompt
from server.generation.generation import Generation
from server.generation.queue import RequestQueue
from server.generation.request import PromptRequest, TextPrompts
from server.http.bodies import Body
from server.http.callers import Caller, caller_of
from server.http.errors import APIError
from server.http.rate_limits import RateLimits
from server.http.reading import is_large
from server.http.warnings import Warnings
from server.http.workers import Workers
from server.metrics import Metrics, ReplicaClient
from server.observability.readiness import Readiness
from server.observability.recorder import TrafficRecorder
from server.observability.requests import RequestLog
from server.settings import ServerConfig

_SHORT_TEXT = 2000  # characters, tokenized in less than a millisecond
B = TypeVar("B", bound=Body)
T = TypeVar("T")


class EngineClient(Protocol):
    """The engine interface that the server uses; `engine.AsyncEngine` implements it."""

    outstanding: Outstanding
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int

    @property
    def replicas(self) -> Sequence[ReplicaClient]: ...
    @property
    def stats(self) -> SchedulerStats | None: ...
    @property
    def state(self) -> EngineState: ...
    async def state_change(self, seen: EngineState) -> EngineState: ...
    @property
    def model_name(self) -> str: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def architecture(self) -> str: ...
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
    @property
    def classifier(self) -> Classifier | None: ...
    async def prepare(self, sampling: SamplingParams, owner: str = "") -> SamplingParams: ...
    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]: ...
    async def abort(self, request_id: str) -> None: ...


class ServedModel:
    """A served model, used by all endpoints."""

    def __init__(
        self,
        engine: EngineClient,
        settings: ServerConfig,
        served_model_names: Sequence[str],
        metrics: Metrics,
        workers: Workers,
        readiness: Readiness,
    ) -> None:
        """Raises `ConfigError` if the configured chat template does not compile or the trace cannot be written."""
        self.engine, self.settings, self.metrics, self._workers = engine, settings, metrics, workers
        self.names = list(served_model_names)
        self.readiness = readiness
        self.started = int(time.time())
        self.chats = ChatFormats(engine.tokenizer, settings, self.names[0])
        # For text pairs only a configured template is used: rerankers inherit the chat template of their base model.
        self._pair_format = self.chats.default if settings.chat_template is not None else None
        self.running: dict[tuple[str, str], Generation] = {}  # by owner and id
        self.requests = RequestLog()
        metrics.registry.register(self.requests)
        self.rate_limits = RateLimits()
        self.queue = RequestQueue(
            engine.outstanding, engine.max_num_seqs, settings.max_num_queued_reqs, metrics.rejected
        )
        self.recorder: TrafficRecorder | None = None
        if settings.record_trace is not None:
            self.recorder = TrafficRecorder(Path(settings.record_trace).expanduser(), engine.block_size)

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def check_name(self, name: str | None) -> None:
        """Raise `APIError` 404 if `name` is not a served name. None stands for the served model."""
        if name is not None and name not in self.names:
            reason = f"The model `{name}` does not exist. Served here: {', '.join(self.names)}."
            raise APIError(404, reason, "model", lead=None)

    # ---- text ----

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise APIError(400, "the server has no tokenizer (--skip-tokenizer-init): send the prompt as token ids")
        return self.engine.tokenizer

    async def in_thread(self, function: Callable[..., T], *args: Any, owner: str, num_chars: int | None = None) -> T:
        """Run text processing in a worker thread, so that long prompts and slow templates do not delay other requests.

        The threads are divided fairly between owners. `num_chars`: length of the text, if known. Short text is
        processed on the event loop, which is faster than switching threads. Raises `APIError` 400 on `TokenizerError`.
        """
        try:
            if num_chars is not None and num_chars <= _SHORT_TEXT:
                return function(*args)
            return await self._workers.run(function, *args, owner=owner)
        except TokenizerError as error:
            raise APIError(400, str(error)) from None

    async def read(
        self, request: Request, body: B, convert: Callable[[B], T], *, is_long: bool = False
    ) -> tuple[Warnings, T]:
        """Return the warnings about `body`, and `convert(body)`. Large bodies, or `is_long`, run in a thread."""

        def work() -> tuple[Warnings, T]:
            return Warnings(self.settings.strict).add_fields(body), convert(body)

        owner = caller_of(request).owner("")
        return await self._workers.run(work, owner=owner) if is_long or is_large(request) else work()

    async def encode(self, request: PromptRequest, *, is_to_fit: bool = False) -> list[Prompt]:
        """Return the tokenized prompts, not truncated.

        `is_to_fit`: reject prompts with too many characters for the context before tokenizing them.
        """
        given = request.prompt
        check = self._check_length if is_to_fit and request.truncate_prompt_tokens is None else None
        if isinstance(given, list):
            num_chars = sum(sum(map(len, each)) if isinstance(each, tuple) else len(each) for each in given)
            if self._pair_format is not None:
                num_chars += len(given) * len(self._pair_format.source)
            return await self.in_thread(
                self._encode_texts,
                given,
                request.add_special_tokens,
                check,
                owner=request.owner,
                num_chars=num_chars,
            )
        if (chat := self.chats.of(request)) is None:
            raise APIError(400, self.chats.missing)
        encoder = ConversationEncoder(chat, self.tokenizer)
        return [
            await self.in_thread(
                encoder.encode,
                given,
                request.add_special_tokens,
                check,
                owner=request.owner,
                num_chars=given.num_chars,
            )
        ]

    def _encode_texts(self, given: TextPrompts, add_special_tokens: bool, check: CheckText | None) -> list[Prompt]:
        prompts = [self._rendered(each) if isinstance(each, tuple) else each for each in given]
        for each in prompts:
            if check is not None and not isinstance(each, list):
                check(each if isinstance(each, str) else "".join(each))
        return [Prompt(self._encode_text(each, add_special_tokens)) for each in prompts]

    def _rendered(self, pair: tuple[str, str]) -> str | tuple[str, str]:
        """Render a pair of texts for a reranker with the configured template, if there is one."""
        if self._pair_format is None:
            return pair
        messages = [{"role": "query", "content": pair[0]}, {"role": "document", "content": pair[1]}]
        variables = self.settings.default_chat_template_kwargs
        try:
            return self._pair_format.renderer.template.render(messages, add_generation_prompt=False, **variables)
        except ChatTemplateError as error:
            raise APIError(400, f"the chat template rejected the texts: {error}", lead=None) from None

    def _encode_text(self, given: str | list[int] | tuple[str, str], add_special_tokens: bool) -> list[int]:
        if isinstance(given, list):
            return given
        if isinstance(given, tuple):
            return self.tokenizer.encode_pair(*given)
        return self.tokenizer.encode(given, add_special_tokens)

    def _check_length(self, text: str) -> None:
        most = self.engine.max_model_len
        if len(text) > most and (per_token := self.tokenizer.max_chars_per_token) and len(text) > most * per_token:
            reason = (
                f"This model's maximum context length is {most} tokens. "
                f"However, your prompt has {len(text)} characters, which need more tokens. Please shorten it."
            )
            raise APIError(400, reason, "prompt", lead=None)

    def truncated(self, prompt: Prompt, request: PromptRequest, num_reserved: int) -> list[int]:
        """Return the prompt's tokens, truncated if requested. `num_reserved`: tokens to leave for the answer."""
        token_ids, most = prompt.token_ids, request.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most < 0:
            most = max(self.engine.max_model_len - num_reserved, 1)
        return token_ids[:most] if request.keep_first_tokens else token_ids[max(len(token_ids) - most, 0) :]

    # ---- all requests ----

    def load(self) -> dict[str, Any]:
        """Return the server's load. Values not yet reported by the engine are 0."""
        stats = self.engine.stats
        return {
            "server_load": len(self.running),
            "num_requests_running": stats.num_running if stats is not None else 0,
            "num_requests_waiting": stats.num_waiting + stats.num_deferred if stats is not None else 0,
            "kv_cache_usage": stats.kv_cache_usage if stats is not None else 0.0,
            "num_blocks": self.engine.num_blocks,
            "num_free_blocks": stats.num_free_blocks if stats is not None else self.engine.num_blocks,
        }

    async def abort(self, request_id: str, caller: Caller) -> None:
        """Abort a request of `caller`; its client gets the partial answer. Raises `APIError` 404 for an unknown id."""
        generation = self.running.get((caller.name, request_id))
        if generation is None:
            raise APIError(404, f"no running request has the id {request_id!r}", "request_id", lead=None)
        for sample in generation.samples:
            await self.engine.abort(sample.request_id)
