"""Decides whether a waiting request's prefix is loaded from host memory or the file, or computed."""

from __future__ import annotations

from engine.core import tiers
from engine.core.host_load import NOTHING_TO_LOAD
from engine.core.kv.prefix_matcher import PrefixMatcher
from engine.core.request import Request
from engine.core.tiers import IN_HOST, HostTier


class PrefixLoads:
    """Begins loads of what the tiers below the device have of a request's prefix."""

    def __init__(self, tier: HostTier, prefixes: PrefixMatcher, block_size: int, keeps_all: bool) -> None:
        """`keeps_all`: every group keeps the blocks of all tokens."""
        self._tier, self._prefixes, self._size, self._keeps_all = tier, prefixes, block_size, keeps_all

    def awaits(self, request: Request, num_spare: int) -> bool:
        """Return whether a waiting request should wait for blocks of its prefix. Begins to load them, once for each
        time that the request starts, as soon as `num_spare` blocks of each group remain free beside the request.
        """
        tier, size = self._tier, self._size
        if not request.reads_cache:
            return False
        if request.load is None:
            on_device = self._prefixes.match(request)
            tables = self._prefixes.match(request, in_host=True)
            num_tokens = (len(tables[0]) - len(on_device[0])) * size
            at = [(g, i) for g, table in enumerate(tables) for i, block_id in enumerate(table) if block_id == IN_HOST]
            names = [(g, self._prefixes.hash(request, i)) for g, i in at]
            if names and num_tokens >= tiers.MIN_LOADED_TOKENS:
                rest = -(-request.num_tokens // size) - len(tables[0]) if self._keeps_all else 0
                load = None if tier.must_wait(names) else tier.begin(tables, names, num_spare + rest)
                if load is None:
                    return True
                request.load = load
            else:
                request.load = NOTHING_TO_LOAD
            if not request.scheduled_time:
                tier.record(request.num_prompt_tokens - len(on_device[0]) * size, request.load, num_tokens)
        return not request.load.is_done
