"""Log-probabilities of sampled tokens and of prompts, being copied from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import kernels
from engine.core.batch import PromptScores, SchedulerOutput, TokenLogprobs
from engine.worker.input_batch import InputBatch, Members, PackedStep

MAX_ELEMENTS = 1 << 24  # most logits of prompt tokens held at a time


@dataclass(slots=True)
class SampledLogprobs:
    """Log-probabilities of some samples of a step: the batch index of each one's request, in ascending order, and the
    tensors of `kernels.token_logprobs`.
    """

    requests: list[int]
    num_top: list[int]
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    named_ids: list[list[int]]  # each request's `logprob_token_ids`
    named: Tensor | None  # their log-probabilities, concatenated; None: none requested

    @classmethod
    def of(
        cls,
        members: Members,
        indices: list[int],
        logits: Tensor,
        tokens: Tensor,
        to_device: Callable[[Tensor], Tensor],
    ) -> SampledLogprobs:
        """Compute them for the samples at `indices`. logits [S, V], tokens [S]: the step's. Does not wait."""
        asked = [members.samples.rows[i].sampling for i in indices]
        named_ids = [each.logprob_token_ids or [] for each in asked]
        num_top = [0 if ids else each.logprobs or 0 for each, ids in zip(asked, named_ids, strict=True)]
        at = to_device(torch.tensor(indices))
        own, sampled = logits[at], tokens[at].clamp(min=0)
        tensors = kernels.token_logprobs(own, sampled, max(num_top))
        named = None
        if pairs := [(row, token_id) for row, ids in enumerate(named_ids) for token_id in ids]:
            rows, columns = to_device(torch.tensor(pairs)).unbind(1)
            totals = own.gather(1, sampled.unsqueeze(1)).squeeze(1).float() - tensors[0]
            named = (own[rows, columns].float() - totals[rows]).to("cpu", non_blocking=True)
        requests = [members.samples.request_of(i) for i in indices]
        return cls(requests, num_top, _to_cpu(tensors), named_ids, named)

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """Return request's index → one entry for each of its samples. Call it when the step is done."""
        records, values = _records(self.tensors, self.num_top), iter(() if self.named is None else self.named.tolist())
        for row, ids in enumerate(self.named_ids):
            if ids:
                ordered = sorted(((next(values), token_id) for token_id in ids), key=lambda pair: -pair[0])
                logprobs, top_ids = map(list, zip(*ordered, strict=True))
                records[row] = replace(records[row], top_ids=top_ids, top_logprobs=logprobs)
        found: dict[int, list[TokenLogprobs]] = {}
        for request, record in zip(self.requests, records, strict=True):
            found.setdefault(request, []).append(record)
        return found


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of a step's prompt tokens. Parts: batch index, first token, number of top tokens, tensors."""

    parts: list[tuple[int, int, int, tuple[Tensor, Tensor, Tensor, Tensor]]] = field(default_factory=list)

    @staticmethod
    def indices(output: SchedulerOutput, batch: InputBatch) -> list[int]:
        """Return the indices of requests with log-probabilities to compute in a step that is not packed yet."""
        if not batch.num_scored:
            return []
        return [
            i
            for i, request_id in enumerate(output.batch.request_ids)
            if (row := batch.rows[request_id]).sampling.prompt_logprobs is not None
            and batch.num_computed(row) + 1 < row.num_prompt_tokens
        ]

    @classmethod
    def of(
        cls, packed: PackedStep, indices: Sequence[int], to_logits: Callable[[slice], Tensor],
        vocab_size: int, to_device: Callable[[Tensor], Tensor],
    ) -> PromptLogprobs:  # fmt: skip
        """Compute them for the requests at `indices`. to_logits(tokens): logits of some of the step's tokens."""
        scores, members = cls(), packed.members
        num_rows = max(MAX_ELEMENTS // vocab_size, 1)
        for i in indices:
            row, end = members.rows[i], int(packed.context_lens[i])
            begin, stop = int(members.query_start[i]), int(members.query_start[i + 1])
            first, num_top = end - (stop - begin) + 1, row.sampling.prompt_logprobs
            assert num_top is not None
            following = row.token_ids[first : min(end + 1, row.num_prompt_tokens)]
            tokens = to_device(torch.from_numpy(following)).long()
            for start in range(0, len(tokens), num_rows):
                part = tokens[start : start + num_rows]
                logits = to_logits(slice(begin + start, begin + start + len(part)))
                found = kernels.token_logprobs(logits, part, max(num_top, 1))  # the top token reveals NaN and infinity
                scores.parts.append((i, first, num_top, _to_cpu(found)))
        return scores

    def read(self) -> dict[int, PromptScores]:
        """Return index → log-probabilities of the tokens after those computed. Call it when the step is done."""
        found: dict[int, PromptScores] = {}
        corrupted = {index for index, _, _, (*_, top) in self.parts if not top[:, 0].isfinite().all()}
        for index, first, num_top, tensors in self.parts:
            records = _records(tensors, [num_top] * len(tensors[0]))
            scores = found.setdefault(index, PromptScores(first, []))
            if index not in corrupted:
                scores.logprobs.extend(records)
        return found


def _to_cpu(tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Start copying tensors to the CPU. They are valid when the step is done."""
    return tuple(t.to("cpu", non_blocking=True) for t in tensors)  # type: ignore[return-value]


def _records(tensors: tuple[Tensor, Tensor, Tensor, Tensor], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs, ranks, top_ids, top_logprobs = (t.tolist() for t in tensors)
    return [
        TokenLogprobs(logprobs[i], ranks[i], top_ids[i][:top], top_logprobs[i][:top]) for i, top in enumerate(num_top)
    ]
