"""/v1/completions: continues texts or token ids, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from engine import RequestUpdate
from engine.core.batch import TokenLogprobs
from server.apis.openai.completions.protocol import CompletionRequest
from server.apis.openai.errors import DONE, failure
from server.apis.openai.fields import prompts_of
from server.apis.openai.logprobs import LegacyLogprobs, prompt_logprobs
from server.apis.openai.streaming import CompletionStream, head_members
from server.apis.openai.usage import metrics_object, usage_object
from server.generation.generation import Generation, Sample
from server.generation.model import Model
from server.generation.server_state import ServerState
from server.generation.start import generate
from server.generation.warnings import Warnings
from server.http.callers import caller_of
from server.http.reading import converted
from server.http.responses import streamed, whole
from server.http.sse import event

_encode = msgspec.json.encode
_TEXT_EVENT = (
    b'data: %b,"choices":[{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)


def add_routes(app: FastAPI, server: ServerState) -> None:
    model = server.model

    @app.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        warnings, asked = await converted(request, body, CompletionRequest.neutral)
        generation = await generate(server, asked, warnings, caller_of(request))
        if body.stream:
            keep_alive = server.settings.sse_keep_alive_interval
            return streamed(
                _events(model, body, generation, warnings), warnings, failure=failure, end=DONE, keep_alive=keep_alive
            )
        return await whole(_answer(model, body, generation, warnings), warnings)


def _echoes(model: Model, body: CompletionRequest, generation: Generation) -> list[str]:
    """Return the echo before the answers to each prompt."""
    if not body.echo:
        return [""] * len(generation.prompts)
    skip, is_whole = body.skip_special_tokens is not False, body.truncate_prompt_tokens is None
    return [
        text
        if isinstance(text, str) and is_whole
        else model.tokenizer.decode(ids, skip and isinstance(text, str))  # token ids: keep all
        for text, ids in zip(prompts_of(body.prompt), generation.prompts, strict=True)
    ]


class _Choice:
    """Collects one answer while it is generated."""

    def __init__(self, model: Model, body: CompletionRequest, prompt: list[int]) -> None:
        self._body, self._prompt = body, prompt
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: LegacyLogprobs | None = None
        if body.logprobs is not None:
            skip, as_ids = body.skip_special_tokens is not False, bool(body.return_tokens_as_token_ids)
            self._logprobs = LegacyLogprobs(model.tokenizer, skip, as_ids)
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def begin(self, echo: str, scores: list[TokenLogprobs] | None) -> None:
        """Add the prompt's echo and the log probabilities of its tokens."""
        self._text.append(echo)
        if scores is not None and self._logprobs is not None and self._body.echo:
            self._logprobs.add_prompt(self._prompt, scores)

    def add(self, update: RequestUpdate) -> None:
        self._finish_reason, self._stop_reason = update.finish_reason, update.stop_reason
        if self._body.only_echoes:  # discard the dummy token
            self._finish_reason, self._stop_reason = update.finish_reason and "length", None
            return
        self._text.append(update.text)
        if self._body.return_token_ids:
            self._token_ids += update.token_ids
        if self._logprobs is not None and update.logprobs is not None:
            self._logprobs.add(update.token_ids, update.logprobs)

    def take(self, index: int) -> dict[str, Any] | None:
        """Return what is new as an object of `choices`; None if nothing is."""
        text, self._text = "".join(self._text), []
        logprobs = self._logprobs.take() if self._logprobs is not None else None
        if not text and self._finish_reason is None and not (logprobs and logprobs["tokens"]):
            return None
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"], self._token_ids = self._token_ids, []
        return choice


async def _answer(model: Model, body: CompletionRequest, generation: Generation, warnings: Warnings) -> bytes:
    """Return the response's JSON."""
    updates: list[list[RequestUpdate]] = [[] for _ in generation.samples]
    async with aclosing(generation.events()) as events:
        async for sample, update, _ in events:
            updates[sample.index].append(update)
    num_chars = None if body.is_scored else generation.usage.total_tokens
    return await model.in_thread(
        _encoded, model, body, generation, warnings, updates, tenant=generation.tenant, num_chars=num_chars
    )


def _encoded(
    model: Model,
    body: CompletionRequest,
    generation: Generation,
    warnings: Warnings,
    updates: list[list[RequestUpdate]],
) -> bytes:
    """Encode the response. `updates`: all updates of each sample."""
    if body.only_echoes:
        generation.usage.completion_tokens = 0
    scores = [updates[sample.index][0].prompt_logprobs for sample in generation.samples[:: generation.n]]
    echoes = _echoes(model, body, generation)
    choices = []
    for sample in generation.samples:
        at = sample.prompt_index
        choice = _Choice(model, body, generation.prompts[at])
        choice.begin(echoes[at], scores[at])
        for update in updates[sample.index]:
            choice.add(update)
        taken = choice.take(sample.index) or {}
        taken["prompt_token_ids"] = generation.prompts[at] if body.return_token_ids else None
        taken["prompt_logprobs"] = None
        if body.prompt_logprobs is not None and (found := scores[at]) is not None:
            taken["prompt_logprobs"] = prompt_logprobs(model.info.tokenizer, generation.prompts[at], found)
        choices.append(taken)
    answer = {
        **head_members(generation, "text_completion"),
        "choices": choices,
        "usage": usage_object(generation.usage),
        "metrics": metrics_object(generation.timings),
    }
    return _encode(answer)[:-1] + warnings.member + b"}"


async def _events(
    model: Model, body: CompletionRequest, generation: Generation, warnings: Warnings
) -> AsyncGenerator[bytes, None]:
    """Yield the response's events. A prompt's echo comes first."""
    tenant, num_tokens = generation.tenant, generation.usage.prompt_tokens if body.echo else 0
    echoes = await model.in_thread(_echoes, model, body, generation, tenant=tenant, num_chars=num_tokens)
    stream = _Stream(model, body, generation, warnings, echoes)
    begun, head = stream.only_text_from_here, stream.head
    async with aclosing(generation.events()) as events:
        async for sample, update, _ in events:
            if sample.index in begun and update.finish_reason is None:
                if update.text:  # fast path for most events: the same bytes as from `stream.write`
                    yield _TEXT_EVENT % (head, sample.index, _encode(update.text))
            elif update.prompt_logprobs is not None:
                yield await model.in_thread(stream.write, sample, update, tenant=tenant)
            elif data := stream.write(sample, update):
                yield data
    if stream.with_usage:
        yield stream.usage_event()


class _Stream(CompletionStream):
    """Writes the events of a streamed response."""

    def __init__(
        self,
        model: Model,
        body: CompletionRequest,
        generation: Generation,
        warnings: Warnings,
        echoes: list[str],
    ) -> None:
        """`echoes`: the echo before the answers to each prompt."""
        super().__init__(body, generation, "text_completion")
        self._model, self._body, self._echoes = model, body, echoes
        self._choices: dict[int, _Choice] = {}
        self._begun: set[int] = set()  # indexes of choices that have had an event
        self._warnings = warnings.member  # cleared once an event has carried them
        self._only_text = not (
            self.usage_always or body.return_token_ids or body.only_echoes or body.logprobs is not None
        )
        # Indexes of choices with text-only events until their last event.
        self.only_text_from_here: set[int] = set()

    def write(self, sample: Sample, update: RequestUpdate) -> bytes:
        """Return the event of one update; empty if the update adds nothing."""
        body, index, at = self._body, sample.index, sample.prompt_index
        prompt = self._generation.prompts[at]
        if index not in self._choices:
            self._choices[index] = _Choice(self._model, body, prompt)
            self._choices[index].begin(self._echoes[at], update.prompt_logprobs)
        self._choices[index].add(update)
        if body.only_echoes:
            self._generation.usage.completion_tokens = 0
        taken = self._choices[index].take(index)
        if taken is None:  # the text is held back: it may be the start of a stop string
            return b""
        if body.return_token_ids and index not in self._begun:
            taken["prompt_token_ids"] = prompt
        self._begun.add(index)
        warnings, self._warnings = self._warnings, b""
        if self._only_text:
            self.only_text_from_here.add(index)
        return event(b'%b,"choices":[%b]%b%b}' % (self.head, _encode(taken), self.usage_member(), warnings))
