"""The forms in which `LLM` takes prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Prompt: TypeAlias = str | Mapping[str, Any] | list[int]  # text, {"prompt": …}, {"prompt_token_ids": …}, token ids

_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt, or several, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, list) and prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a text, token ids, or a list of prompts, got {type(prompts).__name__}")
    return list(prompts)  # type: ignore[arg-type]


class GivenPrompt(NamedTuple):
    """A prompt's text or token ids, and what goes with them."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str
    images: Any = None  # one or several, each for a placeholder; None: there is none


def read_prompt(prompt: Prompt) -> GivenPrompt:
    """Return the parts of a prompt. Raises `ValueError`."""
    given: Mapping[str, Any]
    if isinstance(prompt, str):
        given = {"prompt": prompt}
    elif isinstance(prompt, Mapping):
        given = prompt
    else:
        given = {"prompt_token_ids": prompt}
    for key in given:
        if key not in _KEYS:
            raise ValueError(f"a prompt may have {', '.join(_KEYS)}, got {key!r}")
    text, token_ids, cache_salt = given.get("prompt"), given.get("prompt_token_ids"), given.get("cache_salt") or ""
    if text is None and token_ids is None:
        raise ValueError("a prompt must have 'prompt' or 'prompt_token_ids'")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"'prompt' must be a text, got {type(text).__name__}")
    if not isinstance(cache_salt, str):
        raise ValueError(f"'cache_salt' must be a text, got {type(cache_salt).__name__}")
    if token_ids is not None:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
            raise ValueError(f"'prompt_token_ids' must be a list of integers, got {type(token_ids).__name__}")
        token_ids = list(token_ids)
        if not set(map(type, token_ids)) <= {int}:
            raise ValueError("'prompt_token_ids' must be a list of integers")
    return GivenPrompt(text, token_ids, cache_salt, _images(given.get("multi_modal_data")))


def _images(data: Any) -> Any:
    if data is None:
        return None
    if not isinstance(data, Mapping) or data.keys() != {"image"}:
        raise ValueError("'multi_modal_data' must be {'image': one image or a list of images}")
    return data["image"]
