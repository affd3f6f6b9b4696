"""The sampling parameters of a request: the client's values, completed for the model in a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine import SamplingParams
from server.generation.conversation import Prompt
from server.generation.errors import invalid
from server.generation.guided import guided
from server.generation.model import Model
from server.generation.request import GenerationRequest
from server.generation.warnings import Warnings
from server.parsing.harmony import ENDS

Changes = dict[str, Any]  # fields of `SamplingParams`


def given_values(model: Model, request: GenerationRequest) -> SamplingParams:
    """Return the request's values; unset ones take the model's defaults, then those of `SamplingParams`."""
    defaults = {"max_tokens": request.default_max_tokens, **model.info.default_sampling}
    try:
        return SamplingParams(**{**defaults, **request.sampling})
    except ValueError as error:
        raise invalid(error) from None


async def completed(
    model: Model, request: GenerationRequest, prompt: Prompt, sampling: SamplingParams, warnings: Warnings
) -> SamplingParams:
    """Return `sampling` as the engine takes it: with what the model's format needs, checked, with a grammar if one is
    needed.

    Call it once for all samples of a request. Adds to `warnings` what has no effect.
    """
    changes: Changes = {}
    for step in _STEPS:
        changes |= step(model, request, prompt, sampling, warnings)
    try:
        sampling = sampling.clone(**changes) if changes else sampling
        sampling = await model.engine.prepare(sampling, request.tenant)
    except ValueError as error:
        raise invalid(error) from None
    for name in ("logprobs", "prompt_logprobs"):
        if request.sampling.get(name) == -1 and (most := getattr(sampling, name)) < _vocab_size(model):
            warnings.add(f"-1 asks for all tokens: the server returns at most {most} (--max-logprobs)", name)
    return await guided(model, request, prompt, sampling, warnings)


def _vocab_size(model: Model) -> int:
    return model.info.tokenizer.vocab_size if model.info.tokenizer is not None else 0


def limited(model: Model, prompt: list[int], sampling: SamplingParams) -> SamplingParams:
    """Return `sampling` with `max_tokens` limited to the remaining context."""
    left = model.info.max_model_len - len(prompt)
    max_tokens = left if sampling.max_tokens is None else min(left, sampling.max_tokens)
    if max_tokens == sampling.max_tokens:
        return sampling
    try:
        return sampling.clone(max_tokens=max_tokens)
    except ValueError as error:
        raise invalid(error) from None


def _visible_marks(
    model: Model, request: GenerationRequest, prompt: Prompt, sampling: SamplingParams, warnings: Warnings
) -> Changes:
    """Keep special tokens in the text if they mark reasoning or tool calls, so that the parsers see them."""
    if (chat := prompt.chat) is None:
        return {}
    marks = [chat.reasoning_format.end] if chat.reasoning_format is not None else []
    if (format := chat.format_for(request)) is not None:
        marks += format.special_marks
    is_special = any(model.tokenizer.token_to_id(mark) in model.tokenizer.special_ids for mark in marks)
    return {"skip_special_tokens": False} if is_special else {}


def _ends_of_messages(
    model: Model, request: GenerationRequest, prompt: Prompt, sampling: SamplingParams, warnings: Warnings
) -> Changes:
    """Stop at the tokens that end an output in gpt-oss's harmony format."""
    if prompt.chat is None or not prompt.chat.writes_harmony:
        return {}
    ends = [i for i in map(model.tokenizer.token_to_id, ENDS) if i is not None]
    return {"stop_token_ids": [*(sampling.stop_token_ids or ()), *ends]}


def _thinking_budget(
    model: Model, request: GenerationRequest, prompt: Prompt, sampling: SamplingParams, warnings: Warnings
) -> Changes:
    """Add the tokens that delimit the reasoning, for its token budget; without such tokens drop the budget."""
    if sampling.thinking_token_budget is None:
        return {}
    if prompt.chat is not None and (marks := prompt.chat.reasoning_format) is not None:
        begin, end = model.tokenizer.token_to_id(marks.begin), model.tokenizer.token_to_id(marks.end)
        if end is not None and (begin is not None or prompt.in_reasoning):
            return {"thinking_marks": (-1 if prompt.in_reasoning or begin is None else begin, end)}
    warnings.add("has no effect here: the reasoning is not delimited by single tokens", "thinking_token_budget")
    return {"thinking_token_budget": None}


_STEPS: tuple[Callable[[Model, GenerationRequest, Prompt, SamplingParams, Warnings], Changes], ...] = (
    _visible_marks,
    _ends_of_messages,
    _thinking_budget,
)
