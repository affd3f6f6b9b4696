"""Prefixes that requests have in common, by their block tables."""

from types import SimpleNamespace
from typing import Any

from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.core.kv.common_prefix import CommonPrefixes


def tables(*blocks: list[int]) -> list[Any]:
    return [SimpleNamespace(block_tables=[[], table]) for table in blocks]


def test_which_tables_count() -> None:
    """Enough of them, long enough, with the same block at one place."""
    prefixes = CommonPrefixes.of([CacheGroup(window=8), FULL], 4, 12, 3)
    assert prefixes == CommonPrefixes(1, 2, 3)
    same = [[1, 2, 3, i] for i in range(10, 13)]
    assert prefixes.among(tables(*same))
    assert prefixes.among(tables([5, 6, 7], *same, [8, 9, 10]))
    assert not prefixes.among(tables(*same[:2], [1, 2], [4, 5, 6]))
    assert not prefixes.among(tables([1, 2, 3], [1, 2, 4], [1, 2, 5], [6, 7, 3]))
    assert not prefixes.among(tables([1, 2, 3], [1, 2, 3], [4, 5, 6], [4, 5, 6]))
    assert not prefixes.among([])


def test_layers_that_forget_tokens_have_none() -> None:
    assert CommonPrefixes.of([CacheGroup(window=8), CacheGroup(is_state=True)], 4, 12, 3) is None
