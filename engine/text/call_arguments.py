"""Arguments of tool calls in a conversation's history, as clients send them back: complete, cut off, or malformed."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic_core

# The name under which text that is not a JSON object is kept, also in answers of /v1/messages, as Anthropic's API does.
INVALID = "INVALID_JSON"
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})(?:\\u([dD][c-fC-F][0-9a-fA-F]{2}))?|u([dD][c-fC-F][0-9a-fA-F]{2})|.)", re.S
)


def read_arguments(given: Any) -> tuple[dict[str, Any], bool]:
    """Return a call's arguments as an object, and whether that is what was given.

    Nothing, null and empty text stand for no arguments. Of an object that was cut off, what can be read remains.
    Anything else is kept under `INVALID`.
    """
    if isinstance(given, dict):
        text = given.get(INVALID)
        if len(given) == 1 and isinstance(text, str):
            return read_arguments(text)
        return given, True
    if given is None:
        return {}, True
    if not isinstance(given, str):
        return {INVALID: json.dumps(given, ensure_ascii=False)}, False
    text = without_lone_escapes(given.strip())
    if not text:
        return {}, True
    try:
        found = json.loads(text, strict=False)
        if isinstance(found, dict):
            return found, text == given.strip()
        if found is None:
            return {}, True
    except (ValueError, RecursionError):
        found = _beginning(text)
    return (found if isinstance(found, dict) and found else {} if text == "{" else {INVALID: text}), False


def _beginning(text: str) -> Any:
    """Return what can be read of JSON that was cut off; None if nothing can."""
    if not text.startswith("{"):
        return None
    try:
        found = pydantic_core.from_json(text, allow_partial="trailing-strings")
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found


def without_lone_escapes(text: str) -> str:
    """Replace escapes of single surrogates in JSON by U+FFFD, since no text can contain them."""
    if "\\u" not in text:
        return text
    return _ESCAPE.sub(_replaced, text)


def _replaced(match: re.Match[str]) -> str:
    high, low, alone = match.groups()
    return r"\ufffd" if alone or (high and not low) else match[0]
