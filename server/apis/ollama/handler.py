"""Ollama's API: answers as lines of JSON, embeddings, and model information."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

import engine as quire
from engine import EmbeddingOutput, RequestUpdate
from server.apis.ollama.errors import failure
from server.apis.ollama.protocol import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, ShowRequest
from server.apis.openai.logprobs import logprobs_content
from server.generation.caller import Caller
from server.generation.generation import TOOL_CALLS, Generation, Sample
from server.generation.model import Model
from server.generation.request import EmbeddingRequest
from server.generation.server_state import ServerState
from server.generation.siblings import ListedModel
from server.generation.start import embed, generate
from server.generation.warnings import Warnings
from server.http.bodies import warnings_about
from server.http.callers import caller_of
from server.http.errors import APIError
from server.http.reading import converted
from server.http.responses import json_response, streamed, whole
from server.parsing.pieces import Block, Blocks, CallStart, Content, Piece, Reasoning, json_object

API_VERSION = "0.13.0"  # Ollama's version: clients use it to detect features
LATEST = ":latest"
NOT_HERE = ("pull", "push", "create", "copy", "delete")  # endpoints that manage models
_HERE = ("chat", "generate", "embed", "embeddings", "tags", "show", "ps", "version", "blobs")
PATHS = tuple(f"/api/{name}" for name in (*_HERE, *NOT_HERE))
_FOREVER = "2318-01-01T00:00:00Z"  # Ollama's expiry time of a model that is never unloaded
_encode = msgspec.json.encode


def add_routes(app: FastAPI, server: ServerState) -> None:
    model = server.model

    async def answer(body: ChatRequest | GenerateRequest, request: Request, shape: _Shape) -> Response:
        name = served_name(model, body.model)
        has_template = model.chats.default is not None
        warnings, asked = await converted(request, body, lambda body: body.neutral(name, has_template))
        if body.is_empty:
            model.check_name(name, caller_of(request))
            unloads = body.keep_alive in (0, "0", "0s") and len(server.listed()) > 1  # a single model stays loaded
            line = {
                "model": body.model,
                "created_at": _now(),
                **shape.members(Blocks()),
                "done": True,
                "done_reason": "unload" if unloads else "load",
            }
            return json_response(line, warnings)
        generation = await generate(server, asked, warnings, caller_of(request))
        writer = _Writer(model, body, shape, generation, warnings)
        if not body.streams:
            return await whole(writer.whole(), warnings)
        return streamed(
            writer.lines(), warnings, failure=failure, end=b"", keep_alive=0, media_type="application/x-ndjson"
        )

    @app.post("/api/chat", response_model=None)
    async def ollama_chat(body: ChatRequest, request: Request) -> Response:
        return await answer(body, request, _CHAT)

    @app.post("/api/generate", response_model=None)
    async def ollama_generate(body: GenerateRequest, request: Request) -> Response:
        return await answer(body, request, _GENERATE)

    @app.post("/api/embed", response_model=None)
    async def ollama_embed(body: EmbedRequest, request: Request) -> Response:
        name = served_name(model, body.model)
        warnings, asked = await converted(request, body, lambda body: body.neutral(name))
        if not body.input:
            model.check_name(name, caller_of(request))
            return json_response({"model": body.model, "embeddings": []}, warnings)
        generation, vectors = await _embedded(server, asked, request)
        counts = {"total_duration": _total(generation), "load_duration": 0}
        counts["prompt_eval_count"] = generation.usage.prompt_tokens
        return json_response({"model": body.model, "embeddings": vectors, **counts}, warnings)

    @app.post("/api/embeddings", response_model=None)
    async def ollama_embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        name = served_name(model, body.model)
        warnings, asked = await converted(request, body, lambda body: body.neutral(name))
        if not body.prompt:
            model.check_name(name, caller_of(request))
            return json_response({"embedding": []}, warnings)
        _, (vector,) = await _embedded(server, asked, request)
        return json_response({"embedding": vector}, warnings)

    add_model_routes(app, server)


def add_model_routes(app: FastAPI, server: ServerState) -> None:
    """Add the endpoints that describe the models, and reject those that manage them."""

    model = server.model

    @app.get("/api/tags")
    async def ollama_tags(request: Request) -> dict[str, Any]:
        caller = caller_of(request)
        await _count_weights(server.listed(), caller)
        return {"models": [card for listed in server.listed() for card in _tags(listed, caller)]}

    @app.get("/api/ps")
    async def ollama_ps(request: Request) -> dict[str, Any]:
        caller = caller_of(request)
        await _count_weights(server.listed(), caller)
        return {"models": [card for listed in server.listed() if listed.is_awake for card in _running(listed, caller)]}

    @app.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        return {"version": API_VERSION, "quire": quire.__version__}

    @app.post("/api/show", response_model=None)
    async def ollama_show(body: ShowRequest, request: Request) -> Response:
        name, caller = body.model or body.name, caller_of(request)
        model.check_name(served_name(model, name) if name else None, caller)
        await _count_weights(server.listed(), caller)
        return json_response(_description(model), warnings_about(body, server.settings.strict))

    async def not_here() -> None:
        raise APIError(501, "this server does not manage models: choose the model with `quire serve MODEL`")

    for name in NOT_HERE:
        app.add_api_route(f"/api/{name}", not_here, methods=["POST", "DELETE"], include_in_schema=False)
    app.add_api_route("/api/blobs/{digest}", not_here, methods=["POST", "GET"], include_in_schema=False)


# ---- what is served ----


def served_name(model: Model, name: str) -> str:
    """Return the served name for a client's model name, which may end with `:latest`."""
    return name if model.serves(name) else name.removesuffix(LATEST)


async def _count_weights(all_listed: Sequence[ListedModel], caller: Caller) -> None:
    """Let the figures of the models' weights be computed, the first time in a thread: they take up to seconds."""
    for model in (listed.model for listed in all_listed):
        if model is not None and (weights := model.info.weights) is not None:
            await model.in_thread(weights.count, tenant=caller.tenant(""))


def _tags(listed: ListedModel, caller: Caller) -> list[dict[str, Any]]:
    return [{**_card(listed.model, name), "modified_at": _time(listed.created)} for name in listed.names_for(caller)]


def _running(listed: ListedModel, caller: Caller) -> list[dict[str, Any]]:
    """Return the cards of a model that is awake."""
    assert listed.model is not None
    expires = _FOREVER if listed.expires is None else _time(listed.expires)
    info = listed.model.info
    on_gpu = info.weights.num_bytes_on_gpu if info.weights is not None else 0
    more = {"expires_at": expires, "size_vram": on_gpu, "context_length": info.max_model_len}
    return [{**_card(listed.model, name), **more} for name in listed.names_for(caller)]


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _details(model: Model | None) -> dict[str, Any]:
    """`model`: None: it has not been loaded so far."""
    family = "" if model is None else _family(model)
    weights = None if model is None else model.info.weights
    return {
        "parent_model": "",
        "format": "safetensors" if weights is None else weights.format,
        "family": family,
        "families": [family],
        "parameter_size": "" if weights is None else written_count(weights.num_parameters),
        "quantization_level": "" if weights is None else weights.quantization_level,
    }


def written_count(num_parameters: int) -> str:
    """Return a number of parameters as Ollama writes it: 134.52M, 8.0B."""
    if num_parameters >= 1e9:
        return f"{num_parameters / 1e9:.1f}B"
    return f"{num_parameters / 1e6:.2f}M" if num_parameters >= 1e6 else f"{num_parameters / 1e3:.2f}K"


def _family(model: Model) -> str:
    return model.info.architecture.removesuffix("ForCausalLM").lower()


def _card(model: Model | None, name: str) -> dict[str, Any]:
    tagged, digest = _tagged(name), hashlib.sha256(name.encode()).hexdigest()
    size = model.info.weights.num_bytes if model is not None and model.info.weights is not None else 0
    return {"name": tagged, "model": tagged, "size": size, "digest": digest, "details": _details(model)}


def _description(model: Model) -> dict[str, Any]:
    family, chat, with_tools = _family(model), model.chats.default, model.chats.with_tools
    weights = model.info.weights
    can = {
        "completion": model.info.generates,
        "tools": model.info.generates and with_tools is not None and with_tools.tool_format is not None,
        "thinking": model.info.generates and chat is not None and chat.reasoning_format is not None,
        "vision": model.info.images is not None,
        "embedding": not model.info.generates,  # clients do not offer embedding models for chats
    }
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in sorted(model.info.default_sampling.items())),
        "template": chat.source if chat is not None else "",
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            **({} if weights is None else {"general.parameter_count": weights.num_parameters}),
            f"{family}.context_length": model.info.max_model_len,
        },
        "capabilities": [name for name, there in can.items() if there],
        "modified_at": _time(model.started),
    }


# ---- answers ----


def _message(blocks: Blocks) -> dict[str, Any]:
    """Return the `message` of a chat line."""
    message: dict[str, Any] = {"role": "assistant", "content": blocks.text(Content)}
    if thinking := blocks.text(Reasoning):
        message["thinking"] = thinking
    if calls := [call for block in blocks.calls if (call := _call(block)) is not None]:
        message["tool_calls"] = calls
    return {"message": message}


def _response(blocks: Blocks) -> dict[str, Any]:
    """Return the `response` of a generate line."""
    thinking = blocks.text(Reasoning)
    return {"response": blocks.text(Content), **({"thinking": thinking} if thinking else {})}


def _call(block: Block) -> dict[str, Any] | None:
    """Return a tool call; None if it was cut off, since Ollama's arguments are a JSON object."""
    if (arguments := json_object(block.text or "{}")) is None:
        return None
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class _Shape:
    """The line format of an endpoint."""

    members: Callable[[Blocks], dict[str, Any]]  # the members with the answer
    text: bytes  # template of a text-only line, from `created_at` on


_CHAT = _Shape(_message, b'"created_at":"%b","message":{"role":"assistant","content":%b},"done":false}\n')
_GENERATE = _Shape(_response, b'"created_at":"%b","response":%b,"done":false}\n')


class _Writer:
    """Writes one answer."""

    def __init__(
        self,
        model: Model,
        body: ChatRequest | GenerateRequest,
        shape: _Shape,
        generation: Generation,
        warnings: Warnings,
    ) -> None:
        self._model, self._body, self._shape = model, body, shape
        self._generation, self._warnings = generation, warnings

    async def whole(self) -> bytes:
        """Return the answer as one JSON object."""
        blocks, logprobs, last = Blocks(), list[dict[str, Any]](), {}
        async with aclosing(self._generation.events()) as events:
            async for sample, update, pieces in events:
                blocks.extend(_pieces(sample, update, pieces))
                logprobs += self._logprobs(update)
                last = self._end(sample, update)
        return self._line(blocks, logprobs, last)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer's lines as they arrive. A tool call is sent once it is complete."""
        open_call, head, text = Blocks(), _encode({"model": self._body.model})[:-1] + b",", self._shape.text
        async with aclosing(self._generation.events()) as events:
            async for sample, update, pieces in events:
                if (
                    len(pieces) == 1
                    and type(pieces[0]) is Content
                    and update.finish_reason is None
                    and update.logprobs is None
                    and not open_call.all
                ):  # fast path for most lines: the same bytes as from `_line`
                    yield head + text % (_now().encode(), _encode(pieces[0].text))
                    continue
                blocks, open_call = open_call, Blocks()
                blocks.extend(_pieces(sample, update, pieces))
                finished = update.finish_reason is not None
                if not finished and blocks.all and blocks.all[-1].kind is CallStart:
                    open_call.all.append(blocks.all.pop())
                logprobs = self._logprobs(update)
                if blocks.all or logprobs:
                    yield self._line(blocks, logprobs, {}) + b"\n"
                if finished:
                    yield self._line(Blocks(), [], self._end(sample, update)) + b"\n"

    def _line(self, blocks: Blocks, logprobs: list[dict[str, Any]], last: dict[str, Any]) -> bytes:
        """Return one line. `last`: members of the last line only."""
        line = {
            "model": self._body.model,
            "created_at": _now(),
            **self._shape.members(blocks),
            "done": bool(last),
            **last,
        }
        return _encode(line | ({"logprobs": logprobs} if logprobs else {}))

    def _logprobs(self, update: RequestUpdate) -> list[dict[str, Any]]:
        if not self._body.logprobs or update.logprobs is None:
            return []
        return logprobs_content(self._model.tokenizer, update.token_ids, update.logprobs)

    def _end(self, sample: Sample, update: RequestUpdate) -> dict[str, Any]:
        if (reason := sample.finish_reason(update)) is None:
            return {}
        times, usage = update.timings, self._generation.usage
        return {
            "done_reason": "stop" if reason == TOOL_CALLS else reason,
            "total_duration": _total(self._generation),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(times.first_token_ts - times.scheduled_ts),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(times.last_token_ts - times.first_token_ts),
            **self._warnings.as_dict(),
        }


def _pieces(sample: Sample, update: RequestUpdate, pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of an update. Without a reader (`raw`), the text is the content."""
    return pieces if sample.reader is not None else [Content(update.text)] if update.text else []


async def _embedded(
    server: ServerState, asked: EmbeddingRequest, request: Request
) -> tuple[Generation, list[list[float]]]:
    generation = await embed(server, asked, caller_of(request))
    return generation, [EmbeddingOutput.read(each).embedding for each in await generation.embeddings()]


def _total(generation: Generation) -> int:
    times = generation.timings
    return _nanoseconds(times.last_token_ts - times.arrival_time) if times is not None else 1


def _nanoseconds(seconds: float) -> int:
    """Convert to nanoseconds; at least 1, because clients divide by durations."""
    return max(round(1e9 * seconds), 1)


def _now() -> str:
    return _time(datetime.now(UTC))


def _time(moment: datetime | float) -> str:
    """Format a time as in RFC 3339."""
    moment = moment if isinstance(moment, datetime) else datetime.fromtimestamp(moment, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
