"""An HTTP request on its way from the ingress to a replica, and what routing reads of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.routing import chunk_names

TOKEN_BYTES = 4  # of a text, on average
MAX_TEXT_BYTES = 4 << 20  # of a prompt that routing looks at: no replica has more of one cached
# Members of a body that make the prompt, in the order in which they stand in it.
PARTS = ("tools", "system", "instructions", "messages", "input", "prompt")
Head = tuple[int, list[tuple[bytes, bytes]]]  # status and headers of a response
SCOPE = (  # what of an ASGI scope can be sent
    *("type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers"),
    *("client", "server"),
)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """`scope`: what of its ASGI scope can be sent."""

    scope: dict[str, Any]
    body: bytes
    model: str | None  # that the body names
    num_tokens: int  # of the prompt, about
    chunk_names: Sequence[int]  # of the prompt, known in the process that made them only


def forwarded(scope: Mapping[str, Any], body: bytes) -> ForwardedRequest:
    """The request as a replica can take it. A body that is no JSON object goes as it is, for the replica to refuse."""
    head = {name: scope[name] for name in SCOPE if name in scope}
    try:
        decoded = msgspec.json.decode(body) if body else None
    except (ValueError, RecursionError):
        decoded = None
    fields = decoded if isinstance(decoded, dict) else {}
    tokens = prompt_tokens(fields)
    model, salt = fields.get("model"), fields.get("cache_salt")
    names = chunk_names(tokens, salt if isinstance(salt, str) else "")
    return ForwardedRequest(head, body, model if isinstance(model, str) else None, len(tokens), names)


def prompt_tokens(fields: Mapping[str, Any]) -> Sequence[int]:
    """Stand-ins for the tokens of a request's prompt: numbers that are equal as far as two prompts are."""
    text = bytearray()
    for name in PARTS:
        part = fields.get(name)
        for item in part if isinstance(part, list) else [part]:
            if item is not None:
                text += _encode(item)
            if len(text) > MAX_TEXT_BYTES:
                del text[MAX_TEXT_BYTES:]
                break
    return array("I", bytes(text) + bytes(-len(text) % TOKEN_BYTES))
