"""Pagination of lists, as in OpenAI's API."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query

from server.apis.openai.responses.store import Items

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
After = str | None  # id of the last item of the previous page


def page(items: Items, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """Return one page as an object for msgspec. The page is empty if `after` is an unknown id."""
    ids = iter(items) if order == "asc" else reversed(items)
    if after is not None:
        _ = after in ids  # advances the iterator past `after`
    shown = list(islice(ids, limit))
    return {
        "object": "list",
        "data": [msgspec.Raw(items[item_id]) for item_id in shown],
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": next(ids, None) is not None,
    }
