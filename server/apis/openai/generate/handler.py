"""/inference/v1/generate: continues token ids with token ids, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import chain
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from engine import RequestUpdate
from engine.core.batch import TokenLogprobs
from server.apis.openai.errors import DONE, failure
from server.apis.openai.generate.protocol import TokensRequest
from server.apis.openai.logprobs import LOWEST_LOGPROB, prompt_logprobs
from server.apis.openai.usage import usage_object
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


def add_routes(app: FastAPI, server: ServerState) -> None:
    model = server.model

    @app.post("/inference/v1/generate", response_model=None)
    async def generate_tokens(body: TokensRequest, request: Request) -> Response:
        warnings, asked = await converted(request, body, TokensRequest.neutral)
        generation = await generate(server, asked, warnings, caller_of(request))
        if body.stream:
            keep_alive = server.settings.sse_keep_alive_interval
            events = _events(body, generation, warnings)
            return streamed(events, warnings, failure=failure, end=DONE, keep_alive=keep_alive)
        return await whole(_answer(model, generation, warnings), warnings)


async def _answer(model: Model, generation: Generation, warnings: Warnings) -> bytes:
    """Return the response's JSON."""
    updates: list[list[RequestUpdate]] = [[] for _ in generation.samples]
    async with aclosing(generation.events()) as events:
        async for sample, update, _ in events:
            updates[sample.index].append(update)
    sampling = generation.samples[0].sampling
    is_scored = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    num_chars = None if is_scored else generation.usage.total_tokens
    return await model.in_thread(
        _encoded, model, generation, warnings, updates, tenant=generation.tenant, num_chars=num_chars
    )


def _encoded(model: Model, generation: Generation, warnings: Warnings, updates: list[list[RequestUpdate]]) -> bytes:
    """Encode the response. `updates`: all updates of each sample."""
    scores: list[Any] | None = None
    if (found := updates[0][0].prompt_logprobs) is not None:
        scores = prompt_logprobs(model.info.tokenizer, generation.prompts[0], found)
    answer = {
        "request_id": generation.id,
        "model": generation.model,
        "created": generation.created,
        "choices": [_choice(sample, updates[sample.index]) for sample in generation.samples],
        "usage": usage_object(generation.usage),
        "prompt_logprobs": scores,
        "kv_transfer_params": None,
    }
    return _encode(answer)[:-1] + warnings.member + b"}"


async def _events(body: TokensRequest, generation: Generation, warnings: Warnings) -> AsyncGenerator[bytes, None]:
    """Yield the response's events. The first event carries the warnings."""
    head, member = _encode({"request_id": generation.id})[:-1], warnings.member
    async with aclosing(generation.events()) as events:
        async for sample, update, _ in events:
            yield event(b'%b,"choices":[%b]%b}' % (head, _encode(_choice(sample, [update])), member))
            member = b""
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event(b'%b,"choices":[],"usage":%b}' % (head, _encode(usage_object(generation.usage))))


def _choice(sample: Sample, updates: list[RequestUpdate]) -> dict[str, Any]:
    """Return an object of `choices` from updates of an answer."""
    found = [_logprobs(update.token_ids, update.logprobs) for update in updates if update.logprobs is not None]
    return {
        "index": sample.index,
        "logprobs": {"content": list(chain.from_iterable(found))} if found else None,
        "finish_reason": sample.finish_reason(updates[-1]),
        "token_ids": list(chain.from_iterable(update.token_ids for update in updates)),
    }


def _logprobs(token_ids: list[int], found: list[TokenLogprobs]) -> list[dict[str, Any]]:
    """Return each token's log probabilities, with tokens named by their ids."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{token_id}", "logprob": max(logprob, LOWEST_LOGPROB), "bytes": None}

    return [
        entry(token_id, at.logprob)
        | {"top_logprobs": [entry(*top) for top in zip(at.top_ids, at.top_logprobs, strict=True)]}
        for token_id, at in zip(token_ids, found, strict=True)
    ]
