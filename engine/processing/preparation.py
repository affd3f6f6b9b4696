"""Slow preparations of requests, in threads: grammars, long texts for the sampler."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.params.sampling import SamplingParams
from engine.structured.compile_threads import CompileThreads, ReleasedThreads
from engine.worker.parallel.cores import num_cores

COMPILE_THREADS = 2  # at most; one core stays free for requests without a grammar
FEW_TEXTS = 16  # tokenizing so few texts takes less time than a thread switch


class Preparation:
    """Threads that are fair between tenants."""

    def __init__(self) -> None:
        self._threads = ReleasedThreads(CompileThreads(max(min(COMPILE_THREADS, num_cores() - 1), 1)))

    async def run(
        self, prepare: Callable[[SamplingParams], SamplingParams], sampling: SamplingParams, tenant: str
    ) -> SamplingParams:
        """Return `prepare(sampling)`, computed in a thread if that may take long."""
        structured = sampling.structured_outputs
        texts = () if sampling.checked else (sampling.bad_words or (), sampling.dry_sequence_breakers or ())
        if (structured is None or structured.compiled is not None) and sum(map(len, texts)) + len(
            sampling.prediction or ""
        ) <= FEW_TEXTS:
            return prepare(sampling)
        return await self._threads.run(tenant, prepare, sampling)

    def close(self) -> None:
        self._threads.shutdown()
