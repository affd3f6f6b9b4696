"""What the API reference says of an endpoint, and examples that several of them use.

In the examples `MODEL` stands for the name of the model that is served.
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
    """A method and a path."""

    method: str
    path: str
    tag: str
    summary: str
    description: str = ""
    requests: dict[str, Any] = field(default_factory=dict)  # title → JSON body
    answer: Any = None  # JSON of a whole answer to the first of them; None: see `text`
    text: str | None = None  # an answer that is no JSON
    events: str | None = None  # the beginning and the end of a stream
    lines: str | None = None  # the same of a stream of JSON objects, one in each line
    statuses: tuple[int, ...] = ()  # errors besides those that all endpoints of the tag may give
