"""Generates a response: its object, its events, and the stored copy."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request

from server.apis.openai.logprobs import logprobs_content
from server.apis.openai.responses.asked import Asked, Kept, items_of
from server.apis.openai.responses.background import BackgroundResponse
from server.apis.openai.responses.events import ResponseBuilder
from server.apis.openai.responses.items import messages_of
from server.apis.openai.responses.protocol import LOGPROBS, REASONING, ResponsesRequest
from server.apis.openai.responses.store import StoredResponse, Turn, encoded
from server.generation.errors import RequestError
from server.generation.generation import Generation
from server.generation.model import Model
from server.generation.server_state import ServerState
from server.generation.start import generate
from server.generation.usage import Usage
from server.generation.warnings import MAX_WARNINGS, Warnings
from server.http.callers import caller_of
from server.http.errors import unexpected
from server.http.reading import is_large

# By the engine's finish reason: the response's status and the reason why it is incomplete.
_ENDS = {"length": ("incomplete", "max_output_tokens"), "abort": ("incomplete", "aborted")}


@dataclass(slots=True)
class Working:
    """A response in progress."""

    model: Model
    kept: Kept
    asked: Asked
    generation: Generation
    builder: ResponseBuilder
    background: BackgroundResponse | None  # None: the response is aborted when its client disconnects
    is_large: bool  # the request is large, and so is the response, which repeats it

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response's events. The last event has the whole response; an error becomes `response.failed`."""
        yield self.builder.start()
        try:
            async with aclosing(self._fill()) as filling:
                async for data in filling:
                    yield data
        except RequestError as error:
            last = self.builder.fail(error)
        except Exception as error:
            last = self.builder.fail(unexpected(error))
        else:
            last = b""
        await self._keep()
        if last:
            yield last

    async def answer(self) -> bytes:
        """Return the response's JSON."""
        async with aclosing(self._fill()) as filling:
            async for _ in filling:
                pass
        await self._keep()
        return msgspec.json.encode(self.builder.response)

    async def _fill(self) -> AsyncGenerator[bytes, None]:
        builder, generation = self.builder, self.generation
        reason: str | None = None
        async with aclosing(generation.events()) as events:
            async for sample, update, pieces in events:
                if update.logprobs is not None:
                    builder.hold(logprobs_content(self.model.tokenizer, update.token_ids, update.logprobs))
                reason = sample.finish_reason(update)
                if data := b"".join(map(builder.add, pieces)):
                    yield data
        status, why = _ENDS.get(reason or "", ("completed", None))
        if reason == "abort" and self.background is not None and self.background.is_cancelled:
            status, why = "cancelled", None
        yield builder.finish(status, why, usage_object(generation.usage))

    async def _keep(self) -> None:
        response, owner = self.builder.response, self.generation.owner
        failed = response["status"] == "failed"
        if not failed and self.asked.conversation is not None:
            items = self.asked.input_items | encoded(response["output"])
            self.kept.conversations.append(owner, self.asked.conversation, items)
        if not response["store"] or (failed and self.background is None):
            return
        num_chars = None if self.is_large else 0
        stored = await self.model.in_thread(self._stored, tenant=self.generation.tenant, num_chars=num_chars)
        self.kept.responses.put(owner, response["id"], stored)

    def _stored(self) -> StoredResponse:
        response = self.builder.response
        turn = Turn(self.asked.messages + messages_of(items_of(response["output"])), self.asked.previous)
        events = self.background.events if self.background is not None and self.background.is_kept else []
        return StoredResponse.of(response, self.asked.input_items, turn, events)


async def begin(
    server: ServerState, kept: Kept, body: ResponsesRequest, asked: Asked, warnings: Warnings, request: Request
) -> Working:
    """Check the request and start the response. A background response collects its own events."""
    model = server.model
    for name in (body.include or ())[:MAX_WARNINGS]:
        if name not in (LOGPROBS, REASONING):
            warnings.add(f"{name[:100]!r} has no effect here", "include")
    for path, reason in asked.left_out[:MAX_WARNINGS]:
        warnings.add(reason, *path)
    caller = caller_of(request)
    generation = await generate(server, asked.request, warnings, caller)
    response = _response(body, generation, warnings)
    log: list[bytes] | None = [] if body.background else None
    builder = ResponseBuilder(response, asked.tools, packs_reasoning=REASONING in (body.include or ()), log=log)
    background = BackgroundResponse(response, log) if log is not None else None
    working = Working(model, kept, asked, generation, builder, background, is_large(request))
    if background is not None:
        kept.background.start(caller.name, background, working.events())
    return working


def _response(body: ResponsesRequest, generation: Generation, warnings: Warnings) -> dict[str, Any]:
    """Return the response object without output."""
    sampling = generation.samples[0].sampling
    reasoning, text = body.reasoning, body.text
    format = text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else {"type": "text"}
    verbosity = {"verbosity": text.verbosity} if text is not None and text.verbosity is not None else {}
    conversation = {"conversation": {"id": body.conversation_id}} if body.conversation_id is not None else {}
    return {
        "id": generation.id,
        "object": "response",
        "created_at": generation.created,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": generation.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": format} | verbosity,
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        **conversation,
        **warnings.as_dict(),
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.total_tokens,
    }
