"""/v1/embeddings: texts, token ids or a conversation in, vectors out. Knows the shapes of both; runs no engine."""

from __future__ import annotations

import base64

import msgspec

from engine.core.pooling_params import PoolingParams
from engine.output_collector import EmbeddingOutput
from server.generation.conversation import encode_messages
from server.generation.served_model import Generation, Serving
from server.http.errors import APIError, bad_value
from server.http.fields import Ignored
from server.openai.protocol import EmbeddingChatRequest, EmbeddingRequest

_encode = msgspec.json.encode


async def begin(serving: Serving, request: EmbeddingRequest) -> Generation:
    """Check everything and start."""
    serving.check_model(request.model)
    try:
        pooling = PoolingParams(
            pooling=request.pooling or serving.engine.default_pooling,
            normalize=request.normalizes,
            dimensions=request.dimensions,
        )
    except ValueError as error:
        raise bad_value(error, {}) from None
    most, keep_first = request.truncate_prompt_tokens, request.truncation_side == "right"
    prompts = await serving.in_thread(_encode_prompts, serving, request)
    prompts = [serving.truncated(prompt, most, 0, keep_first=keep_first) for prompt in prompts]
    return serving.embed(request, prompts, pooling)


def _encode_prompts(serving: Serving, request: EmbeddingRequest) -> list[list[int]]:
    if isinstance(request, EmbeddingChatRequest):
        special = bool(request.add_special_tokens)
        return [encode_messages(serving, request.messages, request.template_options(), special).token_ids]
    return serving.encode_prompts(request.input, request.add_special_tokens is not False)


async def answer(serving: Serving, request: EmbeddingRequest, generation: Generation, ignored: Ignored) -> bytes:
    """The response's JSON."""
    found = [b""] * len(generation.samples)
    async for sample, update in generation.updates():
        if update.embedding is None:
            raise APIError(409, "the request was aborted")
        found[sample.index] = update.embedding
    end = _encode({"model": generation.model, "usage": generation.usage.as_dict()})[1:-1]
    data = await serving.in_thread(_data, found, request.encoding_format == "base64")
    return b'{"id":%b,"object":"list","created":%d,"data":[%b],%b%b}' % (
        _encode(generation.id), generation.created, data, end, ignored.member,
    )  # fmt: skip


def _data(embeddings: list[bytes], as_base64: bool) -> bytes:
    """One by one, so that a long list holds up nobody else."""
    return b",".join(
        _encode(
            {
                "index": index,
                "object": "embedding",
                "embedding": base64.b64encode(each).decode() if as_base64 else EmbeddingOutput.read(each).embedding,
            }
        )
        for index, each in enumerate(embeddings)
    )
