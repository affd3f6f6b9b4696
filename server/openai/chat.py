"""/v1/chat/completions: a conversation in, an answer out, whole or streamed. Knows the shapes of both; runs no engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from engine.core.batch import TokenLogprobs
from engine.text.chat_template import ChatTemplateError
from engine.text.tokenizer import Tokenizer
from server.errors import APIError
from server.openai.protocol import ChatCompletionRequest, Message
from server.openai.serving import Generation, Serving
from server.sse import event

_encode = msgspec.json.encode
_RENAMED = {"logprobs": "top_logprobs", "prompt": "messages", "max_tokens": "max_completion_tokens"}
LOWEST_LOGPROB = -9999.0  # JSON knows no infinity


async def begin(serving: Serving, request: ChatCompletionRequest) -> Generation:
    """Check everything and start the answers."""
    serving.check_model(request.model)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    renamed = _RENAMED if request.max_completion_tokens is not None else {**_RENAMED, "max_tokens": "max_tokens"}
    sampling = serving.sampling(
        request, max_tokens=max_tokens, default_max_tokens=None, logprobs=logprobs, renamed=renamed
    )
    prompt = await serving.in_thread(
        encode_messages, serving, request.messages, request.template_options(), bool(request.add_special_tokens)
    )
    return serving.generate("chatcmpl", [prompt], sampling, renamed)


def encode_messages(
    serving: Serving, messages: list[Message], options: dict[str, Any], add_special_tokens: bool
) -> list[int]:
    """The prompt's token ids by the chat template, which writes the beginning of text itself.

    `options`: arguments of `ChatTemplate.render`.
    """
    if serving.template is None:
        raise APIError(400, serving.no_template)
    keeps_developer = "developer" in serving.template.source
    conversation = [_for_template(message, index, keeps_developer) for index, message in enumerate(messages)]
    try:
        text = serving.template.render(conversation, **{**serving.settings.default_chat_template_kwargs, **options})
    except ChatTemplateError as error:
        raise APIError(400, f"the chat template refuses the messages: {error}", "messages") from None
    return serving.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _for_template(message: Message, index: int, keeps_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: content is one text, the arguments of tool calls are objects."""
    turn = message.model_dump(exclude_none=True, exclude={"annotations"})
    if isinstance(message.content, list):
        turn["content"] = "\n".join(part.text for part in message.content)
    turn.setdefault("content", "")
    if message.role == "developer" and not keeps_developer:
        turn["role"] = "system"
    for number, call in enumerate(turn.get("tool_calls", [])):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = json.loads(arguments or "{}")
            except ValueError:
                field = f"messages[{index}].tool_calls[{number}].function.arguments"
                raise APIError(400, f"{field}: must be JSON, got {arguments[:100]!r}", field) from None
    if not turn.get("tool_calls"):
        turn.pop("tool_calls", None)
    if (reasoning := turn.get("reasoning_content", turn.get("reasoning"))) is not None:
        turn["reasoning"] = turn["reasoning_content"] = reasoning
    return turn


def _role(serving: Serving, request: ChatCompletionRequest) -> str:
    return serving.settings.response_role if request.adds_generation_prompt else request.messages[-1].role


# ---- whole ----


async def answer(serving: Serving, request: ChatCompletionRequest, generation: Generation) -> bytes:
    """The response's JSON."""
    texts: list[list[str]] = [[] for _ in generation.samples]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in generation.samples]
    ends: dict[int, tuple[str | None, int | str | None]] = {}
    async for sample, update in generation.updates():
        texts[sample.index].append(update.text)
        if update.logprobs is not None:
            logprobs[sample.index] += logprobs_content(serving.tokenizer, update.token_ids, update.logprobs)
        ends[sample.index] = (update.finish_reason, update.stop_reason)
    role = _role(serving, request)
    choices = [
        {
            "index": index,
            "message": {"role": role, "content": "".join(texts[index]), "refusal": None},
            "logprobs": {"content": logprobs[index]} if request.logprobs else None,
            "finish_reason": ends[index][0],
            "stop_reason": ends[index][1],
        }
        for index in range(len(generation.samples))
    ]
    return _encode(
        {
            "id": generation.id,
            "object": "chat.completion",
            "created": generation.created,
            "model": generation.model,
            "choices": choices,
            "usage": generation.usage.as_dict(),
        }
    )


# ---- streamed ----


async def events(
    serving: Serving, request: ChatCompletionRequest, generation: Generation
) -> AsyncGenerator[bytes, None]:
    """The response's events. Only what changes is encoded for each: a server streams to hundreds of clients at once."""
    options = request.stream_options
    with_usage = options is not None and bool(options.include_usage)
    usage_always = with_usage and options is not None and bool(options.continuous_usage_stats)
    head = _encode(
        {
            "id": generation.id,
            "object": "chat.completion.chunk",
            "created": generation.created,
            "model": generation.model,
        }
    )[:-1]

    def tail() -> bytes:
        return b',"usage":' + _encode(generation.usage.as_dict()) + b"}" if usage_always else b"}"

    role = _encode(_role(serving, request))
    begun: set[int] = set()
    async for sample, update in generation.updates():
        start = b'%b,"choices":[{"index":%d,"delta":' % (head, sample.index)
        chunks = b""
        if sample.index not in begun:
            begun.add(sample.index)
            delta = b'{"role":%b,"content":""},"logprobs":null,"finish_reason":null}]' % role
            chunks = event(start + delta + tail())
        logprobs = b"null"
        if update.logprobs is not None:
            content = logprobs_content(serving.tokenizer, update.token_ids, update.logprobs)
            logprobs = _encode({"content": content})
        elif not update.text and update.finish_reason is None:  # held back: it may begin a stop string
            if chunks:
                yield chunks
            continue
        end = b"null}]"
        if update.finish_reason is not None:
            end = b'%b,"stop_reason":%b}]' % (_encode(update.finish_reason), _encode(update.stop_reason))
        delta = b'{"content":%b},"logprobs":%b,"finish_reason":' % (_encode(update.text), logprobs)
        yield chunks + event(start + delta + end + tail())
    if with_usage:
        yield event(head + b',"choices":[],"usage":' + _encode(generation.usage.as_dict()) + b"}")


def logprobs_content(tokenizer: Tokenizer, token_ids: list[int], found: list[TokenLogprobs]) -> list[dict[str, Any]]:
    """OpenAI's log-probabilities of chat: one object for each token, with the most likely tokens at its place."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return [
        entry(token_id, at.logprob)
        | {"top_logprobs": [entry(*top) for top in zip(at.top_ids, at.top_logprobs, strict=True)]}
        for token_id, at in zip(token_ids, found, strict=True)
    ]
