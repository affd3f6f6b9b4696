"""The description of an endpoint in the API reference, and shared examples.

In examples, `MODEL` stands for the name of the served model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL = "MODEL"

HELLO = [{"role": "user", "content": "Hello!"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CREATED = 1767225600
USAGE = {
    "prompt_tokens": 9,
    "total_tokens": 12,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
}


@dataclass(frozen=True)
class Endpoint:
    """An endpoint: a method and a path."""

    method: str
    path: str
    tag: str
    summary: str
    description: str = ""
    requests: dict[str, Any] = field(default_factory=dict)  # title → JSON body
    answer: Any = None  # JSON of a complete answer to the first request; None: see `text`
    text: str | None = None  # an answer that is not JSON
    events: str | None = None  # the start and the end of a stream of events
    lines: str | None = None  # the same for a stream of JSON lines
    statuses: tuple[int, ...] = ()  # errors besides those common to all endpoints of the tag
