"""/v1/completions: text or token ids in, their continuation out, whole or streamed. Knows the shapes; runs no engine."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.core.batch import TokenLogprobs
from engine.text.tokenizer import Tokenizer
from server.fields import Ignored
from server.openai.chat import LOWEST_LOGPROB
from server.openai.protocol import CompletionRequest
from server.openai.serving import Generation, Serving
from server.sse import event

_encode = msgspec.json.encode
DEFAULT_MAX_TOKENS = 16


async def begin(serving: Serving, request: CompletionRequest) -> Generation:
    """Check everything and start the answers."""
    serving.check_model(request.model)
    sampling = serving.sampling(
        request,
        max_tokens=request.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
        renamed={},
    )
    prompts = await serving.in_thread(_encode_prompts, serving, request)
    return serving.generate("cmpl-", request.request_id, prompts, sampling, {})


def _encode_prompts(serving: Serving, request: CompletionRequest) -> list[list[int]]:
    prompt: Any = request.prompt
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    special = request.add_special_tokens is not False
    return [serving.tokenizer.encode(each, special) if isinstance(each, str) else each for each in several]


def _echoes(serving: Serving, request: CompletionRequest, generation: Generation) -> list[str]:
    """What stands before the answer to each prompt."""
    if not request.echo:
        return [""] * len(generation.prompts)
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    skip = request.skip_special_tokens is not False
    return [
        text if isinstance(text, str) else serving.tokenizer.decode(ids, skip)
        for text, ids in zip(given if isinstance(given[0], (str, list)) else [given], generation.prompts, strict=True)
    ]


async def answer(serving: Serving, request: CompletionRequest, generation: Generation, ignored: Ignored) -> bytes:
    """The response's JSON."""
    echoes = _echoes(serving, request, generation)
    texts = [[echoes[sample.prompt_index]] for sample in generation.samples]
    logprobs = [_logprobs(serving, request) for _ in generation.samples]
    ends: dict[int, tuple[str | None, int | str | None]] = {}
    async for sample, update in generation.updates():
        texts[sample.index].append(update.text)
        if (collected := logprobs[sample.index]) is not None and update.logprobs is not None:
            collected.add(update.token_ids, update.logprobs)
        ends[sample.index] = (update.finish_reason, update.stop_reason)
    choices = [
        {
            "index": index,
            "text": "".join(texts[index]),
            "logprobs": collected.take() if collected is not None else None,
            "finish_reason": ends[index][0],
            "stop_reason": ends[index][1],
        }
        for index, collected in enumerate(logprobs)
    ]
    body = _encode(
        {
            "id": generation.id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
            "choices": choices,
            "usage": generation.usage.as_dict(),
        }
    )
    return body[:-1] + ignored.member + b"}"


async def events(
    serving: Serving, request: CompletionRequest, generation: Generation, ignored: Ignored
) -> AsyncGenerator[bytes, None]:
    """The response's events; the echo of a prompt comes first."""
    options = request.stream_options
    with_usage = options is not None and bool(options.include_usage)
    usage_always = with_usage and options is not None and bool(options.continuous_usage_stats)
    head = _encode(
        {
            "id": generation.id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
        }
    )[:-1]
    echoes = _echoes(serving, request, generation)
    before = [echoes[sample.prompt_index] for sample in generation.samples]
    logprobs = [_logprobs(serving, request) for _ in generation.samples]
    warnings = ignored.member
    async for sample, update in generation.updates():
        text, before[sample.index] = before[sample.index] + update.text, ""
        found = b"null"
        if (collected := logprobs[sample.index]) is not None and update.logprobs is not None:
            collected.add(update.token_ids, update.logprobs)
            found = _encode(collected.take())
        elif not text and update.finish_reason is None:  # held back: it may begin a stop string
            continue
        chunk = b'%b,"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}]' % (
            head,
            sample.index,
            _encode(text),
            found,
            _encode(update.finish_reason),
            _encode(update.stop_reason),
        )
        usage = b',"usage":' + _encode(generation.usage.as_dict()) if usage_always else b""
        yield event(chunk + usage + warnings + b"}")
        warnings = b""
    if with_usage:
        yield event(head + b',"choices":[],"usage":' + _encode(generation.usage.as_dict()) + b"}")


def _logprobs(serving: Serving, request: CompletionRequest) -> LegacyLogprobs | None:
    if request.logprobs is None:
        return None
    return LegacyLogprobs(serving.tokenizer, request.skip_special_tokens is not False)


@dataclass(slots=True)
class LegacyLogprobs:
    """OpenAI's log-probabilities of completions: parallel lists, and where in the text each token begins."""

    tokenizer: Tokenizer
    skip_special_tokens: bool
    _length: int = 0
    _utf8: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _tokens: list[str] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _tops: list[dict[str, float]] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)

    def add(self, token_ids: list[int], found: list[TokenLogprobs]) -> None:
        for token_id, at in zip(token_ids, found, strict=True):
            token, logprob = self._name(token_id), max(at.logprob, LOWEST_LOGPROB)
            self._tokens.append(token)
            self._logprobs.append(logprob)
            self._offsets.append(self._length)
            top = {self._name(i): max(p, LOWEST_LOGPROB) for i, p in zip(at.top_ids, at.top_logprobs, strict=True)}
            top.setdefault(token, logprob)
            self._tops.append(top)
            if not (self.skip_special_tokens and token_id in self.tokenizer.special_ids):
                self._length += len(self._utf8.decode(self.tokenizer.token_bytes(token_id)))

    def take(self) -> dict[str, Any]:
        """What was added since the last time."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._tokens, self._logprobs, self._tops, self._offsets = [], [], [], []
        return taken

    def _name(self, token_id: int) -> str:
        """The token's text; a part of a character has none, and is written in hexadecimal as OpenAI does."""
        text = self.tokenizer.token_text(token_id)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.tokenizer.token_bytes(token_id))
