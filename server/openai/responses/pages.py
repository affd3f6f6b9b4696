"""Pages of lists, as OpenAI's API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
After = str | None  # the id of the last item of the page before


def page(items: list[dict[str, Any]], limit: int, order: str, after: str | None) -> dict[str, Any]:
    """`items`: the oldest first."""
    items = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        items = items[ids.index(after) + 1 :] if after in ids else []
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }
