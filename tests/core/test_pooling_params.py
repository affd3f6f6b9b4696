"""Refusals of the parameters of embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.params.pooling import PoolingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "first"}, "pooling must be last, mean or cls, got 'first'"),
        ({"dimensions": 0}, "dimensions must be at least 1, got 0"),
    ],
)
def test_values_out_of_range_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolingParams(**fields)
