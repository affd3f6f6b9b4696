"""/v1/completions: text or token ids in, their continuation out, whole or streamed. Knows the shapes; runs no engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from engine.core.batch import TokenLogprobs
from engine.output_collector import RequestUpdate
from server.generation.guided import guided
from server.generation.served_model import Generation, Serving
from server.http.fields import Ignored
from server.http.sse import event
from server.openai.logprobs import LegacyLogprobs, prompt_logprobs
from server.openai.protocol import CompletionRequest

_encode = msgspec.json.encode
_TEXT_EVENT = (
    b'data: %b,"choices":[{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)
DEFAULT_MAX_TOKENS = 16


async def begin(serving: Serving, request: CompletionRequest) -> Generation:
    """Check everything and start the answers."""
    serving.check_model(request.model)
    scores = request.logprobs if request.scores_prompts and request.prompt_logprobs is None else request.prompt_logprobs
    sampling = serving.sampling(
        request,
        max_tokens=1 if request.only_echoes else request.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
        prompt_logprobs=scores,
        renamed={},
    )
    prompts = await serving.encoded(request.prompt, request.add_special_tokens is not False)
    room = sampling.max_tokens or 1
    prompts = [serving.truncated(prompt, request.truncate_prompt_tokens, room) for prompt in prompts]
    sampling = await guided(serving, request, sampling)
    return serving.generate("cmpl-", request, prompts, sampling, {})


def _echoes(serving: Serving, request: CompletionRequest, generation: Generation) -> list[str]:
    """What stands before the answer to each prompt."""
    if not request.echo:
        return [""] * len(generation.prompts)
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    skip = request.skip_special_tokens is not False
    whole = request.truncate_prompt_tokens is None
    return [
        text if isinstance(text, str) and whole else serving.tokenizer.decode(ids, skip)
        for text, ids in zip(given if isinstance(given[0], (str, list)) else [given], generation.prompts, strict=True)
    ]


class _Choice:
    """One answer while it is made."""

    def __init__(self, serving: Serving, request: CompletionRequest, prompt: list[int]) -> None:
        self._request, self._prompt = request, prompt
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: LegacyLogprobs | None = None
        if request.logprobs is not None:
            skip, as_ids = request.skip_special_tokens is not False, bool(request.return_tokens_as_token_ids)
            self._logprobs = LegacyLogprobs(serving.tokenizer, skip, as_ids)
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def begin(self, echo: str, scores: list[TokenLogprobs] | None) -> None:
        """The prompt's text, and the log-probabilities of its tokens."""
        self._text.append(echo)
        if scores is not None and self._logprobs is not None and self._request.echo:
            self._logprobs.add_prompt(self._prompt, scores)

    def add(self, update: RequestUpdate) -> None:
        self._finish_reason, self._stop_reason = update.finish_reason, update.stop_reason
        if self._request.only_echoes:  # the one token that was generated is nobody's
            self._finish_reason, self._stop_reason = update.finish_reason and "length", None
            return
        self._text.append(update.text)
        if self._request.return_token_ids:
            self._token_ids += update.token_ids
        if self._logprobs is not None and update.logprobs is not None:
            self._logprobs.add(update.token_ids, update.logprobs)

    def take(self, index: int) -> dict[str, Any] | None:
        """What is new, in the API's shape; None when there is nothing to say yet."""
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
        if self._request.return_token_ids:
            choice["token_ids"], self._token_ids = self._token_ids, []
        return choice


async def answer(serving: Serving, request: CompletionRequest, generation: Generation, ignored: Ignored) -> bytes:
    """The response's JSON."""
    updates: list[list[RequestUpdate]] = [[] for _ in generation.samples]
    async for sample, update in generation.updates():
        updates[sample.index].append(update)
    if request.only_echoes:
        generation.usage.completion_tokens = 0
    scores = [updates[sample.index][0].prompt_logprobs for sample in generation.samples[:: generation.n]]
    echoes = _echoes(serving, request, generation)
    choices = []
    for sample in generation.samples:
        at = sample.prompt_index
        choice = _Choice(serving, request, generation.prompts[at])
        choice.begin(echoes[at], scores[at])
        for update in updates[sample.index]:
            choice.add(update)
        taken = choice.take(sample.index) or {}
        if request.return_token_ids:
            taken["prompt_token_ids"] = generation.prompts[at]
        if request.prompt_logprobs is not None and (found := scores[at]) is not None:
            taken["prompt_logprobs"] = prompt_logprobs(serving.engine.tokenizer, generation.prompts[at], found)
        choices.append(taken)
    body = _encode(
        {
            "id": generation.id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
            "choices": choices,
            "usage": generation.usage.as_dict(),
            "metrics": generation.timings_as_dict(),
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
    choices: dict[int, _Choice] = {}
    warnings = ignored.member
    only_text = not (usage_always or request.return_token_ids or request.only_echoes or request.logprobs is not None)
    async for sample, update in generation.updates():
        index, at = sample.index, sample.prompt_index
        is_first = index not in choices
        if (
            only_text and not (is_first or warnings) and update.finish_reason is None
        ):  # nearly all are such: the same bytes as below
            if update.text:
                yield _TEXT_EVENT % (head, index, _encode(update.text))
            continue
        if is_first:
            choices[index] = _Choice(serving, request, generation.prompts[at])
            choices[index].begin(echoes[at], update.prompt_logprobs)
        choices[index].add(update)
        if request.only_echoes:
            generation.usage.completion_tokens = 0
        taken = choices[index].take(index)
        if taken is None:  # held back: it may begin a stop string
            continue
        if is_first and request.return_token_ids:
            taken["prompt_token_ids"] = generation.prompts[at]
        usage = b',"usage":' + _encode(generation.usage.as_dict()) if usage_always else b""
        yield event(b'%b,"choices":[%b]%b%b}' % (head, _encode(taken), usage, warnings))
        warnings = b""
    if with_usage:
        usage, metrics = _encode(generation.usage.as_dict()), _encode(generation.timings_as_dict())
        yield event(b'%b,"choices":[],"usage":%b,"metrics":%b}' % (head, usage, metrics))
