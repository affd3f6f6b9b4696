"""Verifies drafts: a request keeps the tokens that plain decoding would have sampled, one after another.

A draft is a single token, not a distribution: standard rejection sampling accepts it with its probability p(x), else it
samples from p without x. That is what comparing with a sample of p does, so both give the same distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.worker.input_batch import BatchSamples
from engine.worker.sampling.imposed import ImposedAcceptance


@dataclass(frozen=True, slots=True)
class Verification:
    """The drafts of a step, to be compared with its samples.

    A request's first sample follows its newest token. Sample j + 1 is of a context that ends in draft j, so it counts
    if sample j is draft j.
    """

    samples: BatchSamples
    indices: Mapping[str, int]  # request id -> index in the batch
    drafts: Mapping[str, Sequence[int]]  # by request id
    positions: np.ndarray  # [S]: of the sampled tokens
    imposed: ImposedAcceptance | None = None  # decides instead

    def kept(self, token_ids: Sequence[int], unsampled: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens that the requests keep, in batch order, and the number of each. `token_ids`: of all
        samples. The `unsampled` ones have no token, and those after them are not kept.
        """
        drafts = {self.indices[request_id]: tokens for request_id, tokens in self.drafts.items()}
        missing, kept, counts = set(unsampled), list[int](), list[int]()
        for i in range(self.samples.num_requests):
            count = 0
            for sample, draft in zip(self.samples.of_request(i), (*drafts.get(i, ()), None), strict=True):
                if sample in missing:
                    break
                count += 1
                is_accepted = draft is not None and self._accepts(sample, token_ids[sample], draft)
                kept.append(draft if is_accepted and draft is not None else token_ids[sample])
                if not is_accepted:
                    break
            counts.append(count)
        return kept, counts

    def _accepts(self, sample: int, token_id: int, draft: int) -> bool:
        if self.imposed is None:
            return token_id == draft
        return token_id >= 0 and bool(self.imposed.accepts(int(self.positions[sample])))
