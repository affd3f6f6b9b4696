"""Lone surrogates: halves of characters, which clients leave where they cut a text in UTF-16, and which no text may
have.
"""

from __future__ import annotations

import re

REPLACED = "quire.replaced_surrogates"  # key in the ASGI scope of requests whose body had some
WARNING = "half of a character (a lone surrogate) was replaced by U+FFFD"
# An escape of one, after an even number of backslashes; a high one and a low one behind it are a character.
_ESCAPED = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u(?:[dD][89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[dD][c-fC-F][0-9a-fA-F]{2})"
)
_ENCODED = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


def replace_lone_surrogates(data: bytes) -> bytes:
    """Return JSON in which each lone surrogate, as an escape or encoded like UTF-8, is U+FFFD."""
    return _ENCODED.sub("\ufffd".encode(), _ESCAPED.sub(_replaced, data))


def _replaced(match: re.Match[bytes]) -> bytes:
    return match[0] if match[2] else match[1] + rb"\ufffd"
