"""Pages of lists, as OpenAI's API has them."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query

from server.openai.responses.store import Items

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
After = str | None  # the id of the last item of the page before


def page(items: Items, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """The list's object, for msgspec. `after` an id that is not there is nothing."""
    ids = iter(items) if order == "asc" else reversed(items)
    if after is not None:
        _ = after in ids  # which reads up to it
    shown = list(islice(ids, limit))
    return {
        "object": "list",
        "data": [msgspec.Raw(items[item_id]) for item_id in shown],
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": next(ids, None) is not None,
    }
