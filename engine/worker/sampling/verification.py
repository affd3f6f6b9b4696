"""Verifies drafts: a request keeps the tokens that plain decoding would have sampled, one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.worker.input_batch import BatchSamples


@dataclass(frozen=True, slots=True)
class Verification:
    """The drafts of a step, to be compared with its samples.

    A request's first sample follows its newest token. Sample j + 1 is of a context that ends in draft j, so it counts
    if sample j is draft j.
    """

    samples: BatchSamples
    indices: Mapping[str, int]  # request id -> index in the batch
    drafts: Mapping[str, Sequence[int]]  # by request id

    def kept(self, token_ids: Sequence[int], unsampled: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens that the requests keep, in batch order, and the number of each. `token_ids`: of all
        samples. The `unsampled` ones have no token, and those after them are not kept.
        """
        drafts = {self.indices[request_id]: tokens for request_id, tokens in self.drafts.items()}
        missing, kept, counts = set(unsampled), list[int](), list[int]()
        for i in range(self.samples.num_requests):
            of_request, count = self.samples.of_request(i), 0
            for sample, draft in zip(of_request, (*drafts.get(i, ()), None), strict=True):
                if sample in missing:
                    break
                count += 1
                if token_ids[sample] != draft:
                    break
            kept += token_ids[of_request.start : of_request.start + count]
            counts.append(count)
        return kept, counts
