"""An HTTP request that the ingress forwards to a replica, and what routing needs of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.replicas.routing import chunk_names

TOKEN_BYTES = 4  # average length of a token
MAX_TEXT_BYTES = 4 << 20  # routing considers only this much of a prompt: no replica has more of one cached
# Members of a body that form the prompt, in the order of their position in it.
PARTS = ("tools", "system", "instructions", "messages", "input", "prompt")
Head = tuple[int, list[tuple[bytes, bytes]]]  # status and headers of a response
SCOPE = (  # members of an ASGI scope that can be serialised
    *("type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers"),
    *("client", "server"),
)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request for a replica. `scope`: the serialisable members of its ASGI scope."""

    scope: dict[str, Any]
    body: bytes
    model: str | None  # the body's `model`
    num_tokens: int  # estimated length of the prompt
    chunk_names: Sequence[int]  # of the prompt; valid only in the process that computed them


def forwarded(scope: Mapping[str, Any], body: bytes) -> ForwardedRequest:
    """Return the request in the form that a replica takes. A body that is not a JSON object is left for the replica to
    refuse.
    """
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
    """Return numbers that stand for the prompt's tokens: they are equal as far as two prompts are equal."""
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
